"""Pure measures over landed trajectories. A failure is never a reward: it is left out, or counted apart (Rule 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from farm.types import Failed, Graded, Trajectory
from harness.stats import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRates:
    """Pass rate of each task in both denominators.

    ``excluded`` leaves failed attempts out (per protocol): of the tasks ``ids`` that have a graded attempt, [T], as are
    ``weights`` and the counts behind it, ``task_passed`` and ``task_graded``. ``as_zero`` counts failed attempts as not
    passed (intention to treat): of *all* tasks ``all_ids``, [A], as is ``all_weights``; a task that only failed scores
    zero there, and is named in ``ungraded``."""

    ids: tuple[str, ...]
    excluded: Floats
    weights: Floats
    all_ids: tuple[str, ...]
    as_zero: Floats
    all_weights: Floats
    task_passed: Floats
    task_graded: Floats
    graded: int
    passed: int
    failures: int
    ungraded: tuple[str, ...]


def task_rates(trajectories: Iterable[Trajectory]) -> TaskRates:
    passed: dict[str, int] = defaultdict(int)
    graded: dict[str, int] = defaultdict(int)
    failures: dict[str, int] = defaultdict(int)
    weights: dict[str, float] = {}
    for trajectory in trajectories:
        task, outcome = trajectory.instance_id, trajectory.outcome
        weights[task] = trajectory.weight
        if isinstance(outcome, Graded):
            graded[task] += 1
            passed[task] += outcome.evidence.resolved
        elif isinstance(outcome, Failed):
            failures[task] += 1
    # A trajectory that was dropped is neither graded nor a failure: it says nothing of its task.
    everyone = tuple(sorted(task for task in weights if graded[task] + failures[task]))
    ids = tuple(task for task in everyone if graded[task])
    return TaskRates(
        ids=ids,
        excluded=np.array([passed[t] / graded[t] for t in ids]),
        weights=np.array([weights[t] for t in ids]),
        all_ids=everyone,
        as_zero=np.array([passed[t] / (graded[t] + failures[t]) for t in everyone]),
        all_weights=np.array([weights[t] for t in everyone]),
        task_passed=np.array([passed[t] for t in ids], dtype=np.float64),
        task_graded=np.array([graded[t] for t in ids], dtype=np.float64),
        graded=sum(graded.values()),
        passed=sum(passed.values()),
        failures=sum(failures.values()),
        ungraded=tuple(sorted(task for task in weights if not graded[task])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strata:
    """What each task of :attr:`TaskRates.ids` was drawn from. ``labels``: [T]; ``dataset``: the name that all have in
    common, empty when there are several."""

    labels: tuple[str, ...]
    dataset: str


def strata(trajectories: Iterable[Trajectory], ids: Sequence[str]) -> Strata:
    """``ids``: tasks that ``trajectories`` attempted."""
    first = {t.instance_id: t for t in trajectories}
    datasets = {first[task].dataset for task in ids}
    return Strata(
        labels=tuple(", ".join(f"{k} {v}" for k, v in sorted(first[task].strata.items())) for task in ids),
        dataset=datasets.pop() if len(datasets) == 1 else "",
    )


def paired(new: TaskRates, base: TaskRates) -> tuple[Floats, Floats, Floats]:
    """(new, base, weights) over the tasks graded in both, per protocol. All [T]."""
    old = dict(zip(base.ids, base.excluded, strict=True))
    common = [i for i, task in enumerate(new.ids) if task in old]
    return (
        new.excluded[common],
        np.array([old[new.ids[i]] for i in common]),
        new.weights[common],
    )


def group_spread(trajectories: Iterable[Trajectory]) -> dict[str, Floats]:
    """Longest over shortest attempt within each group of two or more graded attempts, in tokens and in seconds. [G]."""
    groups: Mapping[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if isinstance(trajectory.outcome, Graded) and trajectory.turns:
            groups[trajectory.group_id].append(trajectory)
    full = [g for g in groups.values() if len(g) >= 2]
    tokens = [[t.total_tokens for t in group] for group in full]
    seconds = [[max(1e-3, t.ended_at_s - t.started_at_s) for t in group] for group in full]
    return {
        "tokens": np.array([max(g) / min(g) for g in tokens]),
        "seconds": np.array([max(g) / min(g) for g in seconds]),
    }


def end_reasons(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for trajectory in trajectories:
        counts[trajectory.end_reason.value] += 1
    return dict(sorted(counts.items()))
