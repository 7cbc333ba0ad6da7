"""Failures injected at the reported rate, at every boundary: all logged as failures, none with a reward."""

from __future__ import annotations

from collections import Counter

from farm.inject import FaultPlan
from farm.types import Boundary, Failed, Graded, Trajectory
from harness import metrics, stats
from harness.claims import Measurement
from harness.experiments.runs import landed, sources
from harness.lab import Lab
from harness.stats import Estimate

RATE = 0.031
SEED = 31


def rate(lab: Lab) -> Measurement:
    run = lab.faulty(lab.profile.policy, rate=RATE, seed=SEED)
    trajectories = landed(run)
    plan = FaultPlan(rate=RATE, seed=SEED)
    planned = {t.episode_id: plan.boundary(t.episode_id, 1) for t in trajectories}
    hit = [t for t in trajectories if planned[t.episode_id] is not None]
    # A grading fault is only met by an episode that came as far as being graded by tests.
    due = [t for t in hit if planned[t.episode_id] is not Boundary.GRADER or t.patch]
    logged = [t for t in due if isinstance(t.outcome, Failed) and t.outcome.boundary is planned[t.episode_id]]
    rewarded = [t for t in due if isinstance(t.outcome, Graded)]
    failed = sum(isinstance(t.outcome, Failed) for t in trajectories)
    share = stats.wilson(failed, len(trajectories))
    rates = metrics.task_rates(trajectories)
    excluded = stats.weighted_mean(rates.excluded, rates.weights)
    as_zero = stats.weighted_mean(rates.failed, rates.weights)
    return Measurement(
        estimate=Estimate(value=100 * share.value, low=100 * share.low, high=100 * share.high, n=share.n),
        unit="% of trajectories ended in an infrastructure failure",
        holds=bool(due) and len(logged) == len(due) and not rewarded,
        detail={
            "injected": len(due),
            "logged_as_failed": len(logged),
            "with_a_reward": len(rewarded),
            "by_boundary": dict(sorted(Counter(_boundary(t) for t in logged).items())),
            "not_injected": failed - len(logged),
            "pass_at_1_failures_excluded": round(100 * excluded.value, 2),
            "pass_at_1_failures_as_zero": round(100 * as_zero.value, 2),
            "bias_of_counting_them_as_zero_points": round(100 * (as_zero.value - excluded.value), 2),
            "retries": "off, so that every injected failure ends its trajectory",
        },
        sources=sources(run),
    )


def _boundary(trajectory: Trajectory) -> str:
    assert isinstance(trajectory.outcome, Failed)
    return trajectory.outcome.boundary.value
