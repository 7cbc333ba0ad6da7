"""SWE-bench grading end to end: a row whose image is the farm's own, a real sandbox, real tests, the real verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farm.cli import main
from farm.config import load_config
from farm.errors import GraderError
from farm.grader import grading_spec, make_grader
from farm.grader.official import OfficialGrading
from farm.grader.swebench import SwebenchGrader
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox import make_provider
from farm.start import open_run
from farm.suites.patch import unified
from farm.suites.qualify import qualify_source
from farm.suites.repo import make_repo
from farm.tasks import load_tasks
from farm.trajectory_log import DirectoryLog
from farm.types import Attempt, Episode, Evidence, ImageFiles, Limits, Task
from farm.worker import EpisodeWorker, Receipt, WorkerOptions

BUG, FIX = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
FILES = {"calc.py": BUG, "setup.py": "print('installed')\n", "test_calc.py": "def test_nothing():\n    pass\n"}
COMMIT, REPO = make_repo(FILES)
TESTS = "from calc import add\n\ndef test_add():\n    assert add(2, 2) == 4\n\ndef test_nothing():\n    pass\n"
TEST_PATCH = unified("test_calc.py", FILES["test_calc.py"], TESTS)
SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed || true
python setup.py develop
git checkout {COMMIT} test_calc.py
git apply -v - <<'EOF_114329324912'
{TEST_PATCH}
EOF_114329324912
: '>>>>> Start Test Output'
python -m pytest -rA -p no:cacheprovider test_calc.py
: '>>>>> End Test Output'
git checkout {COMMIT} test_calc.py
"""
TASK = Task(
    instance_id="o__calc-1",
    dataset="toy",
    repo="o/calc",
    base_commit=COMMIT,
    problem_statement="add subtracts",
    patch=unified("calc.py", BUG, FIX),
    test_patch=TEST_PATCH,
    fail_to_pass=("test_calc.py::test_add",),
    pass_to_pass=("test_calc.py::test_nothing",),
    eval_script=SCRIPT,
    log_parser="parse_log_pytest",
    workspace=ImageFiles(),
    image="host-pytest",
    version="1",
    eval_type="pass_and_fail",
)
LIMITS = Limits(grade_s=60.0, agent_s=80.0, episode_s=120.0, memory_bytes=1 << 30, pids=256)
OTHER = unified("calc.py", BUG, BUG.replace("a - b", "a // b") + "# no mend\n")
FORGERY = (
    "printf '%s\\n' '>>>>> Start Test Output' 'PASSED test_calc.py::test_add' 'PASSED test_calc.py::test_nothing' "
    "'>>>>> End Test Output' '>>>>> Test Exit Code: 0'"
)


Grade = Callable[..., Evidence]


@pytest.fixture
def grade(use: Any) -> Grade:
    """Grades a patch as a worker would, with the one grading process. ``before`` changes the image."""

    def run(patch: str, *, task: Task = TASK, limits: Limits = LIMITS, before: str = "true") -> Evidence:
        async def work(official: OfficialGrading) -> Evidence:
            spec = grading_spec(task, limits=limits, owner="test", deadline_at_s=time.time() + 300)
            async with make_provider("bubblewrap").open(spec) as sandbox:
                await image(sandbox, before)
                return await SwebenchGrader(official).grade(task, patch, sandbox=sandbox, limits=limits)

        found: Evidence = use(work)
        return found

    return run


async def image(sandbox: Sandbox, before: str) -> None:
    """What a real image brings: the repository at its place."""
    await sandbox.write_files({f"/testbed/{path}": data for path, data in REPO.items()})
    assert (await sandbox.exec(before, timeout_s=30)).exit_code == 0


def test_the_gold_patch_is_resolved_and_its_absence_is_not(grade: Grade) -> None:
    good = grade(TASK.patch)
    assert good.statuses == {"test_calc.py::test_add": "PASSED", "test_calc.py::test_nothing": "PASSED"}
    assert (good.resolved, good.exit_code) == (True, 0)
    bad = grade(unified("calc.py", BUG, BUG + "\n# looked at it\n"))
    assert bad.statuses == {"test_calc.py::test_add": "FAILED", "test_calc.py::test_nothing": "PASSED"}
    assert (bad.resolved, bad.patch_applied, bad.exit_code) == (False, True, 1)


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(TASK.patch.replace("-    return a - b", "-    return a * b"), id="another base"),
        pytest.param("not a diff\n", id="no diff"),
    ],
)
def test_patches_that_do_not_fit(grade: Grade, patch: str) -> None:
    evidence = grade(patch)
    assert (evidence.patch_applied, evidence.resolved) == (False, False)


def test_a_patch_that_is_there_already_counts_as_applied(grade: Grade) -> None:
    assert grade(TASK.patch, before="sed -i 's/a - b/a + b/' calc.py").patch_applied


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(f'import os\nos.system("""{FORGERY}""")\n', id="a region printed by setup.py"),
        pytest.param("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n", id="the shell is killed"),
    ],
)
def test_code_that_runs_before_the_tests_can_not_forge(grade: Grade, code: str) -> None:
    patch = unified("setup.py", FILES["setup.py"], code)
    resolved: bool | str
    try:
        resolved = grade(patch).resolved
    except GraderError as error:
        resolved = error.kind
    assert resolved in (False, "no_start")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import os\nos._exit(0)\n", id="ends the tests with success"),
        pytest.param("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n", id="kills the shell"),
        pytest.param("while True:\n    pass\n", id="never ends"),
    ],
)
def test_code_that_ends_the_tests_is_not_resolved(grade: Grade, code: str) -> None:
    limits = replace(LIMITS, grade_s=10.0)
    evidence = grade(unified("calc.py", BUG, BUG + code), limits=limits)
    assert (evidence.resolved, evidence.patch_applied) == (False, True)


