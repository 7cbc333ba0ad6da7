"""Tasks made from real packages (``datasets/pypi/train``): how many get done per hour, and are the grades right?

A sample of them is rolled out by the agent that writes the gold patch and needs no engine, so what takes time is
sandboxes, tests and the farm, and every episode must be resolved. The same tasks are graded without any patch, their
tests run all the same (a farm does not run them for an agent that changed nothing), so none may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.durable import write_json
from farm.errors import FarmError
from farm.grader import make_grader
from farm.protocols import SandboxProvider
from farm.sandbox.bubblewrap import BubblewrapProvider
from farm.suites import made, qualify
from farm.tasks import load_tasks
from farm.types import Evidence, Graded, Task, Trajectory
from harness import stats
from harness.claims import Measurement
from harness.experiments.runs import embedded_only, in_flight_at_most, landed, per_hour, sandboxes, seconds, sources
from harness.lab import Lab
from harness.provenance import ROOT

FOLDER = ROOT / "datasets" / "pypi" / "train"
SEED = 20261130

_AT_ONCE = 4

_FETCH = f"`python -m farm.suites.made fetch {FOLDER.relative_to(ROOT)}`"


def rates(lab: Lab) -> Measurement:
    if elsewhere := embedded_only(lab, "sandbox"):
        return elsewhere
    count = lab.profile.made_tasks
    missing = "" if lab.archive else _fetched(lab)

    def work(stage: Path) -> None:
        drawn = {} if missing else draw_tasks(stage / "tasks", count=count, seed=SEED)
        write_json(stage / "sample.json", {"not_measured": missing, **drawn})

    stage = lab.stage("made-sample", work)
    sample = json.loads((stage / "sample.json").read_text())
    if sample["not_measured"]:
        why = f"not measured: {sample['not_measured']}"
        return Measurement(estimate=None, unit="", holds=None, detail={"not_compared": why})
    run = lab.oracle("made-gold", stage / "tasks")
    gold, empty = landed(run), _empty(lab, stage / "tasks")
    rate, taken = per_hour(gold), stats.mean(seconds(gold))
    # Little's law, as for the sandbox back ends: what one takes varies, what is in flight is set.
    estimate = stats.Estimate(
        value=rate, low=rate * taken.value / taken.high, high=rate * taken.value / taken.low, n=taken.n
    )
    grades = {"gold": _counts([t.outcome.evidence for t in gold if isinstance(t.outcome, Graded)]), "empty": empty}
    return Measurement(
        estimate=estimate,
        unit="trajectories per hour (gold patch; real packages, no engine)",
        holds=grades["gold"]["resolved"] == sample["tasks"] == empty["graded"] and not empty["resolved"],
        detail={
            "sampled": sample["tasks"],
            "packages": sample["packages"],
            "drawn_from": f"{sample['of_tasks']} tasks of {sample['of_packages']} packages, seed {SEED}",
            "grades": grades,
            "back_end": sandboxes(run),
            "in_flight_at_most": in_flight_at_most(run),
            **_times(gold),
        },
        sources=sources(run),
    )


def draw_tasks(target: Path, *, count: int, seed: int, folder: Path = FOLDER) -> dict[str, int]:
    """Write a folder of at most ``count`` tasks of ``folder``, from as many packages as there are, in turn. Returns how
    many there are and were, of tasks and packages."""
    rows, known = made.read_rows(folder), made.read_sources(folder)
    results = qualify.read(folder / "qualification.jsonl")
    chosen = in_turn([row for row in rows if results[row["instance_id"]].qualified], count=count, seed=seed)
    names = sorted({row["package"] for row in chosen})
    target.mkdir(parents=True)
    made.write_sources(target, {name: known[name] for name in names})
    for name in names:
        made.write_rows(target, name, [row for row in chosen if row["package"] == name])
    return {"tasks": len(chosen), "packages": len(names), "of_tasks": len(rows), "of_packages": len(known)}


def in_turn(rows: Sequence[Mapping[str, Any]], *, count: int, seed: int) -> list[Mapping[str, Any]]:
    """``count`` of ``rows``, or all: one of each package, then a second of each, in an order that ``seed`` draws."""
    draw = random.Random(seed)
    turns: list[tuple[int, float, Mapping[str, Any]]] = []
    for package in sorted({row["package"] for row in rows}):
        own = sorted((row for row in rows if row["package"] == package), key=lambda row: str(row["instance_id"]))
        draw.shuffle(own)
        turns += [(turn, draw.random(), row) for turn, row in enumerate(own)]
    return [row for _, _, row in sorted(turns, key=lambda one: one[:2])[:count]]


def _fetched(lab: Lab) -> str:
    """Have the packages' code in the cache; why that can't be, else empty."""
    try:
        made.fetch(FOLDER)
    except (FarmError, OSError) as error:
        lab.console.print(f"tasks from real packages are not measured: {error}", markup=False)
        return f"the packages are not in the cache, and no package index gave them; {_FETCH} says more"
    return ""


def _empty(lab: Lab, tasks: Path) -> dict[str, int]:
    """:func:`_counts` of the tasks' grades without a patch."""

    def work(stage: Path) -> None:
        provider = BubblewrapProvider()
        try:
            found = asyncio.run(grade_unpatched(load_tasks(f"made:{tasks}"), provider))
        finally:
            provider.close()
        write_json(stage / "grades.json", _counts(found))

    found: dict[str, int] = json.loads((lab.stage("made-empty", work) / "grades.json").read_text())
    return found


async def grade_unpatched(tasks: Sequence[Task], provider: SandboxProvider) -> list[Evidence]:
    """Of those that can be graded: an infrastructure failure, tried again a few times, gives no evidence."""
    grader, slots, found = make_grader("tests"), asyncio.Semaphore(_AT_ONCE), list[Evidence]()

    async def grade(task: Task) -> None:
        async with slots:
            with contextlib.suppress(FarmError):
                found.append(await qualify.grade_patch(task, "", provider=provider, grader=grader))

    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(grade(task))
    return found


def _counts(found: Sequence[Evidence]) -> dict[str, int]:
    return {"graded": len(found), "resolved": sum(evidence.resolved for evidence in found)}


def _times(rows: list[Trajectory]) -> dict[str, Any]:
    total_s = float(seconds(rows).sum())
    spent_s = {
        kind: sum(e.end_at_s - e.start_at_s for t in rows for e in t.timeline if e.name == kind)
        for kind in ("sandbox_start", "grade")
    }
    return {
        "trajectory_mean_s": round(total_s / len(rows), 3),
        "sandbox_cpu_s_mean": round(sum(t.usage.sandbox_cpu_s for t in rows) / len(rows), 3),
        "share_of_time_in": {kind: round(spent / total_s, 3) for kind, spent in spent_s.items()},
    }
