"""Stored patches graded anew: compared test by test, each distinct one once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from farm.config import load_config, to_json
from farm.errors import GraderError, UsageError
from farm.protocols import Sandbox
from farm.run_folder import RunFolder
from farm.sandbox.fake import FakeProvider
from farm.tasks import load_tasks
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Boundary,
    EndReason,
    Evidence,
    Failed,
    Graded,
    Limits,
    SamplingParams,
    Task,
    Trajectory,
    Usage,
)
from harness.regrade import Parts, compare, regrade

TASK = load_tasks("micro:benchmark", limit=1)[0]


def evidence(*, passed: bool) -> Evidence:
    status = "PASSED" if passed else "FAILED"
    return Evidence(statuses={"t": status}, resolved=passed, patch_applied=True, exit_code=0, log_tail="")


def trajectory(number: int, patch: str, *, passed: bool, task_digest: str = TASK.digest) -> Trajectory:
    return Trajectory(
        episode_id=f"e{number}", group_id="g", group_size=9, index=number, instance_id=TASK.instance_id,
        task_digest=task_digest, dataset=TASK.dataset, repo=TASK.repo, strata={}, weight=1.0, seed=0, purpose="eval",
        sampling=SamplingParams(), attempt=1, worker="", engine_url="",
        outcome=Graded(reward=float(passed), evidence=evidence(passed=passed)), end_reason=EndReason.SUBMITTED,
        turns=(), patch=patch, timeline=(), usage=Usage(),
    )  # fmt: skip


class Grader:
    """Passes the patch "good"."""

    def __init__(self) -> None:
        self.graded: list[str] = []

    async def grade(self, task: Task, patch: str, *, sandbox: Sandbox, limits: Limits) -> Evidence:
        self.graded.append(patch)
        if patch == "broken":
            raise GraderError("no such parser", kind="log_parser", retryable=False)
        return evidence(passed=patch == "good")


def test_each_distinct_patch_is_graded_once_and_every_episode_compared() -> None:
    grader = Grader()
    rows = [
        trajectory(0, "good", passed=True),
        trajectory(1, "bad", passed=False),
        trajectory(2, "good", passed=True),
        trajectory(3, "good", passed=False),  # came out otherwise then
        trajectory(4, "broken", passed=False),
    ]
    parts = Parts(provider=FakeProvider(), grader=grader, limits=Limits())
    found, gradings = asyncio.run(compare(rows, {TASK.digest: TASK}, parts, concurrency=2))
    assert sorted(grader.graded) == ["bad", "broken", "good"]
    assert gradings == 3
    assert [one.episode_id for one in found] == ["e0", "e1", "e2", "e3", "e4"]
    assert [one.same for one in found] == [True, True, True, False, False]
    assert (found[3].before, found[3].after, found[3].tests) == (False, True, ("t",))
    assert found[4].after is None
    assert found[4].why == "grader/log_parser: no such parser"


def test_a_run_without_anything_to_grade_is_refused(tmp_path: Path) -> None:
    settings = ["rollout.tasks=micro:benchmark", "rollout.purpose=eval", "sandbox.provider=fake"]
    run = RunFolder.create(tmp_path / "run", to_json(load_config(sets=settings)))
    failed = Failed(boundary=Boundary.ENGINE, kind="x", message="")
    with DirectoryLog(run.trajectories) as log:
        log.append_many(
            [
                trajectory(0, "", passed=False),
                trajectory(1, "good", passed=True, task_digest="of another version"),
                replace(trajectory(2, "good", passed=True), outcome=failed),
            ]
        )
        log.seal()
    with pytest.raises(UsageError, match=r"none of its 2 graded .* 1 ran no tests, the tasks of 1 are not in"):
        regrade(run)
