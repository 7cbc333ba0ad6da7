"""`harness regrade`: grade a run's stored patches anew, without generating anything, and compare.

A patch is graded as it was then: in a fresh sandbox, by the run's grader, under the run's limits. Episodes of one task
with the same patch are graded once and compared each. Left out are episodes for which no test was run (they failed, or
changed nothing), and those whose task is another one by now.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farm.config import FarmConfig, parse_config
from farm.errors import FarmError, UsageError
from farm.grader import make_grader
from farm.protocols import Grader, SandboxProvider
from farm.run_folder import RunFolder
from farm.sandbox import make_provider
from farm.suites.qualify import grade_patch
from farm.tasks import load_tasks
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Evidence, Graded, Limits, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """One episode, then and now. ``after`` is None when it could not be graded here, and ``why`` says so; ``tests``
    names the tests that came out otherwise."""

    episode_id: str
    instance_id: str
    before: bool
    after: bool | None
    tests: tuple[str, ...] = ()
    why: str = ""

    @property
    def same(self) -> bool:
        """Each test and the whole came out as they did then."""
        return self.after == self.before and not self.tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrade:
    """``gradings``: how many were carried out; ``without_tests`` and ``other_tasks``: how many episodes were left
    out."""

    episodes: tuple[Regraded, ...]
    gradings: int
    without_tests: int
    other_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What it is graded with."""

    provider: SandboxProvider
    grader: Grader
    limits: Limits


def regrade(
    run: RunFolder, *, limit: int | None = None, concurrency: int = 2, say: Callable[[str], None] = print
) -> Regrade:
    """Grade what the first ``limit`` episodes of ``run`` (default: all) left.

    Raises ``UsageError`` when there is nothing that could be graded."""
    config = parse_config(run.config(), where=str(run.path / "config.json"))
    tasks = {task.digest: task for task in _tasks(config)}
    log = DirectoryLog(run.trajectories, create=False)
    rows = [t for _, t in log.read(Cursor()) if isinstance(t.outcome, Graded)][:limit]
    tested = [t for t in rows if t.patch]
    known = [t for t in tested if t.task_digest in tasks]
    if not known:
        raise UsageError(
            f"{run.path}: none of its {len(rows)} graded episodes can be graded anew: {len(rows) - len(tested)} ran no "
            f"tests, the tasks of {len(tested)} are not in {config.rollout.tasks!r} as it is now"
        )
    parts = Parts(
        provider=make_provider(config.sandbox.provider, **config.sandbox_options()),
        grader=make_grader(config.grader.name),
        limits=config.limits.limits,
    )
    say(f"{len({(t.task_digest, t.patch) for t in known})} patches of {len(known)} episodes to grade")
    episodes, gradings = asyncio.run(_compare_and_close(known, tasks, parts, concurrency))
    return Regrade(
        episodes=tuple(episodes),
        gradings=gradings,
        without_tests=len(rows) - len(tested),
        other_tasks=len(tested) - len(known),
    )


async def _compare_and_close(
    rows: Sequence[Trajectory], tasks: Mapping[str, Task], parts: Parts, concurrency: int
) -> tuple[list[Regraded], int]:
    try:
        return await compare(rows, tasks, parts, concurrency=concurrency)
    finally:
        await parts.grader.close()


async def compare(
    rows: Sequence[Trajectory], tasks: Mapping[str, Task], parts: Parts, *, concurrency: int
) -> tuple[list[Regraded], int]:
    """Grade every distinct patch of ``rows`` once, at most ``concurrency`` at a time; the episodes in their order, and
    the number of gradings. ``tasks``: by digest."""
    slots = asyncio.Semaphore(concurrency)
    alike: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for row in rows:
        alike[row.task_digest, row.patch].append(row)

    async def one(digest: str, patch: str) -> Evidence | FarmError:
        async with slots:
            try:
                return await grade_patch(
                    tasks[digest], patch, provider=parts.provider, grader=parts.grader, limits=parts.limits
                )
            except FarmError as error:
                return error

    async with asyncio.TaskGroup() as group:
        started = {key: group.create_task(one(*key)) for key in alike}
    return [_compared(row, started[row.task_digest, row.patch].result()) for row in rows], len(started)


def _compared(row: Trajectory, now: Evidence | FarmError) -> Regraded:
    assert isinstance(row.outcome, Graded)
    then = row.outcome.evidence
    if isinstance(now, FarmError):
        return Regraded(
            episode_id=row.episode_id,
            instance_id=row.instance_id,
            before=then.resolved,
            after=None,
            why=f"{now.boundary.value}/{now.kind}: {now}",
        )
    names = then.statuses.keys() | now.statuses.keys()
    return Regraded(
        episode_id=row.episode_id,
        instance_id=row.instance_id,
        before=then.resolved,
        after=now.resolved,
        tests=tuple(sorted(name for name in names if then.statuses.get(name) != now.statuses.get(name))),
    )


def _tasks(config: FarmConfig) -> list[Task]:
    """Those that were quarantined since, too."""
    return load_tasks(config.rollout.tasks, quarantined=True)
