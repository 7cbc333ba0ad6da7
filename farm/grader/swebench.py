"""Grading of SWE-bench rows as the official harness does it, in a farm sandbox; the verdict is ``swebench``'s own.

A fresh sandbox from the row's image; the agent's whole diff goes onto the work tree by the harness's own sequence of
``git apply`` and ``patch``; the row's eval script runs as one command, stdout and stderr merged in order; the log is
graded by ``swebench`` in a process of its own (``farm.grader.official``). The tests come with the eval script, which
puts them in place after the agent's changes.

What is a grade and what is not:

- The patch does not apply by any of the ways, the tests fail, hang until ``grade_s``, kill their own shell, flood the
  log or write the harness's markers: a grade, not resolved.
- The repository or git is missing, the eval script never comes to the tests, the sandbox or the grading process is
  lost: ``GraderError`` or ``SandboxLostError``. So is a test run that did not report every expected test and shows a
  machine without memory, display or network (official classification "environment"). What the script prints before the
  tests does not count for that: without a network it always says so.

Unlike ``farm.grader.tests`` nothing of the diff is left out, because the official harness leaves nothing out: what code
under test prints between the markers counts, as it does there.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from farm.errors import GraderError
from farm.grader import MAX_LOG_BYTES
from farm.grader.kept_logs import keep, kept_log
from farm.grader.official import OfficialGrade, OfficialGrading, check_installed
from farm.grader.official_log import OfficialLog, mark, official_log
from farm.grader.tests import not_resolved
from farm.protocols import ExecResult, Sandbox
from farm.suites.swebench_rows import official_row
from farm.types import Evidence, Limits, Task

_TAIL = 2_000
_APPLY_S = 120.0
_MODEL = "farm"
_GIT_ENV = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
_NOT_APPLIED = 1
# The harness's ways, in its order, with the tree made clean between them; what they leave may be a patch fully applied
# although each failed, so the reverse is tried last.
_APPLY = """\
cd {workdir} && git rev-parse --git-dir > /dev/null || exit 41
if [ ! -w . ] || ! : > .farm-room; then exit 42; fi
rm -f .farm-room
clean=false
for way in 'git apply --verbose' 'git apply --verbose --3way' 'git apply --verbose --reject' \\
    'patch --batch --forward --fuzz=5 -p1 -i'; do
  if $clean; then git checkout -- . > /dev/null 2>&1; git clean -fd > /dev/null 2>&1; fi
  clean=true
  if $way {patch}; then echo "{word} applied"; exit 0; fi
