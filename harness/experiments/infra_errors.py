"""Failures injected at the reported rate, at every boundary: all logged as failures, none with a reward, none trained
on; and what counting them as wrong answers would do to the score.

The bias is measured against the run of the same episodes without failures. In the training, the batches are made again
from the log: they are those that the trainer recorded, and no failed attempt is in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from farm.inject import FaultPlan
from farm.types import Boundary, Cursor, Failed, Graded, Trajectory
from harness import metrics, stats
from harness.claims import Measurement
from harness.experiments import restart
from harness.experiments.runs import landed, settings, sources, steps
from harness.lab import Lab
from harness.stats import Estimate, Floats
from trainer.config import batch_rules
from trainer.group import Batcher, batch_digest

RATE, SEED = restart.FAULT_RATE, restart.SEED


def rate(lab: Lab) -> Measurement:
    run = lab.faulty(lab.profile.policy, rate=RATE, seed=SEED)
    trajectories = landed(run)
    injected = settings(run)["inject"]  # as this run was made; the constants may have changed since
    plan = FaultPlan(rate=injected["rate"], seed=injected["seed"])
    planned = {t.episode_id: plan.boundary(t.episode_id, 1) for t in trajectories}
    hit = [t for t in trajectories if planned[t.episode_id] is not None]
    # A grading fault is only met by an episode that came as far as being graded by tests.
    due = [t for t in hit if planned[t.episode_id] is not Boundary.GRADER or t.patch]
    logged = [t for t in due if isinstance(t.outcome, Failed) and t.outcome.boundary is planned[t.episode_id]]
    rewarded = [t for t in due if isinstance(t.outcome, Graded)]
    failed = sum(isinstance(t.outcome, Failed) for t in trajectories)
    share = stats.wilson(failed, len(trajectories))
    rates = metrics.task_rates(trajectories)
    clean = metrics.task_rates(landed(lab.evaluate("base", lab.profile.policy)))
    excluded = stats.weighted_mean(rates.excluded, rates.weights)
    as_zero = stats.weighted_mean(rates.as_zero, rates.all_weights)
    training = lab.restarted(kills=restart.KILLS, rate=RATE, seed=SEED) / "run"
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
            "bias_against_the_run_without_failures": {
                "counted_as_zero": _bias(_scores(rates.all_ids, rates.as_zero), clean),
                "left_out": _bias(_scores(rates.ids, rates.excluded), clean),
            },
            "training": _training(training),
            "retries": "off, so that every injected failure ends its trajectory",
        },
        sources=sources(run) + sources(training),
    )


def _scores(tasks: Sequence[str], values: Floats) -> dict[str, float]:
    return {task: float(value) for task, value in zip(tasks, values, strict=True)}


def _bias(scores: Mapping[str, float], clean: metrics.TaskRates) -> dict[str, float]:
    """Points of pass@1 above the run without failures, over the tasks that have a score in both."""
    common = [i for i, task in enumerate(clean.ids) if task in scores]
    found = np.array([scores[clean.ids[i]] for i in common])
    difference, p = stats.paired_difference(found, clean.excluded[common], clean.weights[common])
    return {
        "points": round(100 * difference.value, 2),
        "low": round(100 * difference.low, 2),
        "high": round(100 * difference.high, 2),
        "p": p,
        "tasks": difference.n,
    }


def _training(run: Path) -> dict[str, int]:
    """The batches of a training, made again from its log: which failed attempts are in them?"""
    rows = landed(run)
    failed = {t.episode_id for t in rows if isinstance(t.outcome, Failed)}
    batcher = Batcher(batch_rules(settings(run), where=str(run)))
    batches = [batch for n, row in enumerate(rows) if (batch := batcher.push(Cursor(row=n), row)) is not None]
    recorded = [line["batch_digest"] for line in steps(run)]
    batches = batches[: len(recorded)]
    trained = {sample.episode_id for batch in batches for sample in batch.samples}
    return {
        "trajectories": len(rows),
        "failures": len(failed),
        "trained_episodes": len(trained),
        "failures_in_a_gradient": len(failed & trained),
        "steps": len(recorded),
        "batches_as_recorded": sum(
            batch_digest(batch.samples) == digest for batch, digest in zip(batches, recorded, strict=False)
        ),
    }


def _boundary(trajectory: Trajectory) -> str:
    assert isinstance(trajectory.outcome, Failed)
    return trajectory.outcome.boundary.value
