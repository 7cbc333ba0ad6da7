"""What a run is said to have cost: the figures by hand, from the list prices of an hour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from makers import failure, graded, row

from farm.types import Boundary, Event, FailedAttempt, Trajectory, Usage
from harness.cost import cost, paid_s, prices, usd_per_s

T0 = 1_800_000_000.0
SIZE = {"e2b": {"vcpus": 2, "memory_mb": 1024}}
HOUR_USD = 2 * 0.0504 + 1 * 0.0162  # E2B's list prices: per vCPU and hour, per GiB and hour


def event(name: str, start_s: float, end_s: float) -> Event:
    return Event(name=name, start_at_s=T0 + start_s, end_at_s=T0 + end_s)


def tried(kind: str, start_s: float, end_s: float) -> FailedAttempt:
    return replace(failure(1, Boundary.SANDBOX_START, kind=kind), started_at_s=T0 + start_s, ended_at_s=T0 + end_s)


def episode(reward: float = 1.0, *, prior: tuple[FailedAttempt, ...] = ()) -> Trajectory:
    """From 1000 to 2000 s: 300 s until it had a place, 500 s of work, 60 s until it had another, 140 s of grading."""
    return replace(
        row("g", 0, graded(reward)),
        started_at_s=T0 + 1000.0,
        ended_at_s=T0 + 2000.0,
        timeline=(
            event("queued", 0.0, 1000.0),
            event("sandbox_start", 1000.0, 1300.0),
            event("exec", 1300.0, 1500.0),
            event("generate", 1500.0, 1800.0),
            event("sandbox_start", 1800.0, 1860.0),
            event("grade", 1860.0, 2000.0),
        ),
        usage=Usage(prompt_tokens=100, cached_tokens=40, output_tokens=7, sandbox_cpu_s=3.0, worker_cpu_s=0.5),
        prior=prior,
    )


def test_an_hour_of_two_cores_and_a_gibibyte_costs_what_the_list_says() -> None:
    price = usd_per_s("e2b", prices(), SIZE)
    assert price is not None
    assert price * 3600 == pytest.approx(HOUR_USD)
    bigger = usd_per_s("e2b", prices(), {"e2b": {"vcpus": 4, "memory_mb": 8192}})
    assert bigger == pytest.approx((4 * 0.0504 + 8 * 0.0162) / 3600)


@pytest.mark.parametrize(("sandbox", "config"), [("bubblewrap", SIZE), ("e2b", {}), ("docker", {"docker": {}})])
def test_what_has_no_price_or_no_size_is_not_priced(sandbox: str, config: dict[str, Any]) -> None:
    assert usd_per_s(sandbox, prices(), config) is None
    assert cost([episode()], sandbox, prices(), config)["total"]["usd"] is None


@pytest.mark.parametrize(
    ("prior", "seconds"),
    [
        ((), 640.0),  # no wait for a place, but the pauses between the commands
        ((tried("lost", 0.0, 200.0), tried("stalled", 300.0, 350.0)), 640.0 + 250.0),
        ((tried("account_wait", 0.0, 900.0),), 640.0),
    ],
)
def test_what_is_paid_for(prior: tuple[FailedAttempt, ...], seconds: float) -> None:
    assert paid_s(episode(prior=prior)) == pytest.approx(seconds)


def test_a_run_of_two() -> None:
    rows = [episode(1.0, prior=(tried("lost", 0.0, 160.0),)), episode(0.0)]
    found = cost(rows, "e2b", prices(), SIZE)
    usd = (640.0 + 160.0 + 640.0) / 3600 * HOUR_USD
    assert found["total"]["usd"] == pytest.approx(usd)
    assert found["per_trajectory"]["usd"] == pytest.approx(usd / 2)
    assert found["per_solved"]["usd"] == pytest.approx(usd)
    assert found["total"]["sandbox_s"] == pytest.approx(2000.0)
    assert (found["total"]["cpu_s"], found["total"]["prompt_tokens"], found["total"]["output_tokens"]) == (7.0, 120, 14)
    assert (found["trajectories"], found["graded"], found["failed"], found["solved"]) == (2, 2, 0, 1)