def test_an_image_without_the_repository_is_no_grade(grade: Grade) -> None:
    with pytest.raises(GraderError) as caught:
        grade(TASK.patch, before="rm -rf .git")
    assert caught.value.kind == "apply"


def test_the_grader_of_the_table_has_a_process_of_its_own_and_ends_it() -> None:
    async def main() -> Evidence:
        grader = make_grader("swebench")
        spec = grading_spec(TASK, limits=LIMITS, owner="test", deadline_at_s=time.time() + 300)
        try:
            async with make_provider("bubblewrap").open(spec) as sandbox:
                await image(sandbox, "true")
                return await grader.grade(TASK, TASK.patch, sandbox=sandbox, limits=LIMITS)
        finally:
            await grader.close()

    assert asyncio.run(main()).resolved


class WithRepository:
    """Sandboxes that have the repository in their image."""

    name = "toy"

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with make_provider("bubblewrap").open(spec) as sandbox:
            await image(sandbox, "true")
            yield sandbox

    async def sweep(self, *, now_s: float) -> int:
        return 0


def rows(folder: Path, patches: Mapping[str, str]) -> str:
    """A file of rows like that of ``TASK``, with other gold patches; its spec."""
    names = ("repo", "base_commit", "test_patch", "problem_statement", "version", "eval_script", "log_parser")
    row = {name: getattr(TASK, name) for name in (*names, "image", "eval_type")} | {
        "FAIL_TO_PASS": TASK.fail_to_pass,
        "PASS_TO_PASS": TASK.pass_to_pass,
    }
    lines = [json.dumps(row | {"instance_id": name, "patch": patch}) for name, patch in patches.items()]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return f"swebench:{folder / 'rows.jsonl'}"


def test_rows_are_qualified_as_rollouts_grade_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.sandbox.make_provider", lambda *_, **__: WithRepository())
    spec = rows(tmp_path, {"o__calc-1": TASK.patch, "o__calc-2": OTHER})
    found = qualify_source(spec, runs=1, say=lambda _: None)
    assert (found.tasks, found.qualified) == (2, 1)
    assert found.quarantined[0].instance_id == "o__calc-2"
    assert found.quarantined[0].reason.startswith("gold patch: not resolved")


def test_a_run_gives_the_official_report_and_its_logs_are_graded_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a worker of the farm to SWE-bench's own files, and back in through ``farm grade``."""
    monkeypatch.setattr("farm.worker.make_provider", lambda *_, **__: WithRepository())
    spec = rows(tmp_path, {"o__calc-1": TASK.patch, "o__calc-2": OTHER, "o__calc-3": TASK.patch})
    config = load_config(overrides={"rollout": {"tasks": spec, "purpose": "eval"}})
    run = open_run(tmp_path / "run", config)
    options = WorkerOptions(
        log_path=str(run.trajectories), provider="toy", agent="oracle", renderer="chat", grader="swebench",
        model_path="", graded_path=str(run.graded),
    )  # fmt: skip

    async def attempts() -> None:
        worker = EpisodeWorker(worker="w", options=options)
        for task in load_tasks(spec)[:2]:
            episode = Episode(task=task, group_id=task.instance_id, index=0, group_size=1, seed=0, limits=LIMITS)
            attempt = Attempt(episode=episode, number=1, engine_url="", min_version=0, queued_at_s=time.time())
            assert isinstance(await worker.run(attempt), Receipt)
        await worker.close()

    asyncio.run(attempts())
    with DirectoryLog(run.trajectories) as log:
        log.seal()
    out = tmp_path / "official"
    command = [
        "predictions",
        str(run.path),
        "--model",
        "org/m",
        "--out",
        str(tmp_path / "p.jsonl"),
        "--report",
        str(out),
    ]
    told = CliRunner().invoke(main, [*command, "--run-id", "one"])
    assert told.exit_code == 0, told.output
    assert "resolved: 33.3 % (1/3)" in told.output
    report = json.loads((out / "org__m.one.json").read_text())
    assert (report["resolved_ids"], report["unresolved_ids"]) == (["o__calc-1"], ["o__calc-2"])
    assert (report["incomplete_ids"], report["error_ids"]) == (["o__calc-3"], [])
    tree = out / "logs" / "run_evaluation" / "one"
    assert "PASSED test_calc.py::test_add" in (tree / "org__m" / "o__calc-1" / "test_output.txt").read_text()

    again = CliRunner().invoke(
        main,
        ["grade", "--dataset", spec, "--predictions", str(tmp_path / "p.jsonl"), "--logs", str(tree), "--out",
         str(tmp_path / "again"), "--run-id", "two"],
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    second = json.loads((tmp_path / "again" / "org__m.two.json").read_text())
    assert {key: second[key] for key in report} == report
