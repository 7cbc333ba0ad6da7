"""A training whose trainer is killed on the way: the same weights as without, and no trace in the curves.

Two questions. Over the same log, are the weights after *every* step those of the uninterrupted training, bit by bit?
And live, where a restart also changes which policy the farm samples from meanwhile, do the curves jump there, drift
afterwards, or blow up?
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
RATES = ("pass_rate",)  # better when higher; the others are positive, and alarming when they rise
ALPHA = 0.05
SHORT = 40  # steps; a shorter run may have too few before a kill to say what was normal
_LONGEST_WINDOW = 5
_FEWEST_BEFORE = 3  # a line and its spread
_ROUNDING = 1e-12
_THREEFOLD = float(np.log(3.0))


def survived(lab: Lab) -> Measurement:
    folder = lab.restarted(kills=KILLS, rate=FAULT_RATE, seed=SEED)
    lines, rate = steps(folder / "run"), settings(folder / "run")["inject"]["rate"]
    kills = json.loads((folder / "kills.json").read_text())["kills"]
    replayed = json.loads((folder / "replay.json").read_text())["steps"]
    recorded = {line["step"]: line for line in lines}
    same_weights = sum(s["weights"] == s["recorded_weights"] for s in replayed)
    same_batches = sum(s["batch"] == recorded[s["step"]]["batch_digest"] for s in replayed)
    after = [int(kill["after_step"]) for kill in kills]
    curves = {name: [line[name] for line in lines] for name in CURVES}
    broken = sum(value is not None and not np.isfinite(value) for curve in curves.values() for value in curve)
    judged = {
        name: {"jumps": jumps(curve, after), "levels": levels(curve, after, rate=name in RATES)}
        for name, curve in curves.items()
    }
    level = ALPHA / max(1, len(CURVES) * len(after))
    outside = {kind: _outside(judged, kind, level) for kind in ("jumps", "levels")}
    untold = sum(p is None for one in judged.values() for found in one.values() for p in found["p"])
    equal = same_weights == same_batches == len(lines)
    holds: bool | None = equal and len(kills) == KILLS and not broken and not any(outside.values())
    if holds and untold:
        holds = None if len(lines) < SHORT else False
    return Measurement(
        estimate=Estimate(value=same_weights, low=same_weights, high=same_weights, n=len(lines)),
        unit=f"steps of {len(lines)} with bit-equal weights",
        holds=holds,
        detail={
            "steps": len(lines),
            "steps_with_equal_weights": same_weights,
            "steps_with_equal_batches": same_batches,
            "kills": len(kills),
            "killed_after_steps": after,
            "distinct_weights": len({s["weights"] for s in replayed}),
            "curves": judged,
            "values_not_finite": broken,
            "tests_without_an_answer": untold,
            "jumps_outside_the_band": sum(map(len, outside["jumps"].values())),
            "levels_outside_the_band": sum(map(len, outside["levels"].values())),
            "where_outside": {kind: found for kind, found in outside.items() if found},
            "bands": "the jump of the mean across a kill against those elsewhere in the run, two-sided; the level of "
            "all steps after a kill against what those before it let expect, towards the worse (a lower pass rate, "
            f"else higher); {ALPHA:g} over all kills and curves (Bonferroni)",
            "failures_injected": f"{100 * rate:g} % of the attempts, at every boundary, without retries",
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


def _outside(judged: Mapping[str, Mapping[str, Any]], kind: str, level: float) -> dict[str, list[int]]:
    """Curve -> the kills after which it left its band."""
    found = {
        name: [step for step, p in zip(one[kind]["steps"], one[kind]["p"], strict=True) if p is not None and p < level]
        for name, one in judged.items()
    }
    return {name: steps for name, steps in found.items() if steps}


def levels(values: Sequence[float | None], kills: Sequence[int], *, rate: bool) -> dict[str, Any]:
    """How far the mean of a curve's steps after each kill is on the worse side of what the steps before it let expect.

    ``values``: as for :func:`jumps`. A ``rate`` is worse when lower; other curves are worse when higher, and compared
    by their logarithms. ``p``, one-sided, by Student's t with the spread of the steps before, one for each kill; None
    where there are too few. The mean of a rate before the kill is what is expected of it after. Other curves rise and
    fall as a policy learns: up to threefold, they must also be above the line through the steps before, prolonged."""
    curve = _curve(values)
    at = np.arange(len(curve), dtype=np.float64)
    there = np.isfinite(curve)
    positive = curve[there & (curve > 0)]
    if rate:
        curve = -curve
    elif len(positive):
        curve = np.log(np.where(there, np.maximum(curve, positive.min()), 1.0))
    shifts: list[float | None] = []
    found: list[float | None] = []
    for kill in kills:
        before, after = there & (at < kill), there & (at >= kill)
        if before.sum() < _FEWEST_BEFORE or not after.any():
            shifts.append(None)
            found.append(None)
            continue
        shift, p = _shift(curve[before], curve[after])
        if not rate and shift < _THREEFOLD:
            slope, start = np.polyfit(at[before], curve[before], 1)
            p = max(
                p,
                _beyond_the_line(
                    at[before],
                    curve[before] - start - slope * at[before],
                    at[after],
                    curve[after] - start - slope * at[after],
                ),
            )
        shifts.append(round(shift, 5))
        found.append(round(p, 5))
    return {"steps": list(kills), "worse_by": shifts, "p": found}


def _shift(before: Floats, after: Floats) -> tuple[float, float]:
    """How much higher the mean after is, and how likely so much or more is by chance."""
    shift = float(after.mean() - before.mean())
    error = float(before.std(ddof=1)) * np.sqrt(1 / len(before) + 1 / len(after))
    return shift, _upper(shift, error, len(before) - 1)


def _beyond_the_line(at: Floats, before: Floats, later: Floats, after: Floats) -> float:
    """The same of what is left over the line fitted at the steps ``at``, with the line's own error where it is
    prolonged to the steps ``later``."""
    spread = float(np.sqrt((before**2).sum() / (len(at) - 2)))
    reach = (later.mean() - at.mean()) ** 2 / ((at - at.mean()) ** 2).sum()
    return _upper(float(after.mean()), spread * np.sqrt(1 / len(at) + 1 / len(later) + reach), len(at) - 2)


def _upper(shift: float, error: float, freedom: int) -> float:
    if error <= _ROUNDING:
        return 0.0 if shift > _ROUNDING else 1.0
    return float(distributions.t.sf(shift / error, freedom))


def jumps(values: Sequence[float | None], kills: Sequence[int]) -> dict[str, Any]:
    """How far the mean of a curve jumps across each kill, beside its jumps elsewhere.

    ``values``: one for each step, from step 1; None where a step has none. A jump at step *s* is the mean of the window
    after *s* less that of the window up to *s*. ``p`` compares it with the jumps at the other steps, as one more draw
    from a normal distribution (Student's t), which treats jumps whose windows overlap as one another's likes. Both have
    one entry for each kill, None where there is nothing to compare."""
    curve = _curve(values)
    window = max(1, min(_LONGEST_WINDOW, len(curve) // 12))
    found = {s: _mean(curve[s : s + window]) - _mean(curve[s - window : s]) for s in _inside(len(curve), window)}
    found = {step: jump for step, jump in found.items() if np.isfinite(jump)}
    others = np.array([jump for step, jump in found.items() if step not in kills])
    told = {"window": window, "steps": list(kills), "jumps": [_rounded(found.get(step)) for step in kills]}
    if len(others) < 2:
        return told | {"p": [None] * len(kills), "elsewhere_sd": None}
    centre, sd = float(others.mean()), float(others.std(ddof=1))
    spread = sd * float(np.sqrt(1 + 1 / len(others)))
    p = [
        None if step not in found else 2 * _upper(abs(found[step] - centre), spread, len(others) - 1) for step in kills
    ]
    return told | {"p": [_rounded(one if one is None else min(1.0, one)) for one in p], "elsewhere_sd": _rounded(sd)}


def _curve(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 5)


def _inside(length: int, window: int) -> range:
    return range(window, length - window + 1)


def _mean(values: Floats) -> float:
    """Of those that there are; NaN when there is none."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else float("nan")
