"""The tasks from real packages: whole, solvable, noticed by their tests, graded in real sandboxes."""

import subprocess
import sys
from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.suites import pypi, qualify, sdist
from farm.suites.operators import KINDS
from farm.suites.repo import workspace_files
from farm.tasks import load_tasks
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded, SdistFiles, Task


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


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("null", 0.0)])
def test_rollout_of_the_whole_suite(tasks: list[Task], tmp_path: Path, agent: str, reward: float) -> None:
    farm = Path(sys.executable).with_name("farm")
    command = [farm, "rollout", "--tasks", "pypi", "--agent", agent, "--workers", "2", "--run", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for _, row in DirectoryLog(tmp_path / "run" / "trajectories").read(Cursor())]
    assert {row.instance_id for row in rows} == {task.instance_id for task in tasks}
    assert len(rows) == len(tasks)
    outcomes = {row.instance_id: row.outcome.reward if isinstance(row.outcome, Graded) else row.outcome for row in rows}
    assert outcomes == dict.fromkeys(outcomes, reward)


def test_fetching_again_does_nothing(tasks: list[Task]) -> None:
    assert tasks
    assert pypi.fetch() == 0
