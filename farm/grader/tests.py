"""Grading by the task's own tests, in a sandbox the agent has never seen.

Only the agent's diff crosses over. The tests go onto the base commit first, then what ``farm.grader.admit`` lets
through of the diff, then the eval script runs as one command whose output, stdout and stderr in order, is the log.

What can go wrong, and whose fault it is:

- The tests do not go onto the base commit, bash or a command that the eval script names is missing, the sandbox breaks:
  ``GraderError`` or ``SandboxLostError``. Nothing of the agent's has run by then, or the machine was asked again.
- The diff does not apply, is too large, breaks the test run, kills it, floods the log or makes it run out of time:
  a grade, not resolved.

The code under test runs in the same process as the tests, so it can print what it likes. What is done about that: the
markers of the log carry a random word made for this grading, the tests' exit code is reported under the same word, a
non-zero one with no failing test is not believed, neither is a test reported in two ways, and every expected test must
be reported as passed. Tests that are scripts of their own (not pytest, which captures what code prints) can go further:
where the test patch or the eval script mentions ``FARM_TEST_WORD``, only status lines that end in the value of that
variable count; the script takes it out of its environment before it loads the code. Code that searches the memory of
its process or the command line of its parent can still forge a log.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from farm.errors import GraderError
from farm.grader import MAX_LOG_BYTES
from farm.grader.admit import admit
from farm.grader.diffs import FileDiff, apply_plain, read
from farm.grader.parsers import END_MARKER, PARSERS, START_MARKER
from farm.grader.verdict import judge, marked
from farm.protocols import ExecResult, Sandbox
from farm.types import Evidence, Limits, Task
from farm.workspace import base_tree, git_files, workspace

MAX_PATCH_BYTES = 1 << 20

_TAIL = 2_000
_TEST_DIFF, _AGENT_DIFF, _EVAL = "/tmp/test.diff", "/tmp/agent.diff", "/tmp/eval.sh"
_WORD_VARIABLE = "FARM_TEST_WORD"
_APPLY = "git apply --whitespace=nowarn"
_LONGEST_ARGUMENT = 64 << 10  # bytes; Linux takes twice as much
_REFUSED = (1, 128)  # exit codes of a git that says no
_NOT_RUNNABLE = (126, 127)
_MISSING = re.compile(r"line \d+: (\S+): (?:command not found|No such file or directory|Permission denied)")


class TestGrader:
    """See ``farm.protocols.Grader``. The sandbox is opened with ``farm.grader.grading_spec``."""

    __test__ = False  # pytest: this is no test class

    async def grade(self, task: Task, patch: str, *, sandbox: Sandbox, limits: Limits) -> Evidence:
        """Grade ``patch``. An eval script that runs ``git apply`` itself (SWE-bench rows) brings its own tests, so the
        test patch is then not applied before. Raises GraderError; see the module."""
        if task.log_parser not in PARSERS:
            raise GraderError(
                f"{task.instance_id}: log parser {task.log_parser!r} is unknown: {', '.join(sorted(PARSERS))}",
                kind="log_parser",
                retryable=False,
            )
        if len(patch.encode()) > MAX_PATCH_BYTES:
            return not_resolved(task, f"the patch is larger than {MAX_PATCH_BYTES} bytes", patch_applied=False)
        try:
            parts = read(patch)
        except ValueError as error:
            return not_resolved(task, f"the patch is not a git diff: {error}", patch_applied=False)
        try:
            kept, left_out = admit(task, parts)
        except ValueError as error:
            raise GraderError(f"{task.instance_id}: its own patches: {error}", kind="task", retryable=False) from error
        words = _Words(marker=secrets.token_hex(8), status=secrets.token_hex(8))
        plan = await _plan(task, kept, words.marker)
        await sandbox.write_files(plan.files)
        result = await sandbox.exec(plan.command, timeout_s=limits.grade_s, cwd="/", env={_WORD_VARIABLE: words.status})
        note = f"left at base: {', '.join(left_out)}\n" if left_out else ""
        return await _judge(task, result, words, note, sandbox, limits)

    async def close(self) -> None:
        """Keeps nothing running."""


def not_resolved(task: Task, why: str, *, patch_applied: bool, exit_code: int = 0) -> Evidence:
    """The evidence of a patch that no test was run for."""
    return Evidence(
        statuses=dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "MISSING"),
        resolved=False,
        patch_applied=patch_applied,
        exit_code=exit_code,
        log_tail=why[-_TAIL:],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Random words of one grading: of the markers and the exit code, and of single status lines."""

    marker: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to write and the one command to run."""

    files: Mapping[str, bytes]
    command: str


async def _plan(task: Task, kept: list[FileDiff], word: str) -> _Plan:
    """Files and script of one grading. The script says "<word> base" once the tests are in place and "<word> patched"
    once the agent's changes are, before anything of them runs."""
    own_tests = "git apply" in task.eval_script
    try:
        tests = [] if own_tests else read(task.test_patch)
    except ValueError as error:
        raise GraderError(f"{task.instance_id}: test patch: {error}", kind="test_patch", retryable=False) from error
    base = await base_tree(task)
    made = None if base is None else _apply(base, tests, kept)
    if made is not None:
        files = {f"{task.workdir}/{path}": data for path, data in made.items()}
        if "git" in task.eval_script:
            files |= git_files(task, await workspace(task), f"{task.workdir}/.git")
        steps = [f"echo {word} base", f"echo {word} patched"]
    else:
        files = await workspace(task)
        steps = []
        if tests:
            files[_TEST_DIFF] = task.test_patch.encode()
            steps.append(f"{_APPLY} {_TEST_DIFF} || exit")
        steps.append(f"echo {word} base")
        if kept:
            files[_AGENT_DIFF] = "".join(part.text for part in kept).encode()
            steps.append(f"{_APPLY} {_AGENT_DIFF} || exit")
        steps.append(f"echo {word} patched")
    script = _marked(task, word)
    if len(script.encode()) > _LONGEST_ARGUMENT:
        files[_EVAL] = script.encode()
        script = f"exec bash {_EVAL}"
    return _Plan(files=files, command="\n".join([f"cd {shlex.quote(task.workdir)} || exit", *steps, script]))


