"""Agents without a policy. They bound what a task set can show: the oracle solves every task, the null agent none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from farm.errors import AgentError
from farm.harbor.machine import solve
from farm.protocols import AgentRun, Engine, Renderer, Sandbox
from farm.types import EndReason, Event, FolderFiles, Limits, SamplingParams, Task

_PATCH_FILE = "/tmp/gold.diff"


class OracleAgent:
    """Applies the task's gold patch, or runs its solution, and submits. Samples nothing."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now

    async def run(
        self,
        task: Task,
        *,
        episode_id: str,
        sandbox: Sandbox,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        limits: Limits,
        min_step: int,
    ) -> AgentRun:
        """See ``farm.protocols.Agent``. Raises AgentError when the gold patch does not apply: the task is defective."""
        clock = asyncio.get_running_loop().time
        wall = self._now() - clock()
        start = clock()
        if isinstance(task.workspace, FolderFiles):
            await solve(task, sandbox, limits)
            event = Event(name="exec", start_at_s=wall + start, end_at_s=wall + clock())
            return AgentRun(turns=(), end_reason=EndReason.SUBMITTED, timeline=(event,))
        await sandbox.write_files({_PATCH_FILE: task.patch.encode()})
        result = await sandbox.exec(f"git apply --whitespace=nowarn {_PATCH_FILE}", timeout_s=limits.tool_s)
        if result.exit_code != 0:
            raise AgentError(
                f"{task.instance_id}: the gold patch does not apply: {result.output[-500:]}",
                kind="gold_patch",
                retryable=result.timed_out,
            )
        event = Event(name="exec", start_at_s=wall + start, end_at_s=wall + clock())
        return AgentRun(turns=(), end_reason=EndReason.SUBMITTED, timeline=(event,))


class NullAgent:
    """Submits at once."""

    async def run(
        self,
        task: Task,
        *,
        episode_id: str,
        sandbox: Sandbox,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        limits: Limits,
        min_step: int,
    ) -> AgentRun:
        """See ``farm.protocols.Agent``."""
        return AgentRun(turns=(), end_reason=EndReason.SUBMITTED, timeline=())
