"""A cap on the length of a trajectory: what it does to the step time, and what to the successes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from farm.types import EndReason, Graded, Trajectory
from harness import metrics, stats
from harness.claims import Measurement
from harness.experiments.runs import landed, policies, rambling, sources, step_seconds, steps
from harness.lab import Lab
from harness.stats import Estimate

MARGIN_POINTS = 5.0


def step_time(lab: Lab) -> Measurement:
    """Synchronous steps of a policy that rambles, without a cap and with it."""
    runs = {
        "without": rambling(lab, "cap-without", mode="sync", capped=False),
        "with": rambling(lab, "cap-with", mode="sync", capped=True),
    }
    slow, fast = (step_seconds(steps(runs[name])) for name in ("without", "with"))
    if min(len(slow), len(fast)) < stats.FEWEST_IN_A_SERIES:
        return Measurement(
            estimate=None, unit="", holds=None, detail={"not_compared": "too few steps to tell how they vary"}
        )
    estimate = stats.series_ratio(slow, fast)
    return Measurement(
        estimate=estimate,
        unit="x (mean step time without the cap / with it)",
        holds=estimate.low > 1.0,
        detail={
            "without_cap": _step_told(runs["without"], slow),
            "with_cap": _step_told(runs["with"], fast),
            "policy": "the base policy, from which both runs start",
            "interval": stats.batches_told(slow, fast),
            "left_out": "the first step of each run, in which farm and engines start",
            "size": "how much a cap saves depends on how far the policy rambles; only the direction is judged here",
        },
        sources=sources(runs["without"]) + sources(runs["with"]),
        figures={
            "cap_step_time": {
                "kind": "boxes",
                "title": "Synchronous steps without and with a cap on the length",
                "x": "step time in s",
                "series": {"without the cap": slow.tolist(), "with the cap": fast.tolist()},
            }
        },
    )


def harmless(lab: Lab) -> Measurement:
    """The trained policy on the benchmark, with the cap and without it: the same tasks, attempts and seeds. Beside it,
    the tighter cap under which the policy was trained."""
    policy = Path(policies(lab.rl())[-1].path)
    without = lab.evaluate("rl-uncapped", policy, settings=lab.profile.uncapped)
    judged = lab.evaluate("rl-capped", policy, settings=lab.profile.capped)
    tight = lab.evaluate("rl", policy)
    difference, told = _compared(judged, without)
    _, told_of_tight = _compared(tight, without)
    lengths, everything = _lengths(without, passed=True), _lengths(without)
    return Measurement(
        estimate=difference,
        unit="points of pass@1 (with the cap - without it, paired by task)",
        holds=difference.low > -MARGIN_POINTS,
        detail={
            **told,
            "pass_at_1_without_cap": _percent(metrics.task_rates(landed(without))),
            "successes_without_cap": len(lengths),
            "turns_of_successes": _quantiles(lengths),
            "turns_of_all": _quantiles(everything),
            "the_cap_in_training": told_of_tight,
            "pairing": "an episode samples with its own seed in all runs, so they are alike until a cap ends one",
        },
        sources=sources(judged) + sources(without) + sources(tight),
        figures={
            "cap_lengths": {
                "kind": "distribution",
                "title": "Length of the trajectories when nothing caps them",
                "x": "turns",
                "series": {"successes": lengths.tolist(), "all": everything.tolist()},
                "marks": {"cap": _max_turns(judged), "cap in training": _max_turns(tight)},
            }
        },
    )


def _compared(capped: Path, without: Path) -> tuple[Estimate, dict[str, Any]]:
    """The difference that a cap makes, in points, and what there is to say of it."""
    rates, free = metrics.task_rates(landed(capped)), metrics.task_rates(landed(without))
    difference, p = stats.paired_difference(*metrics.paired(rates, free))
    points = _points(difference)
    cap, lengths = _max_turns(capped), _lengths(without, passed=True)
    return points, {
        "cap_turns": cap,
        "pass_at_1_with_cap": _percent(rates),
        "points": round(points.value, 2),
        "low": round(points.low, 2),
        "high": round(points.high, 2),
        "p": p,
        "successes_beyond_the_cap": int((lengths > cap).sum()),
        "share_of_successes_beyond_the_cap": round(float((lengths > cap).mean()), 4) if len(lengths) else 0.0,
        "successes_that_the_cap_ended": sum(_passed(t) and t.end_reason is EndReason.MAX_TURNS for t in landed(capped)),
    }


def _lengths(run: Path, *, passed: bool = False) -> stats.Floats:
    """Turns of each trajectory, or of those that solved their task."""
    return np.array([float(len(t.turns)) for t in landed(run) if not passed or _passed(t)])


def _step_told(run: Path, seconds: stats.Floats) -> dict[str, Any]:
    rows = landed(run)
    turns = np.array([len(t.turns) for t in rows])
    return {
        "steps": len(seconds),
        "mean_step_s": round(float(seconds.mean()), 3),
        "median_step_s": round(float(np.median(seconds)), 3),
        "p95_step_s": round(float(np.quantile(seconds, 0.95)), 3),
        "cap_turns": _max_turns(run),
        "turns_mean": round(float(turns.mean()), 2),
        "turns_max": int(turns.max()),
        "tokens_mean": round(float(np.mean([t.total_tokens for t in rows])), 1),
        "end_reasons": metrics.end_reasons(rows),
    }


def _max_turns(run: Path) -> int:
    return int(json.loads((run / "config.json").read_text())["limits"]["max_turns"])


def _passed(trajectory: Trajectory) -> bool:
    return isinstance(trajectory.outcome, Graded) and trajectory.outcome.evidence.resolved


def _percent(rates: metrics.TaskRates) -> float:
    return round(100 * float(np.average(rates.excluded, weights=rates.weights)), 2)


def _points(difference: Estimate) -> Estimate:
    return Estimate(value=100 * difference.value, low=100 * difference.low, high=100 * difference.high, n=difference.n)


def _quantiles(lengths: stats.Floats) -> dict[str, float]:
    names = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(lengths, q)) for name, q in names.items()} if len(lengths) else {}