done
if git apply --check --reverse {patch}; then echo "{word} applied"; exit 0; fi
exit 1
"""


class SwebenchGrader:
    """See ``farm.protocols.Grader``. Keeps one grading process for all its gradings, started by the first."""

    def __init__(self, official: OfficialGrading | None = None) -> None:
        """Raises UsageError when ``swebench`` is not installed; ``official``: another grading process."""
        if official is None:
            check_installed()
        self._official = official or OfficialGrading()
        self._kept: Path | None = None

    def keep_logs(self, folder: Path) -> None:
        """See ``farm.protocols.LogKeeper``; in the layout of ``farm.grader.kept_logs``."""
        self._kept = folder

    async def close(self) -> None:
        """End the grading process."""
        await self._official.close()

    async def grade(self, task: Task, patch: str, *, sandbox: Sandbox, limits: Limits) -> Evidence:
        """Grade ``patch``; see the module. Raises GraderError."""
        row = official_row(task)
        official_script = await self._official.eval_script(row)
        script = mark(official_script, secrets.token_hex(8))
        if script is None:
            raise GraderError(
                f"{task.instance_id}: the eval script does not write both markers on lines of their own",
                kind="eval_script",
                retryable=False,
            )
        if not patch.strip():  # the harness does not run these either
            return not_resolved(task, "the patch is empty: no test was run", patch_applied=False)
        folder = f"/tmp/farm-{secrets.token_hex(4)}"
        files = {f"{folder}/patch.diff": patch.encode(), f"{folder}/eval.sh": script.text.encode()}
        await sandbox.write_files(files)
        refusal = await _apply(task, folder, sandbox)
        if refusal is not None:
            return not_resolved(task, f"the patch does not apply: {refusal}", patch_applied=False)
        result = await sandbox.exec(f"bash {folder}/eval.sh", timeout_s=limits.grade_s, cwd="/", env=_GIT_ENV)
        log = official_log(result.output, script)
        ended_early = await _ended_early(task, result, log, sandbox, limits)
        if ended_early is not None:
            evidence = not_resolved(
                task, f"{ended_early}\n{log.text[-_TAIL:]}", patch_applied=True, exit_code=result.exit_code
            )
            await self._keep(task, patch, official_script, log.text, None, evidence)
            return evidence
        graded = await self._official.grade(row, patch=patch, model=_MODEL, log=log.text)
        statuses = _statuses(task, graded)
        if not graded.resolved and "MISSING" in statuses.values():
            reason = await self._official.classify(log.text)
            if reason is not None:
                raise GraderError(f"{task.instance_id}: {reason}: {log.text[-500:]}", kind=reason)
        evidence = Evidence(
            statuses=statuses,
            resolved=graded.resolved,
            patch_applied=True,  # the official report's own flag says whether the log has results
            exit_code=result.exit_code if log.exit_code is None else log.exit_code,
            log_tail=log.text[-_TAIL:],
        )
        await self._keep(task, patch, official_script, log.text, graded, evidence)
        return evidence

    async def _keep(
        self, task: Task, patch: str, script: str, log: str, graded: OfficialGrade | None, evidence: Evidence
    ) -> None:
        if self._kept is None:
            return
        await asyncio.to_thread(
            keep,
            kept_log(self._kept, instance_id=task.instance_id, patch=patch, log_tail=evidence.log_tail),
            instance_id=task.instance_id,
            patch=patch,
            script=script,
            log=log,
            report=None if graded is None else graded.report,
        )


async def _apply(task: Task, folder: str, sandbox: Sandbox) -> str | None:
    """Put the patch onto the work tree; what git said when it can't be. Raises GraderError on a broken machine."""
    word = secrets.token_hex(8)
    command = _APPLY.format(workdir=shlex.quote(task.workdir), patch=f"{folder}/patch.diff", word=word)
    result = await sandbox.exec(command, timeout_s=_APPLY_S, cwd="/", env=_GIT_ENV)
    if f"{word} applied" in result.output.splitlines():
        return None
    if result.timed_out or result.exit_code != _NOT_APPLIED:
        raise GraderError(
            f"{task.instance_id}: the patch could not be put in place: exit code {result.exit_code}: "
            f"{result.output[-500:]}",
            kind="apply",
        )
    return result.output[-_TAIL:]


async def _ended_early(
    task: Task, result: ExecResult, log: OfficialLog, sandbox: Sandbox, limits: Limits
) -> str | None:
    """Why the log can't be graded although the machine is in order; None when it can. Raises GraderError."""
    where = f"{task.instance_id}: exit code {result.exit_code}: {result.output[-500:]}"
    if result.truncated and len(result.output) < MAX_LOG_BYTES // 4:  # 4: bytes of a character, at most
        raise GraderError(f"{where}\nthe sandbox keeps too little output", kind="log_cut", retryable=False)
    if not log.started:
        kind = "setup_timeout" if result.timed_out else "no_start"
        raise GraderError(f"the eval script never came to the tests: {where}", kind=kind)
    if log.forged:
        return "the tests wrote the markers of the harness"
    if result.timed_out:
        return f"the tests ran out of time after {limits.grade_s:g} s"
    if not log.ended:
        alive = await sandbox.exec("true", timeout_s=limits.tool_s, cwd="/")  # raises when the sandbox is gone
        if alive.exit_code != 0 or alive.timed_out:
            raise GraderError(f"the machine broke under the tests: {where}", kind="machine")
        return "the log is too long: its end is missing" if result.truncated else "the test run was ended from within"
    return None


def _statuses(task: Task, graded: OfficialGrade) -> Mapping[str, str]:
    """Expected tests in the farm's words: a test that the official report counts as a success has PASSED."""
    parts = graded.report.get("tests_status", {})
    good = {test for name in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in parts.get(name, {}).get("success", ())}
    said = {"FAILED": "FAILED", "ERROR": "ERROR"}
    return {
        test: "PASSED" if test in good else said.get(graded.statuses.get(test, ""), "MISSING")
        for test in (*task.fail_to_pass, *task.pass_to_pass)
    }
