"""A cap on the length of a trajectory: what it does to the step time, and what to the successes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from farm.types import Graded, Trajectory
from harness import metrics, stats
from harness.claims import Measurement
from harness.experiments.runs import landed, policies, sources, step_seconds, steps
from harness.lab import Lab
from harness.stats import Estimate

MARGIN_POINTS = 5.0


def step_time(lab: Lab) -> Measurement:
    """Synchronous steps of a policy that rambles: the base policy, which hardly ever finds an end by itself."""
    profile = lab.profile
    runs = {}
    for name, lifted in (("without", profile.uncapped), ("with", ())):
        settings = (f"rollout.groups_per_step={profile.cap_groups}", *lifted)
        runs[name] = lab.rl(
            mode="sync", steps=profile.cap_steps, name=f"cap-{name}", policy=profile.policy, settings=settings
        )
    slow, fast = (step_seconds(steps(runs[name])) for name in ("without", "with"))
    estimate = stats.median_ratio(slow, fast)
    return Measurement(
        estimate=estimate,
        unit="x (median step time without the cap / with it)",
        holds=estimate.low > 1.0,
        detail={
            "without_cap": _step_told(runs["without"], slow),
            "with_cap": _step_told(runs["with"], fast),
            "policy": "the base policy, from which both runs start",
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
    """The trained policy on the benchmark, with the cap and without it: the same tasks, attempts and seeds."""
    policy = Path(policies(lab.rl())[-1].path)
    with_cap = lab.evaluate("rl", policy)
    without = lab.evaluate("rl-uncapped", policy, settings=lab.profile.uncapped)
    capped, free = metrics.task_rates(landed(with_cap)), metrics.task_rates(landed(without))
    difference, p = stats.paired_difference(*metrics.paired(capped, free))
    cap = _max_turns(with_cap)
    lengths = np.array([float(len(t.turns)) for t in landed(without) if _passed(t)])
    everything = np.array([float(len(t.turns)) for t in landed(without)])
    return Measurement(
        estimate=_points(difference),
        unit="points of pass@1 (with the cap - without it, paired by task)",
        holds=100 * difference.low > -MARGIN_POINTS,
        detail={
            "p": p,
            "cap_turns": cap,
            "pass_at_1_with_cap": _percent(capped),
            "pass_at_1_without_cap": _percent(free),
            "successes_without_cap": len(lengths),
            "successes_beyond_the_cap": int((lengths > cap).sum()),
            "share_of_successes_beyond_the_cap": round(float((lengths > cap).mean()), 4) if len(lengths) else 0.0,
            "turns_of_successes": _quantiles(lengths),
            "turns_of_all": _quantiles(everything),
            "successes_that_the_cap_ended": sum(
                _passed(t) and t.end_reason.value == "max_turns" for t in landed(with_cap)
            ),
            "pairing": "an episode samples with its own seed in both runs, so they are alike until the cap",
        },
        sources=sources(with_cap) + sources(without),
        figures={
            "cap_lengths": {
                "kind": "distribution",
                "title": "Length of the trajectories when nothing caps them",
                "x": "turns",
                "series": {"successes": lengths.tolist(), "all": everything.tolist()},
                "marks": {"cap": cap},
            }
        },
    )


def _step_told(run: Path, seconds: stats.Floats) -> dict[str, Any]:
    rows = landed(run)
    turns = np.array([len(t.turns) for t in rows])
    return {
        "steps": len(seconds),
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