def _apply(tree: dict[str, bytes], tests: list[FileDiff], kept: list[FileDiff]) -> dict[str, bytes] | None:
    """The graded tree, without git; None where git has to decide. Saves two processes for nearly every grading."""
    for parts in (tests, kept):
        changed = apply_plain(parts, tree)
        if changed is None:
            return None
        tree = {path: data for path, data in {**tree, **changed}.items() if data is not None}
    return tree


def _marked(task: Task, word: str) -> str:
    """The eval script with ``word`` in its markers. Raises GraderError."""
    script = marked(task.eval_script, word)
    if script is None:
        raise GraderError(
            f"{task.instance_id}: the eval script must write {START_MARKER!r} and {END_MARKER!r} on a line of its own "
            "each, once",
            kind="eval_script",
            retryable=False,
        )
    return script


async def _judge(
    task: Task, result: ExecResult, words: _Words, note: str, sandbox: Sandbox, limits: Limits
) -> Evidence:
    """The evidence that the log gives. Raises GraderError when it shows a broken machine."""
    lines, word = result.output.splitlines(), words.marker
    where = f"{task.instance_id}: exit code {result.exit_code}: {result.output[-500:]}"
    if result.truncated and len(result.output) < MAX_LOG_BYTES // 4:  # 4: bytes of a character, at most
        raise GraderError(f"{where}\nthe sandbox keeps too little output", kind="log_cut", retryable=False)
    if f"{word} base" not in lines:
        raise GraderError(f"the tests could not be put in place: {where}", kind="test_patch")
    if f"{word} patched" not in lines:
        if result.exit_code not in _REFUSED:
            raise GraderError(f"git apply broke: {where}", kind="apply")
        return not_resolved(
            task, f"{note}the patch does not apply: {result.output}", patch_applied=False, exit_code=result.exit_code
        )
    checked = _WORD_VARIABLE in task.test_patch or _WORD_VARIABLE in task.eval_script
    verdict = judge(
        result.output,
        expected=(*task.fail_to_pass, *task.pass_to_pass),
        parse=PARSERS[task.log_parser],
        word=word,
        status_word=words.status if checked else None,
        exit_code=result.exit_code,
        timed_out=result.timed_out,
    )
    if not verdict.found and verdict.exit_code in _NOT_RUNNABLE:
        await _ask_machine(task, result.output, sandbox, limits)
    if result.timed_out:
        note += f"the tests ran out of time after {limits.grade_s:g} s\n"
    elif not verdict.ran:
        note += "the test run was ended from within\n"
    elif not verdict.believed:
        note += f"exit code {verdict.exit_code} but no failing test\n"
    return Evidence(
        statuses=verdict.statuses,
        resolved=verdict.resolved,
        patch_applied=True,
        exit_code=verdict.exit_code,
        log_tail=note + "\n".join(verdict.region)[-_TAIL:],
    )


async def _ask_machine(task: Task, log: str, sandbox: Sandbox, limits: Limits) -> None:
    """The eval script could not run a command. Code under test can say so as well, so look whether it is true.

    Raises GraderError when a command that the eval script names is really missing."""
    for name in sorted(set(_MISSING.findall(log))):
        if name in task.eval_script:
            check = await sandbox.exec(f"command -v {shlex.quote(name)}", timeout_s=limits.tool_s)
            if check.exit_code != 0:
                raise GraderError(f"{task.instance_id}: the sandbox has no {name}", kind="environment")
