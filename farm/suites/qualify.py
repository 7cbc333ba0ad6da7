"""Qualification: a task counts only if its gold patch always passes and no patch always fails.

Every run is a grading like any other: a fresh sandbox, with the grader, the provider and the limits that rollouts of
the suite use. Where the machine is graded and not a patch (Harbor), the task's own solution stands for the gold patch,
and a machine that nobody touched for the empty one. What does not qualify is quarantined: ``load_tasks`` leaves it out.
The results lie beside the split and name what was graded by its digest, so that results of another version of a task
are not taken for this one's.

``python -m farm.suites.qualify SPEC --runs N`` goes on where an earlier run was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from farm.errors import FarmError, UsageError
from farm.grader import grading_spec
from farm.harbor.machine import solve
from farm.protocols import Grader, ImageKeeper, MachineGrader, Sandbox, SandboxProvider
from farm.sandbox.rootfs import IMAGES
from farm.types import Evidence, Limits, Task

DATASETS = Path(__file__).parents[2] / "datasets"
_TRIES = 3  # of one run, when an infrastructure failure ends it
_LIMITS = Limits(grade_s=120.0, agent_s=200.0, episode_s=300.0)  # generous: a busy machine is not the task's fault
_BATCH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Qualification:
    """Of ``runs`` gradings each, how many the gold patch passed and the empty patch failed. ``reason`` is "" if all."""

    instance_id: str
    graded: str  # digest of what was graded, see graded_digest
    runs: int
    gold_passed: int
    empty_failed: int
    reason: str

    @property
    def qualified(self) -> bool:
        return self.reason == ""


def graded_digest(task: Task) -> str:
    """Digest of all that a grade depends on: not of the issue's text, the split's name, weights or strata."""
    return replace(task, problem_statement="", dataset="", weight=1.0, strata={}).digest


async def qualify(
    tasks: Sequence[Task],
    *,
    provider: SandboxProvider,
    grader: Grader,
    runs: int,
    concurrency: int = 2,
    limits: Limits = _LIMITS,
) -> list[Qualification]:
    """Grade the gold and the empty patch of every task ``runs`` times, at most ``concurrency`` gradings at once.

    An infrastructure failure is tried again twice and then becomes the reason: the task can't be graded here. Stops a
    task at its first wrong result.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> Qualification:
        async with slots:
            return await _qualify(task, provider, grader, runs, task.limits(limits))

    async with asyncio.TaskGroup() as group:
        started = [group.create_task(one(task)) for task in tasks]
    return [task.result() for task in started]


async def _qualify(task: Task, provider: SandboxProvider, grader: Grader, runs: int, limits: Limits) -> Qualification:
    counts = {"gold": 0, "empty": 0}
    reason = ""
    for name, patch, expected in [("gold", task.patch, True), ("empty", "", False)] * runs:

        async def grade(sandbox: Sandbox, patch: str = patch, gold: bool = expected) -> Evidence:
            if not (isinstance(grader, MachineGrader) and grader.by_machine(task)):
                return await grader.grade(task, patch, sandbox=sandbox, limits=limits)
            if gold:
                await solve(task, sandbox, limits)
            return (await grader.grade_machine(task, sandbox=sandbox, limits=limits)).evidence

        try:
            evidence = await _in_fresh_sandbox(task, grade, provider=provider, limits=limits)
        except FarmError as error:
            reason = f"{name} patch: not gradable: {error.boundary}/{error.kind}: {error}"
            break
        if evidence.resolved != expected:
            found = "resolved" if evidence.resolved else "not resolved"
            reason = f"{name} patch: {found} in run {counts[name] + 1}: {evidence.log_tail[-200:]}"
            break
        counts[name] += 1
    return Qualification(
        instance_id=task.instance_id,
        graded=graded_digest(task),
        runs=runs,
        gold_passed=counts["gold"],
        empty_failed=counts["empty"],
        reason=reason[:500],
    )


async def grade_patch(
    task: Task, patch: str, *, provider: SandboxProvider, grader: Grader, limits: Limits = _LIMITS
) -> Evidence:
    """Grade ``patch`` in a fresh sandbox. An infrastructure failure is tried again; raises FarmError after the last."""
    return await _in_fresh_sandbox(
        task,
        lambda sandbox: grader.grade(task, patch, sandbox=sandbox, limits=limits),
        provider=provider,
        limits=limits,
    )


async def _in_fresh_sandbox(
    task: Task, grade: Callable[[Sandbox], Awaitable[Evidence]], *, provider: SandboxProvider, limits: Limits
) -> Evidence:
    for left in reversed(range(_TRIES)):
        spec = grading_spec(
            task, limits=limits, owner=f"grade-{os.getpid()}", deadline_at_s=time.time() + limits.episode_s
        )
        try:
            async with asyncio.timeout(limits.episode_s), provider.open(spec) as sandbox:
                return await grade(sandbox)
        except TimeoutError as error:
            failure = FarmError(f"no grade within {limits.episode_s:g} s", kind="timeout")
            failure.__cause__ = error
        except FarmError as error:
            failure = error
        if not failure.retryable or not left:
            raise failure
    raise AssertionError("unreachable")


def results_path(spec: str) -> Path:
    """Where the results of a task source lie: beside its split."""
    suite, _, rest = spec.partition(":")
    if suite == "made":
        return Path(rest.partition(":")[0]) / "qualification.jsonl"
    if suite == "harbor":
        return Path(rest) / "qualification.jsonl"
    if suite in ("swebench", "subset"):
        return Path(f"{rest}.qualification.jsonl")
    return DATASETS / suite / "qualification.jsonl"


