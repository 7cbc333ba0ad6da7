"""pass@1 of the base, SFT and RL policies on the held-out micro benchmark, paired by task."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from farm.types import PolicyVersion, Trajectory
from harness import metrics, stats
from harness.claims import Measurement
from harness.experiments.runs import landed, policies, settings, sources, steps
from harness.lab import Lab, StageError
from harness.stats import Estimate

POPULATIONS = {
    "swebench/SWE-bench_Verified_test": 500
}  # tasks of a benchmark that a subset is drawn from; others have no end
LEARNABLE = (0.03, 0.25)  # below, nearly no group has a success; above, little is left to show
RL_GAIN = 0.147  # the reported gain, in pass@1


def base(lab: Lab) -> Measurement:
    run = lab.evaluate("base", lab.profile.policy)
    score = _score(run)
    return _measurement(run, score, holds=score.low <= LEARNABLE[1] and score.high >= LEARNABLE[0], detail={})


def sft(lab: Lab) -> Measurement:
    before, run = lab.evaluate("base", lab.profile.policy), lab.evaluate("sft", lab.sft())
    if lab.archive and lab.has("rl"):
        _check_policy(run, policies(lab.folder / "rl" / "run")[0], "RL began with")
    gain, p = _gain(run, before)
    return _measurement(run, _score(run), holds=gain.low > 0, detail={"gain_over_base": _points(gain), "p": p})


def rl(lab: Lab) -> Measurement:
    before, training = lab.evaluate("sft", lab.sft()), lab.rl()
    run = lab.evaluate("rl", Path(policies(training)[-1].path))
    _check_policy(run, policies(training)[-1], "RL ended with")
    gain, p = _gain(run, before)
    curve = [{"step": s["step"], "pass_rate": s["pass_rate"]} for s in steps(training)]
    return _measurement(
        run,
        _score(run),
        holds=gain.value >= RL_GAIN and p < 0.01,
        detail={
            "gain_over_sft": _points(gain),
            "p": p,
            "steps": len(curve),
            "training_episodes": len(landed(training)),
            "training_minutes": round(_minutes(training), 1),
        },
        figures={"learning_curve": curve},
    )


def _check_policy(run: Path, expected: PolicyVersion, what: str) -> None:
    """Stages are kept and made again one by one: theirs must be one story."""
    if policies(run)[0].digest != expected.digest:
        raise StageError(f"{run.parent.name} is of another policy than {what}; run `harness reproduce --all`")


def _score(run: Path) -> Estimate:
    rates = metrics.task_rates(landed(run))
    return stats.pass_rate(rates.task_passed, rates.task_graded, rates.weights).estimate


def _gain(run: Path, before: Path) -> tuple[Estimate, float]:
    new, old, weights = metrics.paired(metrics.task_rates(landed(run)), metrics.task_rates(landed(before)))
    return stats.paired_difference(new, old, weights)


def _several(rates: metrics.TaskRates) -> dict[str, float]:
    """pass@k and pass^k in percent, for the most attempts that every task has."""
    k = int(rates.task_graded.min())
    found = {f"pass@{k}": stats.pass_at_k, f"pass^{k}": stats.pass_hat_k}
    scores = {name: of(rates.task_passed, rates.task_graded, k) for name, of in found.items()}
    return {name: round(100 * float(np.average(score, weights=rates.weights)), 2) for name, score in scores.items()}


def _stratified(trajectories: list[Trajectory], rates: metrics.TaskRates) -> dict[str, Any]:
    """The estimate from the strata that the tasks were drawn from, in points: for the whole benchmark where it has an
    end (with finite-population correction), else for such tasks."""
    drawn = metrics.strata(trajectories, rates.ids)
    labels, size = list(drawn.labels), POPULATIONS.get(drawn.dataset.partition("@")[0])
    # Of a finite one only the whole is known, not each stratum; and a stratum of one task says nothing of its spread.
    if size is not None or min(Counter(labels).values()) < 2:
        labels = ["all"] * len(labels)
    shares = {name: float(rates.weights[np.array(labels) == name].sum()) for name in set(labels)}
    passed, graded = rates.excluded, rates.task_graded
    noise = None if (graded < 2).any() else passed * (1 - passed) / (graded - 1)
    found = stats.stratified(
        passed, labels, shares=shares, sizes=None if size is None else {"all": size}, attempt_variances=noise
    )
    return {
        "strata": len(shares),
        "drawn_from": "an endless population of such tasks" if size is None else f"{size} tasks of {drawn.dataset}",
        "value": _rounded(found.value),
        "standard_error_points": _rounded(found.error),
    }


def _rounded(error: float | None) -> float | None:
    return None if error is None else round(100 * error, 2)


def _minutes(run: Path) -> float:
    times = [version.published_at_s for version in policies(run)]
    return (times[-1] - times[0]) / 60


def _points(gain: Estimate) -> dict[str, Any]:
    return {
        "points": round(100 * gain.value, 1),
        "low": round(100 * gain.low, 1),
        "high": round(100 * gain.high, 1),
        "tasks": gain.n,
    }


def _suite(tasks: str) -> str:
    return "micro benchmark: generated mini repositories, not SWE-bench" if tasks.startswith("micro") else tasks


def _measurement(
    run: Path, score: Estimate, *, holds: bool, detail: dict[str, Any], figures: dict[str, Any] | None = None
) -> Measurement:
    trajectories = landed(run)
    rates = metrics.task_rates(trajectories)
    both = stats.weighted_mean(rates.as_zero, rates.all_weights)
    rated = stats.pass_rate(rates.task_passed, rates.task_graded, rates.weights)
    common = {
        "passed": rates.passed,
        "graded": rates.graded,
        "pass_at_1_failures_as_zero": round(100 * both.value, 2),
        "interval": rated.interval,
        "standard_error_points": {
            "these_tasks": _rounded(rated.error_these_tasks),
            "such_tasks": _rounded(rated.error_such_tasks),
        },
        "stratified": _stratified(trajectories, rates),
        # Against a score measured alike: one-sided 5 %, power 80 %.
        "detectable_drop_points": {
            "these_tasks": _rounded(rated.detectable_these_tasks),
            "such_tasks": _rounded(rated.detectable_such_tasks),
        },
        "within_task_correlation": None if rated.correlation is None else round(rated.correlation, 2),
        "pass_at_and_hat_k": _several(rates),
        "infra_failures": rates.failures,
        "ungraded_tasks": list(rates.ungraded),
        "end_reasons": metrics.end_reasons(trajectories),
        "suite": _suite(str(settings(run)["rollout"]["tasks"])),
    }
    estimate = Estimate(value=100 * score.value, low=100 * score.low, high=100 * score.high, n=rates.graded)
    return Measurement(
        estimate=estimate, unit="%", holds=holds, detail=detail | common, sources=sources(run), figures=figures or {}
    )
