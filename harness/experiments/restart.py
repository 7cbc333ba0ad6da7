"""A training whose trainer is killed on the way: the same weights as without, and no trace in the curves.

Two questions. Over the same log, are the weights after *every* step those of the uninterrupted training, bit by bit?
And live, where a restart also changes which policy the farm samples from meanwhile, do the curves jump there?
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats as distributions

from harness.claims import Measurement
from harness.experiments.runs import settings, sources, steps
from harness.lab import Lab
from harness.stats import Estimate, Floats

KILLS = 3
FAULT_RATE, SEED = 0.031, 31
CURVES = ("pass_rate", "entropy", "approx_kl", "grad_norm")
ALPHA = 0.05
_LONGEST_WINDOW = 5


def survived(lab: Lab) -> Measurement:
    folder = lab.restarted(kills=KILLS, rate=FAULT_RATE, seed=SEED)
    lines = steps(folder / "run")
    kills = json.loads((folder / "kills.json").read_text())["kills"]
    replayed = json.loads((folder / "replay.json").read_text())["steps"]
    recorded = {line["step"]: line for line in lines}
    same_weights = sum(s["weights"] == s["recorded_weights"] for s in replayed)
    same_batches = sum(s["batch"] == recorded[s["step"]]["batch_digest"] for s in replayed)
    after = [int(kill["after_step"]) for kill in kills]
    judged = {name: jumps([line[name] for line in lines], after) for name in CURVES}
    tests = sum(len(one["jumps"]) for one in judged.values())
    outside = {
        name: [step for step, p in zip(one["steps"], one["p"], strict=True) if p < ALPHA / tests]
        for name, one in judged.items()
    }
    equal = same_weights == same_batches == len(lines)
    return Measurement(
        estimate=Estimate(value=same_weights, low=same_weights, high=same_weights, n=len(lines)),
        unit=f"steps of {len(lines)} with bit-equal weights",
        holds=equal and len(kills) == KILLS and not any(outside.values()),
        detail={
            "steps": len(lines),
            "steps_with_equal_weights": same_weights,
            "steps_with_equal_batches": same_batches,
            "kills": len(kills),
            "killed_after_steps": after,
            "distinct_weights": len({s["weights"] for s in replayed}),
            "curves": judged,
            "jumps_outside_the_band": sum(map(len, outside.values())),
            "where_outside": {name: found for name, found in outside.items() if found},
            "band": f"the jump of the mean across a kill against those elsewhere in the run, two-sided {ALPHA:g} over "
            f"all {tests} (Bonferroni)",
            "failures_injected": f"{100 * settings(folder / 'run')['inject']['rate']:g} % of the attempts, at every boundary, without retries",
        },
        sources=sources(folder / "run"),
        figures={
            "restart": {
                "kind": "lines",
                "title": f"Pass rate of a training that was killed after steps {', '.join(map(str, after))}",
                "x": "trainer step",
                "y": "pass rate (%)",
                "smooth": 5,
                "series": {
                    "batch of one step": [
                        [line["step"], 100 * line["pass_rate"]] for line in lines if line["pass_rate"] is not None
                    ]
                },
            }
        },
    )


def jumps(values: Sequence[float | None], kills: Sequence[int]) -> dict[str, Any]:
    """How far the mean of a curve jumps across each kill, beside its jumps elsewhere.

    ``values``: one for each step, from step 1; None where a step has none. A jump at step *s* is the mean of the window
    after *s* less that of the window up to *s*. ``p`` compares it with the jumps at the other steps, as one more draw
    from a normal distribution (Student's t), which treats jumps whose windows overlap as one another's likes."""
    curve: Floats = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    window = max(1, min(_LONGEST_WINDOW, len(curve) // 12))
    found = {s: _mean(curve[s : s + window]) - _mean(curve[s - window : s]) for s in _inside(len(curve), window)}
    found = {step: jump for step, jump in found.items() if np.isfinite(jump)}
    mine = [step for step in kills if step in found]
    others = np.array([jump for step, jump in found.items() if step not in mine])
    if len(others) < 2:
        return {"window": window, "steps": [], "jumps": [], "p": [], "elsewhere_sd": None}
    spread = float(others.std(ddof=1)) * np.sqrt(1 + 1 / len(others))
    scores = [(found[step] - float(others.mean())) / spread if spread > 0 else 0.0 for step in mine]
    return {
        "window": window,
        "steps": mine,
        "jumps": [round(float(found[step]), 5) for step in mine],
        "p": [round(float(2 * distributions.t.sf(abs(score), len(others) - 1)), 5) for score in scores],
        "elsewhere_sd": round(float(others.std(ddof=1)), 5),
    }


def _inside(length: int, window: int) -> range:
    return range(window, length - window + 1)


def _mean(values: Floats) -> float:
    """Of those that there are; NaN when there is none."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else float("nan")
