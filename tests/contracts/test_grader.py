"""The contract of Grader, on every implementation, with a sandbox in memory that prints a given log."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from farm.errors import GraderError, SandboxLostError, UsageError
from farm.grader import GRADERS, grading_spec, make_grader
from farm.protocols import ExecResult
from farm.sandbox.fake import FakeProvider, result
from farm.suites.patch import unified
from farm.suites.repo import make_repo
from farm.types import Evidence, InlineFiles, Limits, Task

FILES = {"calc.py": "a\n"}
TASK = Task(
    instance_id="toy-1",
    dataset="toy",
    repo="toy/toy",
    base_commit=make_repo(FILES)[0],
    problem_statement="",
    patch=unified("calc.py", "a\n", "b\n"),
    test_patch=unified("test_calc.py", None, "test\n"),
    fail_to_pass=("t1",),
    pass_to_pass=("t2",),
    eval_script="echo '>>>>> Start Test Output'\nrun the tests\necho '>>>>> End Test Output'\n",
    log_parser="micro",
    workspace=InlineFiles(files=FILES),
)
LIMITS = Limits()


def shell(*lines: str, tests_exit: int = 0, end: bool = True) -> Callable[[str, dict[str, bytes]], ExecResult]:
    """A sandbox whose tests print ``lines``."""

    def respond(command: str, _: dict[str, bytes]) -> ExecResult:
        found = re.search(r"echo (\w+) base", command)
        assert found
        word = found[1]
        log = [f"{word} base", f"{word} patched", f">>>>> Start Test Output {word}", *lines]
        log += [f">>>>> End Test Output {word}", f"{word} exit {tests_exit}"] if end else []
        return result("\n".join(log) + "\n", exit_code=0 if end else 137)

    return respond


def grade(name: str, provider: FakeProvider, patch: str = TASK.patch, task: Task = TASK) -> Evidence:
    async def main() -> Evidence:
        spec = grading_spec(task, limits=LIMITS, owner="test", deadline_at_s=0.0)
        async with provider.open(spec) as sandbox:
            return await make_grader(name).grade(task, patch, sandbox=sandbox, limits=LIMITS)

    return asyncio.run(main())


# Their logs are not of this form. Their contracts: tests/unit/test_grader_swebench.py (with the package:
# tests/extra_swebench), and tests/integration/test_harbor_tasks.py
OTHERS = {"swebench", "harbor"}


@pytest.fixture(params=sorted(GRADERS.keys() - OTHERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_grader_is_tested() -> None:
    assert set(GRADERS) == {"tests"} | OTHERS
    with pytest.raises(UsageError, match="choose one of harbor, swebench, tests"):
        make_grader("other")


@pytest.mark.parametrize(
    ("lines", "tests_exit", "end", "statuses", "resolved"),
    [
        (["PASSED t1", "PASSED t2"], 0, True, ("PASSED", "PASSED"), True),
        (["PASSED t1", "PASSED t2", "FAILED t3"], 1, True, ("PASSED", "PASSED"), True),
        (["PASSED t1", "PASSED t2"], 1, True, ("PASSED", "PASSED"), False),
        (["FAILED t1", "PASSED t2"], 1, True, ("FAILED", "PASSED"), False),
        (["PASSED t1"], 0, True, ("PASSED", "MISSING"), False),
        (["PASSED t1", "PASSED t2", "FAILED t1"], 1, True, ("ERROR", "PASSED"), False),
        ([], 0, True, ("MISSING", "MISSING"), False),
        (["PASSED t1", "PASSED t2", ">>>>> End Test Output"], 0, False, ("PASSED", "PASSED"), False),
    ],
)
def test_resolved_means_every_expected_test_passed(
    name: str, lines: list[str], tests_exit: int, end: bool, statuses: tuple[str, str], resolved: bool
) -> None:
    evidence = grade(name, FakeProvider(shell(*lines, tests_exit=tests_exit, end=end)))
    assert evidence.statuses == dict(zip(("t1", "t2"), statuses, strict=True))
    assert evidence.resolved is resolved
    assert evidence.patch_applied


def test_a_task_that_expects_nothing_is_never_resolved(name: str) -> None:
    task = replace(TASK, fail_to_pass=(), pass_to_pass=())
    assert not grade(name, FakeProvider(shell("PASSED t1")), task=task).resolved


def test_the_sandbox_gets_the_tests_and_the_patch(name: str) -> None:
    provider = FakeProvider(shell("PASSED t1", "PASSED t2"))
    grade(name, provider, unified("calc.py", "a\n", "c\n"))
    files: Mapping[str, bytes] = provider.opened[0].files
    assert files["/testbed/calc.py"] == b"c\n"
    assert files["/testbed/test_calc.py"] == b"test\n"
    assert len(provider.opened[0].commands) == 1


def test_words_differ_between_gradings(name: str) -> None:
    provider = FakeProvider(shell("PASSED t1", "PASSED t2"))
    grade(name, provider)
    grade(name, provider)
    first, second = (sandbox.commands[0] for sandbox in provider.opened)
    assert first != second


def test_a_lost_sandbox_raises(name: str) -> None:
    with pytest.raises(SandboxLostError):
        grade(name, FakeProvider(lost_at_exec=1))


@pytest.mark.parametrize("output", ["", "bash: not found\n", ">>>>> Start Test Output\nPASSED t1\nPASSED t2\n"])
def test_a_machine_that_does_not_even_begin_is_an_error(name: str, output: str) -> None:
    with pytest.raises(GraderError):
        grade(name, FakeProvider(lambda *_: result(output, exit_code=127)))


def test_a_cut_log_is_an_error_of_the_sandbox(name: str) -> None:
    def respond(command: str, files: dict[str, bytes]) -> ExecResult:
        return replace(shell("PASSED t1")(command, files), truncated=True)

    with pytest.raises(GraderError) as caught:
        grade(name, FakeProvider(respond))
    assert caught.value.kind == "log_cut"


def test_the_evidence_is_bounded(name: str) -> None:
    noise = [f"FAILED other{i}" for i in range(3000)]
    evidence = grade(name, FakeProvider(shell(*noise, "PASSED t1", "PASSED t2", tests_exit=1)))
    assert set(evidence.statuses) == {"t1", "t2"}
    assert len(evidence.log_tail) < 3_000
