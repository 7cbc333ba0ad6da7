"""What SWE-bench grading in a farm sandbox makes of each course of things: a grade, or an error that is no grade."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from farm.errors import GraderError, SandboxLostError
from farm.grader import grading_spec
from farm.grader.kept_logs import kept_log
from farm.grader.official import OfficialGrade
from farm.grader.swebench import SwebenchGrader
from farm.protocols import ExecResult
from farm.sandbox.fake import FakeProvider, result
from farm.types import Evidence, ImageFiles, Limits, Task

START, END, CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
SCRIPT = (
    f"#!/bin/bash\nset -uxo pipefail\n: '{START}'\nrun the tests\nSWEBENCH_TEST_EXIT_CODE=$?\n: '{END}'\n"
    f'echo "{CODE}: $SWEBENCH_TEST_EXIT_CODE"\n'
)
TASK = Task(
    instance_id="o__r-1",
    dataset="d",
    repo="o/r",
    base_commit="a" * 40,
    problem_statement="",
    patch="",
    test_patch="",
    fail_to_pass=("t1",),
    pass_to_pass=("t2",),
    eval_script=SCRIPT,
    log_parser="parse_log_pytest",
    workspace=ImageFiles(),
    eval_type="pass_and_fail",
)
LIMITS = Limits()


@dataclass
class Official:
    """In the place of the grading process: every line "PASSED <id>" between the markers is believed."""

    environment: str | None = None
    logs: list[str] = field(default_factory=list)
    closed: bool = False

    async def eval_script(self, row: Mapping[str, Any]) -> str:
        return str(row["eval_script"])

    async def grade(self, row: Mapping[str, Any], *, patch: str | None, model: str, log: str) -> OfficialGrade:
        self.logs.append(log)
        region = log.split(START)[1].split(END)[0]
        statuses = {test: status for status, test in re.findall(r"^(PASSED|FAILED|SKIPPED) (\S+)", region, re.M)}
        parts = {name: {"success": [], "failure": []} for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        for name, part in parts.items():
            for test in row[name]:
                part["success" if statuses.get(test) == "PASSED" else "failure"].append(test)
        resolved = not any(part["failure"] for part in parts.values())
        report = {"resolved": resolved, "patch_successfully_applied": True, "tests_status": parts}
        return OfficialGrade(report=report, statuses=statuses)

    async def classify(self, log: str) -> str | None:
        return self.environment

    async def close(self) -> None:
        self.closed = True


def shell(
    *lines: str,
    apply_exit: int = 0,
    tests_exit: int = 0,
    start: bool = True,
    end: bool = True,
    timed_out: bool = False,
    alive: bool = True,
) -> Callable[[str, dict[str, bytes]], ExecResult]:
    """A sandbox whose git does as told and whose tests print ``lines``."""

    def respond(command: str, files: dict[str, bytes]) -> ExecResult:
        if "git apply" in command:
            word = re.search(r'echo "(\w+) applied"', command)
            assert word
            return result(f"{word[1]} applied\n" if apply_exit == 0 else "error: does not apply\n", apply_exit)
        if command == "true":
            return result(exit_code=0 if alive else 1)
        script = next(data for path, data in files.items() if path.endswith("eval.sh")).decode()
        marker = re.search(rf"{START} (\w+)", script)
        assert marker
        word = marker[1]
        log = [f"+ : '{START} {word}'"] if start else []
        log += lines
        log += [f"+ : '{END} {word}'", f"+ echo '{CODE} {word}: 0'", f"{CODE} {word}: {tests_exit}"] if end else []
        return replace(result("\n".join(log) + "\n", exit_code=0 if end else 137), timed_out=timed_out)

    return respond


def grade(
    provider: FakeProvider,
    official: Official | None = None,
    *,
    patch: str = "a patch",
    task: Task = TASK,
    kept: Path | None = None,
) -> Evidence:
    async def main() -> Evidence:
        spec = grading_spec(task, limits=LIMITS, owner="test", deadline_at_s=0.0)
        async with provider.open(spec) as sandbox:
            grader = SwebenchGrader(official or Official())  # type: ignore[arg-type]
            if kept is not None:
                grader.keep_logs(kept)
            return await grader.grade(task, patch, sandbox=sandbox, limits=LIMITS)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("lines", "tests_exit", "statuses", "resolved"),
    [
        (("PASSED t1", "PASSED t2"), 0, ("PASSED", "PASSED"), True),
        (("FAILED t1", "PASSED t2"), 1, ("FAILED", "PASSED"), False),
        (("PASSED t1",), 0, ("PASSED", "MISSING"), False),
        (("SKIPPED t1", "PASSED t2"), 0, ("MISSING", "PASSED"), False),
        ((), 0, ("MISSING", "MISSING"), False),
    ],
)
def test_the_official_verdict_is_the_grade(
    lines: tuple[str, ...], tests_exit: int, statuses: tuple[str, str], resolved: bool
) -> None:
    evidence = grade(FakeProvider(shell(*lines, tests_exit=tests_exit)))
    assert evidence.statuses == dict(zip(("t1", "t2"), statuses, strict=True))
    assert (evidence.resolved, evidence.patch_applied, evidence.exit_code) == (resolved, True, tests_exit)


def found(kept: Path, evidence: Evidence) -> Path:
    return kept_log(kept, instance_id=TASK.instance_id, patch="a patch", log_tail=evidence.log_tail)


def test_the_whole_log_is_kept_where_its_row_finds_it(tmp_path: Path) -> None:
    official = Official()
    lines = ("PASSED t1", "PASSED t2", *("x" * 100 for _ in range(100)))
    place = found(tmp_path, grade(FakeProvider(shell(*lines)), official, kept=tmp_path))
    assert (place / "test_output.txt").read_text() == official.logs[0]
    assert len(official.logs[0]) > 10_000
    assert (place / "patch.diff").read_text() == "a patch"
    assert (place / "eval.sh").read_text() == SCRIPT
    assert json.loads((place / "report.json").read_text())[TASK.instance_id]["resolved"] is True
    grade(FakeProvider(shell(*lines)), kept=tmp_path)  # the markers have another random word, the end is the same
    other = found(tmp_path, grade(FakeProvider(shell("FAILED t1")), kept=tmp_path))
    assert other != place
    assert sorted(path.name for path in place.parent.iterdir()) == sorted([place.name, other.name])


def test_a_log_without_a_verdict_is_kept_without_a_report(tmp_path: Path) -> None:
    place = found(tmp_path, grade(FakeProvider(shell("PASSED t1", end=False, timed_out=True)), kept=tmp_path))
    assert sorted(path.name for path in place.iterdir()) == ["eval.sh", "patch.diff", "test_output.txt"]


def test_a_log_that_can_not_be_kept_changes_no_grade(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert grade(FakeProvider(shell("PASSED t1", "PASSED t2")), kept=tmp_path / "file").resolved
    assert "o__r-1 is not kept" in caplog.text


def test_the_exit_status_of_the_script_is_not_that_of_the_tests() -> None:
    assert grade(FakeProvider(shell("FAILED t1", tests_exit=5))).exit_code == 5


def test_a_patch_that_does_not_apply_is_not_resolved() -> None:
    provider = FakeProvider(shell(apply_exit=1))
    evidence = grade(provider)
    assert (evidence.resolved, evidence.patch_applied) == (False, False)
    assert len(provider.opened[0].commands) == 1, "the tests ran without the patch"


def test_an_empty_patch_is_never_run() -> None:
    provider = FakeProvider(shell("PASSED t1", "PASSED t2"))
    assert not grade(provider, patch=" \n").resolved
    assert provider.opened[0].commands == []


@pytest.mark.parametrize(
    "course",
    [
        {"end": False},
        {"end": False, "timed_out": True},
        {"end": True, "timed_out": True},
    ],
)
def test_tests_that_do_not_end_are_not_resolved(course: dict[str, bool]) -> None:
    evidence = grade(FakeProvider(shell("PASSED t1", "PASSED t2", **course)))  # type: ignore[arg-type]
    assert (evidence.resolved, evidence.patch_applied) == (False, True)


@pytest.mark.parametrize(
    ("respond", "kind"),
    [
        (shell(apply_exit=42), "apply"),
        (shell(apply_exit=127), "apply"),
        (shell(start=False, end=False), "no_start"),
        (shell(start=False, end=False, timed_out=True), "setup_timeout"),
        (shell("PASSED t1", end=False, alive=False), "machine"),
    ],
)
def test_a_broken_machine_is_no_grade(respond: Callable[[str, dict[str, bytes]], ExecResult], kind: str) -> None:
    with pytest.raises(GraderError) as caught:
        grade(FakeProvider(respond))
    assert (caught.value.kind, caught.value.retryable) == (kind, True)


def test_what_the_official_classification_calls_environment_is_no_grade() -> None:
    with pytest.raises(GraderError) as caught:
        grade(FakeProvider(shell("FAILED t1")), Official(environment="out_of_memory"))
    assert caught.value.kind == "out_of_memory"
    all_told = FakeProvider(shell("FAILED t1", "PASSED t2", tests_exit=1))
    assert not grade(all_told, Official(environment="out_of_memory")).resolved, "every test was reported"
    assert grade(FakeProvider(shell("PASSED t1", "PASSED t2")), Official(environment="out_of_memory")).resolved


@pytest.mark.parametrize("lost_at_exec", [1, 2])
def test_a_lost_sandbox_raises(lost_at_exec: int) -> None:
    with pytest.raises(SandboxLostError):
        grade(FakeProvider(shell("PASSED t1"), lost_at_exec=lost_at_exec))


def test_markers_of_the_code_under_test_do_not_reach_official_grading() -> None:
    official = Official()
    forged = (END, f"{CODE}: 0", START, "PASSED t1", "PASSED t2", END)
    evidence = grade(FakeProvider(shell("FAILED t1", *forged, tests_exit=1)), official)
    (log,) = official.logs
    assert log.count(START) == log.count(END) == log.count(CODE) == 1
    assert evidence.exit_code == 1


def test_a_cut_log_is_an_error_of_the_sandbox() -> None:
    def respond(command: str, files: dict[str, bytes]) -> ExecResult:
        told = shell("PASSED t1")(command, files)
        return told if "git apply" in command else replace(told, truncated=True)

    with pytest.raises(GraderError) as caught:
        grade(FakeProvider(respond))
    assert (caught.value.kind, caught.value.retryable) == ("log_cut", False)


def test_a_script_without_markers_is_an_error_of_the_task() -> None:
    with pytest.raises(GraderError) as caught:
        grade(FakeProvider(shell()), task=replace(TASK, eval_script="pytest\n"))
    assert (caught.value.kind, caught.value.retryable) == ("eval_script", False)


def test_the_evidence_is_bounded() -> None:
    noise = [f"FAILED other{i}" for i in range(3000)]
    evidence = grade(FakeProvider(shell(*noise, "PASSED t1", "PASSED t2", tests_exit=1)))
    assert set(evidence.statuses) == {"t1", "t2"}
    assert len(evidence.log_tail) < 3_000


def test_closing_ends_the_grading_process() -> None:
    official = Official()
    asyncio.run(SwebenchGrader(official).close())  # type: ignore[arg-type]
    assert official.closed
