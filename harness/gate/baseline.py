"""The baseline file: what the gate compares with, and what makes it comparable.

Counts of several trusted runs are pooled, so that the baseline's own noise is small and known. Durations are not in it:
they are compared with the base commit's code on the machine at hand, never with another day's figures.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farm.durable import write_json
from farm.errors import UsageError
from harness import shape
from harness.gate.evidence import Counts, pooled, rate
from harness.provenance import machine

FORMAT, SCHEMA = "rollout-farm gate baseline", 1
KEEP_RUNS = 4  # older ones are let go: code that became better should not be held to what it once was


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trusted evaluation: where it was made, with which seed, and its counts."""

    commit: str
    seed: int
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """``policy``: path below the tree, of a policy whose weights had ``policy_digest``; ``weights``: the benchmark's,
    by task; ``limit``: only its first tasks."""

    commit: str
    machine: str
    processor: str
    tasks: str
    dataset: str
    limit: int | None
    policy: str
    policy_digest: str
    weights: Mapping[str, float]
    runs: tuple[Run, ...]

    @property
    def counts(self) -> Counts:
        return pooled(run.counts for run in self.runs)

    @property
    def attempts(self) -> float:
        """Graded attempts per task over all runs."""
        return sum(self.counts.graded.values()) / len(self.weights)


def machine_kind() -> str:
    """What decides how much fits into a time limit: system, architecture, cores, memory to the nearest power of two."""
    found = machine()
    memory_gib = 2 ** round(math.log2(found["memory_gib"]))
    return f"{platform.system().lower()}-{platform.machine()}-{found['cores']}cores-{memory_gib:g}gib"


def load(path: Path) -> Baseline:
    """Raises UsageError on a file that is missing, unreadable, of another format or schema, or not whole."""
    advice = f"make one with: harness gate --baseline {path} --update-baseline"
    try:
        document = shape.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--baseline {path}: no such file; {advice}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--baseline {path}: not readable JSON ({error}); {advice}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"--baseline {path}: not a {FORMAT}; {advice}")
    if document.get("schema") != SCHEMA:
        raise UsageError(
            f"--baseline {path}: schema {document.get('schema')!r}, this code reads {SCHEMA}; remove it and {advice}"
        )
    try:
        baseline = _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"--baseline {path}: not whole ({type(error).__name__}: {error}); {advice}") from None
    return baseline


def save(path: Path, baseline: Baseline) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, _document(baseline))


def with_run(baseline: Baseline | None, fresh: Baseline) -> Baseline:
    """``fresh`` (of one run) with the runs of ``baseline`` pooled in, where both measured the same policy and tasks."""
    if baseline is None or not same_subject(baseline, fresh):
        return fresh
    kept = [run for run in baseline.runs if (run.commit, run.seed) != (fresh.runs[0].commit, fresh.runs[0].seed)]
    return replace(fresh, runs=(*kept, *fresh.runs)[-KEEP_RUNS:])


def same_subject(one: Baseline, other: Baseline) -> bool:
    """Whether both are of the same weights on the same tasks and kind of machine."""

    def subject(b: Baseline) -> tuple[object, ...]:
        return b.machine, b.tasks, b.dataset, b.limit, b.policy_digest, dict(b.weights)

    return subject(one) == subject(other)


def check(baseline: Baseline, path: Path, *, margin: float) -> None:
    """Raises UsageError where nothing measured here could be compared with the baseline, or no loss be seen in it."""
    here = machine_kind()
    advice = f"make one here with: harness gate --baseline {path} --update-baseline"
    if baseline.machine != here:
        raise UsageError(
            f"--baseline {path}: made on a machine of kind {baseline.machine}, this is {here}; time limits bite "
            f"differently there; {advice}"
        )
    score = rate(baseline.counts, baseline.weights)
    if score <= margin:
        raise UsageError(
            f"--baseline {path}: its policy solves {100 * score:.1f} %, and a loss of up to {100 * margin:.0f} points "
            "is within the margin: the gate could never fail; make a baseline with a stronger policy (--policy)"
        )


def _document(baseline: Baseline) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "commit": baseline.commit,
        "machine": {"kind": baseline.machine, "processor": baseline.processor},
        "suite": {"tasks": baseline.tasks, "dataset": baseline.dataset, "limit": baseline.limit},
        "policy": {"path": baseline.policy, "digest": baseline.policy_digest},
        "weights": dict(sorted(baseline.weights.items())),
        "runs": [
            {
                "commit": run.commit,
                "seed": run.seed,
                "failures": run.counts.failures,
                "passed_of_graded": {t: f"{run.counts.passed.get(t, 0)}/{n}" for t, n in run.counts.graded.items()},
            }
            for run in baseline.runs
        ],
    }


def _parse(document: Mapping[str, Any]) -> Baseline:
    weights = {str(task): float(weight) for task, weight in document["weights"].items()}
    runs = tuple(_run(run) for run in document["runs"])
    if not weights or not all(math.isfinite(w) and w > 0 for w in weights.values()):
        raise ValueError("weights must be positive, one for each task")
    counts = pooled(run.counts for run in runs)
    if set(counts.graded) != set(weights) or not all(0 <= counts.passed[t] <= n > 0 for t, n in counts.graded.items()):
        raise ValueError("every task needs graded attempts, at least as many as passed")
    suite, policy = document["suite"], document["policy"]
    return Baseline(
        commit=str(document["commit"]),
        machine=str(document["machine"]["kind"]),
        processor=str(document["machine"]["processor"]),
        tasks=str(suite["tasks"]),
        dataset=str(suite["dataset"]),
        limit=None if suite["limit"] is None else int(suite["limit"]),
        policy=str(policy["path"]),
        policy_digest=str(policy["digest"]),
        weights=weights,
        runs=runs,
    )


def _run(run: Mapping[str, Any]) -> Run:
    pairs = {str(task): pair.split("/") for task, pair in run["passed_of_graded"].items()}
    graded = {task: int(n) for task, (_, n) in pairs.items()}
    passed = {task: int(n) for task, (n, _) in pairs.items()}
    counts = Counts(graded=graded, passed=passed, failures=int(run["failures"]))
    return Run(commit=str(run["commit"]), seed=int(run["seed"]), counts=counts)