def read(path: Path) -> dict[str, Qualification]:
    """Results by instance id; none when there is no file."""
    if not path.exists():
        return {}
    rows = (Qualification(**json.loads(line)) for line in path.read_text().splitlines())
    return {row.instance_id: row for row in rows}


def write(path: Path, results: Iterable[Qualification]) -> None:
    """Add ``results`` to the file, in place of older ones of the same tasks."""
    rows = read(path) | {result.instance_id: result for result in results}
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(asdict(rows[name])) + "\n" for name in sorted(rows)))
    fresh.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Where a task source stands: ``qualified`` of its ``tasks`` passed in ``runs`` runs or more; ``quarantined`` holds
    the results of the others. ``path`` is the file with all results."""

    tasks: int
    qualified: int
    runs: int
    quarantined: tuple[Qualification, ...]
    path: Path


def qualify_source(
    spec: str,
    *,
    runs: int,
    provider: str | None = None,
    sets: Sequence[str] = (),
    concurrency: int = 2,
    say: Callable[[str], None] = print,
) -> Summary:
    """Qualify what is not qualified yet of the tasks that ``spec`` names, and put the results beside the split.

    Grader, limits and the options of the provider are those of a rollout of ``spec`` under the configuration ``sets``
    ("section.key=value"), as is the provider unless ``provider`` names another one. Nothing is run, and no task
    quarantined, where the whole source can't be graded here: raises ``UsageError`` for an unknown source or provider, a
    grader whose package is missing, images that the provider can't have."""
    from farm.config import load_config
    from farm.grader import make_grader
    from farm.sandbox import make_provider
    from farm.tasks import load_tasks

    if min(runs, concurrency) < 1:
        raise UsageError("--runs and --concurrency must be at least 1")
    tasks = load_tasks(spec, quarantined=True)
    path = results_path(spec)
    if not path.parent.is_dir():
        raise UsageError(
            f"{spec}: results lie beside the tasks' file, and {path.parent} is no folder here; save the rows as "
            ".parquet or .jsonl and give that file"
        )
    config = load_config(sets=sets, overrides={"rollout": {"tasks": spec}, "sandbox": {"provider": provider}})
    made = make_provider(config.sandbox.provider, **config.sandbox_options())
    _check_images(tasks, made)
    grading = _Grading(provider=made, grader=make_grader(config.grader.name), limits=_patient(config.limits.limits))
    known = read(path)
    left = [task for task in tasks if not _is_qualified(task, known, runs)]
    say(f"{len(left)} of {len(tasks)} tasks to qualify in {runs} runs each")
    try:
        asyncio.run(_qualify_into(path, left, grading, runs, concurrency, say))
    finally:
        getattr(grading.provider, "close", lambda: None)()
    known = read(path)
    good = {task.instance_id for task in tasks if _is_qualified(task, known, runs)}
    return Summary(
        tasks=len(tasks),
        qualified=len(good),
        runs=runs,
        quarantined=tuple(known[task.instance_id] for task in tasks if task.instance_id not in good),
        path=path,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m farm.suites.qualify", description="Qualify the tasks of SPEC.")
    parser.add_argument("spec", metavar="SPEC", help="a task source, such as micro:benchmark")
    parser.add_argument("--runs", type=int, required=True, help="gradings of each of the two patches")
    parser.add_argument("--provider", help="default: the one of the suite's rollouts")
    parser.add_argument("--concurrency", type=int, default=2)
    chosen = parser.parse_args(arguments)
    try:
        found = qualify_source(chosen.spec, runs=chosen.runs, provider=chosen.provider, concurrency=chosen.concurrency)
    except FarmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{found.qualified} of {found.tasks} tasks qualified: {found.path}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grading:
    """What a source is graded with."""

    provider: SandboxProvider
    grader: Grader
    limits: Limits


def _patient(limits: Limits) -> Limits:
    """``limits`` of the suite, with at least the time of ``_LIMITS``."""
    least = {name: max(getattr(limits, name), getattr(_LIMITS, name)) for name in ("grade_s", "agent_s", "episode_s")}
    return replace(limits, **least)


def _check_images(tasks: Sequence[Task], provider: SandboxProvider) -> None:
    """Raises UsageError: what no task's image can be had for is no fault of the tasks."""
    images = {task.image for task in tasks}
    if provider.name == "bubblewrap" and images - set(IMAGES):
        raise UsageError(
            f"sandbox 'bubblewrap' has no image {min(images - set(IMAGES))!r}; it has {', '.join(IMAGES)}. Give a "
            "provider of images: --provider docker"
        )
    if isinstance(provider, ImageKeeper):
        asyncio.run(provider.check(images))


async def _qualify_into(
    path: Path, tasks: Sequence[Task], grading: _Grading, runs: int, concurrency: int, say: Callable[[str], None]
) -> None:
    """In batches, so that what is done is kept when this is interrupted."""
    try:
        for first in range(0, len(tasks), _BATCH):
            results = await qualify(
                tasks[first : first + _BATCH],
                provider=grading.provider,
                grader=grading.grader,
                runs=runs,
                concurrency=concurrency,
                limits=grading.limits,
            )
            write(path, results)
            for result in results:
                if not result.qualified:
                    say(f"quarantined {result.instance_id}: {result.reason}")
    finally:
        await grading.grader.close()


def _is_qualified(task: Task, results: Mapping[str, Qualification], runs: int) -> bool:
    """Whether ``results`` hold a pass of this very version of ``task`` in at least so many runs."""
    result = results.get(task.instance_id)
    return result is not None and result.qualified and result.runs >= runs and result.graded == graded_digest(task)


if __name__ == "__main__":
    sys.exit(main())
