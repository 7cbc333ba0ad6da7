"""The tasks from real packages: whole, solvable, noticed by their tests, graded in real sandboxes."""

import asyncio
import time

import pytest

from farm.errors import UsageError
from farm.grader import grading_spec, make_grader
from farm.sandbox import make_provider
from farm.suites import pypi, qualify, sdist
from farm.suites.operators import KINDS
from farm.suites.repo import workspace_files
from farm.tasks import load_tasks
from farm.types import Limits, SdistFiles, Task

LIMITS = Limits(grade_s=90.0, agent_s=100.0, episode_s=110.0)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    try:
        return load_tasks("pypi")
    except UsageError as error:
        if error.kind == "no_sdist":
            pytest.skip(str(error))
        raise


def test_enough_of_every_sort(tasks: list[Task]) -> None:
    assert len(tasks) >= 30
    assert len({task.instance_id for task in tasks}) == len(tasks)
    assert len({task.strata["package"] for task in tasks}) >= 3
    assert len({task.strata["kind"] for task in tasks}) >= len(KINDS) - 2
    assert all(task.fail_to_pass and task.pass_to_pass for task in tasks)
    assert [task.digest for task in tasks] == [task.digest for task in load_tasks("pypi")]
    one = load_tasks("pypi:idna", limit=2)
    assert [task.strata["package"] for task in one] == ["idna", "idna"]


def test_the_agent_starts_from_the_bug_without_the_tests(tasks: list[Task]) -> None:
    for task in tasks:
        assert isinstance(task.workspace, SdistFiles)
        files = workspace_files(task)  # refuses another commit than the task's
        path, _, broken = task.workspace.edit
        assert broken in files[f"/testbed/{path}"].decode()
        assert not any(name.startswith("/testbed/tests/") for name in files)
        assert files[f"/testbed/{path}"] != sdist.files(task.workspace.sha256)[path]


def test_all_are_qualified_as_they_are_now(tasks: list[Task]) -> None:
    results = qualify.read(qualify.results_path("pypi"))
    for task in tasks:
        result = results[task.instance_id]
        assert (result.qualified, result.gold_passed, result.empty_failed) == (True, result.runs, result.runs)
        assert result.runs >= 3
        assert result.graded == qualify.graded_digest(task)


def test_gold_resolves_and_empty_does_not_in_a_sandbox(tasks: list[Task]) -> None:
    provider, grader = make_provider("bubblewrap"), make_grader("tests")
    chosen = {task.strata["package"]: task for task in tasks}

    async def graded(task: Task, patch: str) -> bool:
        spec = grading_spec(task, limits=LIMITS, owner="test", deadline_at_s=time.time() + LIMITS.episode_s)
        async with provider.open(spec) as sandbox:
            return (await grader.grade(task, patch, sandbox=sandbox, limits=LIMITS)).resolved

    async def all_of_them() -> list[list[bool]]:
        return [[await graded(task, task.patch), await graded(task, "")] for task in chosen.values()]

    assert asyncio.run(all_of_them()) == [[True, False]] * len(chosen)


def test_fetching_again_does_nothing(tasks: list[Task]) -> None:
    assert tasks
    assert pypi.fetch() == 0
