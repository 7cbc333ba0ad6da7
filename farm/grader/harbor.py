"""Grading of Harbor tasks by their own ``tests/test.sh``.

Most such tasks are about a machine: what the agent installed, started and left is what counts, so the tests run in the
agent's own sandbox once it has ended, as in Harbor (``verifier.environment_mode = "shared"``). They trust that machine,
and what the agent left running still runs.

A task that the farm wrote knows its repository and base commit. Of it only the agent's diff crosses over, into a fresh
sandbox, without what ``farm.grader.admit`` keeps out. One that was written from a row of SWE-bench is graded as that
row is (extra ``swebench``).
"""

from __future__ import annotations

import secrets
import shlex

from farm.errors import GraderError
from farm.grader.admit import admit
from farm.grader.diffs import read
from farm.grader.tests import MAX_PATCH_BYTES, not_resolved
from farm.harbor.machine import run_tests
from farm.harbor.tasks import LOG_PARSER
from farm.protocols import Grader, Sandbox
from farm.types import Evidence, FolderFiles, Graded, Limits, Task
from farm.workspace import workspace

_REFUSED = (1, 128)  # exit codes of a git that says no


class HarborGrader:
    """See ``farm.protocols.Grader`` and ``MachineGrader``."""

    def __init__(self) -> None:
        self._of_rows: Grader | None = None

    def by_machine(self, task: Task) -> bool:
        return isinstance(task.workspace, FolderFiles) and not task.workspace.repository

    async def grade_machine(self, task: Task, *, sandbox: Sandbox, limits: Limits) -> Graded:
        return await run_tests(task, sandbox, limits)

    async def grade(self, task: Task, patch: str, *, sandbox: Sandbox, limits: Limits) -> Evidence:
        if task.log_parser != LOG_PARSER:
            return await self._row_grader().grade(task, patch, sandbox=sandbox, limits=limits)
        if not isinstance(task.workspace, FolderFiles):
            raise GraderError(f"{task.instance_id}: is no Harbor task", kind="task", retryable=False)
        refusal = await _put_in_place(task, patch, sandbox, limits)
        if refusal is not None:
            return not_resolved(task, refusal, patch_applied=False)
        return (await run_tests(task, sandbox, limits)).evidence

    async def close(self) -> None:
        if self._of_rows is not None:
            await self._of_rows.close()

    def _row_grader(self) -> Grader:
        from farm.grader import make_grader

        if self._of_rows is None:
            self._of_rows = make_grader("swebench")
        return self._of_rows


async def _put_in_place(task: Task, patch: str, sandbox: Sandbox, limits: Limits) -> str | None:
    """Base commit and patch; why the patch does not apply, None when it does. Raises GraderError."""
    if len(patch.encode()) > MAX_PATCH_BYTES:
        return f"the patch is larger than {MAX_PATCH_BYTES} bytes"
    try:
        kept, _ = admit(task, read(patch))
    except ValueError as error:
        return f"the patch is not a git diff: {error}"
    file = f"/tmp/farm-{secrets.token_hex(4)}.diff"
    files = await workspace(task)
    await sandbox.write_files({**files, file: "".join(part.text for part in kept).encode()})
    if not kept:
        return None
    command = f"cd {shlex.quote(task.workdir)} && git apply --whitespace=nowarn {file}"
    result = await sandbox.exec(command, timeout_s=limits.grade_s, cwd="/")
    if result.exit_code == 0:
        return None
    if result.timed_out or result.exit_code not in _REFUSED:
        raise GraderError(
            f"{task.instance_id}: git apply broke: exit code {result.exit_code}: {result.output[-500:]}", kind="apply"
        )
    return f"the patch does not apply: {result.output}"
