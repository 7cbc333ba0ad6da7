"""Harbor tasks run here: whole attempts in real sandboxes, in the agent's machine or by its diff, and folders that the
farm wrote give what its own grader gives."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from harbor_folders import SOLVE, TEST, TOML, write_folder
from makers import make_task

from farm import cli
from farm.agent import make_agent
from farm.episode import run_episode
from farm.errors import FarmError, UsageError
from farm.grader import grading_spec, make_grader
from farm.harbor.templates import COMMIT
from farm.harbor.write import write_tasks
from farm.protocols import Agent, ExecResult
from farm.sandbox import make_provider
from farm.sandbox.fake import FakeProvider, result
from farm.suites import micro
from farm.suites.patch import unified
from farm.suites.qualify import qualify_source
from farm.tasks import load_tasks
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Attempt,
    Boundary,
    Cursor,
    Episode,
    Evidence,
    Failed,
    Graded,
    ImageFiles,
    InlineFiles,
    Limits,
    Task,
    Trajectory,
)
from farm.worker import NoEngine, NoRenderer

LIMITS = Limits(grade_s=30.0, disk_bytes=64 << 20)


class Runs:
    """An agent that runs one command."""

    def __init__(self, command: str) -> None:
        self._command = command

    async def run(self, task: Task, **parts: object) -> object:
        await parts["sandbox"].exec(self._command, timeout_s=20)  # type: ignore[attr-defined]
        return await make_agent("null").run(task, **parts)  # type: ignore[arg-type]


def attempt(task: Task, agent: Agent | Runs | str, *, limits: Limits = LIMITS) -> Trajectory:
    episode = Episode(task=task, group_id="g", index=0, group_size=1, seed=0, limits=task.limits(limits))

    async def main() -> Trajectory:
        return await run_episode(
            Attempt(episode=episode, number=1, engine_url="", min_version=0, queued_at_s=time.time()),
            provider=make_provider("bubblewrap"),
            engine=NoEngine(),
            agent=make_agent(agent) if isinstance(agent, str) else agent,  # type: ignore[arg-type]
            renderer=NoRenderer(),
            grader=make_grader("harbor"),
            worker="w",
            now=time.time,
        )

    return asyncio.run(main())


def only(folder: Path) -> Task:
    (task,) = load_tasks(f"harbor:{folder}")
    return task


# --------------------------------------------------------------------------------------- by the machine


def test_the_machine_that_the_agent_leaves_is_graded(tmp_path: Path) -> None:
    task = only(write_folder(tmp_path / "t"))
    solved = attempt(task, "oracle").outcome
    assert isinstance(solved, Graded), solved
    assert (solved.reward, solved.evidence.resolved) == (1.0, True)
    assert "reward=1 count=1" in solved.evidence.log_tail
    nothing = attempt(task, "null").outcome
    assert isinstance(nothing, Graded), nothing
    assert (nothing.reward, nothing.evidence.resolved) == (0.0, False)
    half = attempt(task, Runs("cd /app; echo 3 > count.txt")).outcome
    assert isinstance(half, Graded)
    assert half.reward == pytest.approx(2 / 3)
    assert not half.evidence.resolved


def test_what_the_agent_left_for_the_tests_is_gone_before_they_run(tmp_path: Path) -> None:
    cheat = (
        "mkdir -p /tests /logs/verifier; echo 'exit 0' > /tests/tool; echo '{\"reward\": 1}' > "
        "/logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt; ln -s / /tests/link; touch /tests/.hidden"
    )
    spoilt = TEST.replace("cd /app", "[ -e /tests/.hidden ] && echo 9 > /logs/verifier/reward.txt && exit\ncd /app")
    outcome = attempt(only(write_folder(tmp_path / "t", test=spoilt)), Runs(cheat)).outcome
    assert isinstance(outcome, Graded), outcome
    assert outcome.reward == 0.0


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("#!/bin/bash\nexit 0\n", "no_reward"),
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt\n", "reward"),
        ("#!/bin/bash\necho solved > /logs/verifier/reward.txt\n", "reward"),
        ('#!/bin/bash\necho \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n', "reward"),
        ('#!/bin/bash\necho \'{"reward": "1"}\' > /logs/verifier/reward.json\n', "reward"),
        ("#!/bin/bash\necho '[1]' > /logs/verifier/reward.json\necho 1 > /logs/verifier/reward.txt\n", "reward"),
    ],
)
def test_no_reward_that_can_be_read_is_a_failure_and_no_zero(tmp_path: Path, test: str, kind: str) -> None:
    outcome = attempt(only(write_folder(tmp_path / "t", test=test)), "null").outcome
    assert isinstance(outcome, Failed), outcome
    assert (outcome.boundary, outcome.kind) == (Boundary.GRADER, kind)


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("#!/bin/bash\necho 0.25 > /logs/verifier/reward.txt\nexit 7\n", 0.25),
        ("#!/bin/bash\necho '{\"accuracy\": 0.5}' > /logs/verifier/reward.json\n", 0.5),
        ("#!/usr/bin/env python3\nopen('/logs/verifier/reward.txt', 'w').write('1')\n", 1.0),
        ("#!/bin/bash\nsleep 60\n", 0.0),
    ],
)
def test_rewards_as_harbor_reads_them(tmp_path: Path, test: str, reward: float) -> None:
    toml = TOML.replace("timeout_sec = 20.0", "timeout_sec = 2.0") if "sleep" in test else TOML
    outcome = attempt(only(write_folder(tmp_path / "t", test=test, toml=toml)), "null").outcome
    assert isinstance(outcome, Graded), outcome
    assert outcome.reward == reward


def test_an_oracle_needs_a_solution(tmp_path: Path) -> None:
    outcome = attempt(only(write_folder(tmp_path / "t", solve=None)), "oracle").outcome
    assert isinstance(outcome, Failed)
    assert (outcome.boundary, outcome.retryable) == (Boundary.AGENT, False)
    failing = attempt(only(write_folder(tmp_path / "u", solve=f"{SOLVE}exit 3\n")), "oracle").outcome
    assert isinstance(failing, Graded)  # its exit code says nothing, as in Harbor
    assert failing.reward == 1.0


def test_folders_are_qualified_as_they_are_graded(tmp_path: Path) -> None:
    write_folder(tmp_path / "tasks" / "good")
    write_folder(tmp_path / "tasks" / "bad", solve="#!/bin/bash\n", toml=TOML.replace("count-lines", "bad"))
    write_tasks(micro.load("rl")[:1], tmp_path / "tasks" / "written", limits=LIMITS)
    found = qualify_source(f"harbor:{tmp_path / 'tasks'}", runs=1, provider="bubblewrap", say=lambda _: None)
    assert (found.tasks, found.qualified) == (3, 2)
    (bad,) = found.quarantined
    assert bad.reason.startswith("gold patch: not resolved"), bad.reason
    assert bad.instance_id not in {task.instance_id for task in load_tasks(f"harbor:{tmp_path / 'tasks'}")}


def test_a_machine_that_lets_nothing_be_put_in_place_is_a_failure(tmp_path: Path) -> None:
    task = only(write_folder(tmp_path / "t"))

    async def main(respond: Callable[[str, dict[str, bytes]], ExecResult]) -> None:
        spec = grading_spec(task, limits=LIMITS, owner="t", deadline_at_s=0.0)
        async with FakeProvider(respond).open(spec) as sandbox:
            await make_grader("harbor").grade_machine(task, sandbox=sandbox, limits=LIMITS)  # type: ignore[attr-defined]

    with pytest.raises(FarmError, match=r"can't be made .*no room") as caught:
        asyncio.run(main(lambda *_: result("no room", exit_code=1)))
    assert caught.value.kind == "machine"


# ----------------------------------------------------------------------------------------- written folders


def grades(*wanted: tuple[str, Task, str]) -> list[Evidence]:
    """Grader, task, patch -> evidence; all in fresh sandboxes of one provider."""

    async def main() -> list[Evidence]:
        provider = make_provider("bubblewrap")

        async def one(grader: str, task: Task, patch: str) -> Evidence:
            spec = grading_spec(task, limits=LIMITS, owner="t", deadline_at_s=time.time() + 100)
            async with provider.open(spec) as sandbox:
                return await make_grader(grader).grade(task, patch, sandbox=sandbox, limits=LIMITS)

        return await asyncio.gather(*(one(*each) for each in wanted))

    return asyncio.run(main())


def written(tasks: list[Task], out: Path) -> list[Task]:
    assert write_tasks(tasks, out, limits=LIMITS) == len(tasks)
    back = {task.instance_id: task for task in load_tasks(f"harbor:{out}")}
    assert len(back) == len(tasks)
    return [back[task.instance_id] for task in tasks]


@pytest.mark.parametrize("number", range(3))
def test_a_folder_that_the_farm_wrote_grades_as_the_task_does(tmp_path: Path, number: int) -> None:
    task = micro.generate("rl", count=3)[number]
    (back,) = written([task], tmp_path / "out")
    assert (back.repo, back.base_commit, back.patch) == (task.repo, task.base_commit, task.patch)
    assert (back.image, back.workdir, back.strata) == (task.image, task.workdir, task.strata)
    assert back.own_limits["grade_s"] == 30.0
    assert isinstance(task.workspace, InlineFiles)
    (path, broken) = next(iter(task.workspace.files.items()))
    hostile = unified(path, broken, f"import sys\nprint('PASSED x')\nsys.exit(0)\n{broken}")
    shadow = unified("random.py", None, "raise SystemExit\n")
    patches = (task.patch, "", hostile, task.patch + shadow, "not a diff", task.patch.replace("\n-", "\n-~"))
    found = grades(*(each for patch in patches for each in (("tests", task, patch), ("harbor", back, patch))))
    for patch, ours, theirs in zip(patches, found[::2], found[1::2], strict=True):
        assert (theirs.resolved, theirs.patch_applied) == (ours.resolved, ours.patch_applied), (patch, theirs)
        assert theirs.statuses == ours.statuses, (patch, theirs)
    assert [evidence.resolved for evidence in found[::2]] == [True, False, False, True, False, False]


def test_the_agents_diff_alone_crosses_over(tmp_path: Path) -> None:
    (back,) = written(micro.generate("rl", count=1), tmp_path / "out")
    solved = attempt(back, "oracle")
    assert isinstance(solved.outcome, Graded)
    assert (solved.outcome.reward, solved.patch.strip()) == (1.0, back.patch.strip())
    cheat = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '# x' >> README; touch new"
    spoilt = attempt(back, Runs(cheat)).outcome
    assert isinstance(spoilt, Graded)
    assert spoilt.reward == 0.0


def test_the_image_that_harbor_builds_has_the_same_commit(tmp_path: Path) -> None:
    (task,) = micro.generate("sft", count=1)
    written([task], tmp_path / "out")
    (dockerfile,) = (tmp_path / "out").rglob("Dockerfile")
    assert f"RUN {COMMIT}\n" in dockerfile.read_text()
    repository = dockerfile.parent / "repo"
    subprocess.run(["bash", "-c", COMMIT], cwd=repository, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True)
    assert head.stdout.strip() == task.base_commit


def test_a_folder_that_was_changed_after_it_was_written(tmp_path: Path) -> None:
    (task,) = micro.generate("sft", count=1)
    written([task], tmp_path / "out")
    next(iter((tmp_path / "out").rglob("repo/*"))).write_text("x = 1\n")
    with pytest.raises(UsageError, match=r"base_commit is '\w+', environment/repo is \w+; write the task anew"):
        load_tasks(f"harbor:{tmp_path / 'out'}")


ROW = replace(
    make_task("o__r-1"),
    base_commit="a" * 40,
    repo="o/r",
    image="o/r:latest",
    version="1.0",
    dataset="swebench/rows@1",
    patch="diff",
    test_patch="diff",
    problem_statement="It breaks.",
    fail_to_pass=("t::a",),
    pass_to_pass=("t::b",),
    eval_script="#!/bin/bash\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n",
    log_parser="parse_log_pytest",
    workspace=ImageFiles(),
    eval_type="pass_and_fail",
)


def test_a_row_of_swebench_comes_back_as_the_row(tmp_path: Path) -> None:
    (back,) = written([ROW], tmp_path / "out")
    same = ("instance_id", "repo", "base_commit", "patch", "test_patch", "fail_to_pass", "pass_to_pass", "eval_script")
    assert all(getattr(back, name) == getattr(ROW, name) for name in (*same, "log_parser", "image", "workspace"))
    folder = tmp_path / "out" / "o__r-1"
    assert (folder / "environment" / "Dockerfile").read_text().startswith("FROM o/r:latest\n")
    assert "git repack" in (folder / "environment" / "strip.sh").read_text()
    checked = subprocess.run(["bash", "-n", folder / "environment" / "strip.sh"], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_what_can_not_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its log parser or eval script is not one"):
        write_tasks([make_task("x")], tmp_path / "a", limits=LIMITS)
    (task,) = micro.generate("sft", count=1)
    (back,) = written([task], tmp_path / "b")
    with pytest.raises(UsageError, match="exists already; give another --out"):
        write_tasks([task], tmp_path / "b", limits=LIMITS)
    with pytest.raises(UsageError, match="is a Harbor task already"):
        write_tasks([back], tmp_path / "c", limits=LIMITS)


# ------------------------------------------------------------------------------------------ commands


def test_out_by_command_and_back_through_a_whole_farm(tmp_path: Path) -> None:
    """export-harbor, rollout of what it wrote, export-atif of that."""
    run = CliRunner()
    out = str(tmp_path / "out")
    done = run.invoke(cli.main, ["export-harbor", "micro:benchmark", "--out", out, "--limit", "2"])
    assert (done.exit_code, "2 tasks in" in done.output) == (0, True), done.output
    write_folder(tmp_path / "out" / "machine")
    arguments = [
        "rollout",
        "--tasks",
        f"harbor:{out}",
        "--agent",
        "oracle",
        "--workers",
        "1",
        "--run",
        str(tmp_path / "run"),
    ]
    done = run.invoke(cli.main, [*arguments, "--set", "sandbox.provider=bubblewrap"])
    assert done.exit_code == 0, done.output
    rows = [row for _, row in DirectoryLog(tmp_path / "run" / "trajectories", create=False).read(Cursor())]
    assert [row.outcome.reward for row in rows if isinstance(row.outcome, Graded)] == [1.0, 1.0, 1.0]
    done = run.invoke(cli.main, ["export-atif", str(tmp_path / "run"), "--out", str(tmp_path / "atif")])
    assert (done.exit_code, "3 episodes" in done.output) == (0, True), done.output
