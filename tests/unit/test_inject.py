"""Planned faults: the plan is reproducible, has the stated rate, and covers every boundary."""

from __future__ import annotations

from collections import Counter

from farm.inject import BOUNDARIES, FaultPlan
from farm.types import Boundary


def planned(plan: FaultPlan, episodes: list[str]) -> dict[str, Boundary]:
    found = {episode: plan.boundary(episode, 1) for episode in episodes}
    return {episode: boundary for episode, boundary in found.items() if boundary is not None}


def test_rate_and_boundaries() -> None:
    episodes = [f"episode-{i}" for i in range(20_000)]
    found = planned(FaultPlan(rate=0.031, seed=7), episodes)
    assert 0.027 < len(found) / len(episodes) < 0.035
    counts = Counter(found.values())
    assert set(counts) == set(BOUNDARIES)
    assert min(counts.values()) > 0.6 * max(counts.values())


def test_same_seed_same_plan_and_a_retry_draws_anew() -> None:
    plan = FaultPlan(rate=0.5, seed=1)
    episodes = [f"episode-{i}" for i in range(200)]
    assert planned(plan, episodes) == planned(FaultPlan(rate=0.5, seed=1), episodes)
    assert planned(plan, episodes) != planned(FaultPlan(rate=0.5, seed=2), episodes)
    assert any(plan.boundary(e, 1) != plan.boundary(e, 2) for e in episodes)


def test_zero_and_one() -> None:
    assert planned(FaultPlan(rate=0.0, seed=0), ["a", "b"]) == {}
    assert len(planned(FaultPlan(rate=1.0, seed=0), ["a", "b"])) == 2
