"""Any scaffold as the agent: a program of its own that speaks OpenAI's chat API to a session (``farm.agent.session``).

The program is started once per episode, on the worker and outside of the sandbox, with ``OPENAI_BASE_URL`` and
``OPENAI_API_KEY`` of its session, and ``FARM_SESSION_URL`` for ``/task`` and ``/exec``. It must run commands through
``/exec`` only: that is the sandbox. When it ends with exit code 0 the repository is handed in as it is; another code is
a defect of the scaffold (``AgentError``); a cap ends the episode, and the program with it. Whatever ends it, also the
death of the worker, nothing that it started is left, nor its folder (``farm.agent.keeper``).

What was sampled is recorded as tokens whatever the scaffold does with its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence

import psutil

from farm.agent import keeper
from farm.agent.partial import attach
from farm.agent.session import Session
from farm.errors import AgentError, UsageError
from farm.protocols import AgentRun, Engine, Renderer, Sandbox
from farm.render.messages import MessageRenderer
from farm.types import EndReason, Limits, SamplingParams, Task

_STOP_S = 5.0
_LINES = 30


class ExternalAgent:
    """``command``: program and arguments. ``now`` gives wall-clock seconds for the timeline."""

    def __init__(self, command: Sequence[str], *, now: Callable[[], float] = time.time) -> None:
        """Raises UsageError when there is no such program."""
        if not command:
            raise UsageError(
                "agent.command is empty: the agent 'external' needs the program to start, for example "
                'command = ["/opt/scaffold/venv/bin/python", "/opt/scaffold/main.py"]'
            )
        program = shutil.which(command[0])
        if program is None:
            raise UsageError(f"agent.command: {command[0]!r} is not a program here; give its path")
        self._command = (os.path.abspath(program), *command[1:])  # noqa: PTH100 - a venv's python is a link
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
        """See ``farm.protocols.Agent``. What was done before an error is attached to it (``farm.agent.partial``)."""
        if not isinstance(renderer, MessageRenderer):
            raise AgentError(
                "the agent 'external' needs a renderer of messages: renderer.name = \"chat\"", retryable=False
            )
        session = Session(
            task,
            episode_id=episode_id,
            sandbox=sandbox,
            engine=engine,
            renderer=renderer,
            sampling=sampling,
            limits=limits,
            min_step=min_step,
            wall_s=self._now,
        )
        try:
            async with session.serving() as url:
                end = await self._drive(session, url)
        except BaseException as error:
            attach(error, session.result(EndReason.FAILED))
            raise
        return session.result(end)

    async def _drive(self, session: Session, url: str) -> EndReason:
        """Until the scaffold ends, or the session, or the time. Raises AgentError, or what broke the session."""
        with tempfile.TemporaryDirectory(prefix="farm-scaffold-") as folder:
            process = await self._start(session, url, folder)
            said: deque[str] = deque(maxlen=_LINES)
            work = {
                "said": asyncio.create_task(_keep(process, said)),
                "ended": asyncio.create_task(process.wait()),
                "over": asyncio.create_task(session.over.wait()),
            }
            try:
                waited = {work["ended"], work["over"]}
                await asyncio.wait(waited, timeout=session.left_s(), return_when=asyncio.FIRST_COMPLETED)
                code = process.returncode
            finally:
                await _end(process)
                work["over"].cancel()
                await asyncio.wait(work.values(), timeout=_STOP_S)
        if session.failure is not None:
            raise session.failure
        if session.reason is not None:
            return session.reason
        if code is None:
            return EndReason.TIME_LIMIT
        if code != 0:
            told = "\n".join(said)[-1_000:]
            raise AgentError(f"the scaffold ended with exit code {code}: {told}", kind="scaffold", retryable=False)
        return EndReason.SUBMITTED

    async def _start(self, session: Session, url: str, folder: str) -> asyncio.subprocess.Process:
        own = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": session.token,
            "FARM_SESSION_URL": url,
        }
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", keeper.__file__, folder, *self._command),
                env={**os.environ, **own},
                stdin=asyncio.subprocess.PIPE,  # never written to: its end is the word to end
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"the scaffold does not start: {error}", kind="scaffold", retryable=False) from error


async def _keep(process: asyncio.subprocess.Process, lines: deque[str]) -> None:
    assert process.stdout is not None
    while chunk := await process.stdout.read(1 << 16):
        lines.extend(chunk.decode(errors="replace").splitlines())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the keeper end the program and all that came of it; by force, as far as that goes, if it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        async with asyncio.timeout(_STOP_S):
            await process.wait()
