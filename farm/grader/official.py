"""The farm's end of the official grading process: one at a time, bounded in time and memory, replaced when it breaks.

A broken process, a late answer or an answer that can't be read is a failure of the grader (``GraderError``), never a
grade. It is started on first use and again after such a failure; the request that broke it is tried once more in a
fresh one, because a process may also die for reasons of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.errors import GraderError, UsageError
from farm.grader.official_worker import HEAD, MAX_FRAME_BYTES, VERSIONS, frame

INSTALL = "install the extra: pip install 'rollout-farm[swebench]'"

_START_S = 120.0  # importing the package, on a busy machine
_REQUEST_S = 60.0
_STOP_S = 5.0
_MEMORY_BYTES = 4 << 30  # the limit of the process
_RECYCLE_BYTES = 1 << 30  # above this it is replaced before the next request
_TRIES = 2
_STDERR_LINES = 20


def check_installed() -> None:
    """Raises UsageError when ``swebench`` is missing or of another major version. Imports nothing of it."""
    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"official SWE-bench grading needs the package swebench: {INSTALL}") from None
    if not version.startswith(VERSIONS):
        raise UsageError(f"swebench {version} is installed, official grading needs {' or '.join(VERSIONS)}x: {INSTALL}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficialGrade:
    """``report`` is the instance's entry of the official ``report.json``. ``statuses``: expected test -> what the log
    says of it in the parser's words (PASSED, FAILED, SKIPPED, ERROR, XFAIL); a test that isn't there has no status."""

    report: Mapping[str, Any]
    statuses: Mapping[str, str]

    @property
    def resolved(self) -> bool:
        return bool(self.report["resolved"])


class OfficialGrading:
    """One grading process. ``command``: how it is started; it gets its memory limit as the last argument.

    For one event loop. Use it as ``async with``, or call :meth:`close`; a process that was forgotten ends with ours."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (sys.executable, "-m", "farm.grader.official_worker"),
        request_s: float = _REQUEST_S,
        start_s: float = _START_S,
        memory_bytes: int = _MEMORY_BYTES,
        recycle_bytes: int = _RECYCLE_BYTES,
    ) -> None:
        self._command = tuple(command)
        self._request_s, self._start_s = request_s, start_s
        self._memory_bytes, self._recycle_bytes = memory_bytes, recycle_bytes
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._errors: deque[str] = deque(maxlen=_STDERR_LINES)
        self._drain: asyncio.Task[None] | None = None
        self.starts = 0
        self.version = ""

    async def __aenter__(self) -> OfficialGrading:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def eval_script(self, row: Mapping[str, Any]) -> str:
        """The script that the official harness would run for ``row``. Raises GraderError."""
        script: str = (await self._ask("spec", row=row))["eval_script"]
        return script

    async def grade(self, row: Mapping[str, Any], *, patch: str | None, model: str, log: str) -> OfficialGrade:
        """Grade ``log``. Raises GraderError."""
        value = await self._ask("grade", row=row, patch=patch, model=model, log=log)
        return OfficialGrade(report=value["report"], statuses=value["statuses"])

    async def classify(self, log: str) -> str | None:
        """The reason, when ``log`` shows that the machine failed rather than the tests (no memory, no disk, no
        network); what may be either has none. Raises GraderError."""
        reason: str | None = (await self._ask("classify", log=log))["reason"]
        return reason

    async def run_report(
        self, predictions: Mapping[str, Mapping[str, Any]], *, instance_ids: Sequence[str], run_id: str, at: str
    ) -> str:
        """Write the official run report into the folder ``at``; its path. Raises GraderError."""
        value = await self._ask(
            "run_report", predictions=predictions, instance_ids=list(instance_ids), run_id=run_id, at=at
        )
        path: str = value["path"]
        return path

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        drain, self._drain = self._drain, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await _ended(process)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await _ended(process)
        if drain is not None:
            await drain

    async def _ask(self, op: str, **given: Any) -> dict[str, Any]:
        request = frame({"op": op, **given})
        if len(request) > MAX_FRAME_BYTES:
            raise GraderError(f"a request of {len(request)} bytes is too large to grade", kind="log_size")
        async with self._lock:
            for left in reversed(range(_TRIES)):
                try:
                    return await self._exchange(op, request)
                except GraderError:  # an answer, if not the wanted one: the process is in order
                    raise
                except _BrokenError as error:
                    await self._kill()
                    if not left:
                        raise GraderError(f"the grading process {error}{self._said()}", kind=error.kind) from error
                except BaseException:  # an answer may still be on its way: the next request must not get it
                    await self._kill()
                    raise
        raise AssertionError("unreachable")

    async def _exchange(self, op: str, request: bytes) -> dict[str, Any]:
        process = await self._running()
        told = await self._answer(process, request, self._request_s)
        if not told["ok"] and told["kind"] == "memory":
            raise _BrokenError("ran out of memory", kind="memory")
        if told["rss_bytes"] > self._recycle_bytes:
            await self.close()
        if not told["ok"]:
            raise GraderError(f"official grading ({op}): {told['error']}", kind=told["kind"], retryable=False)
        value: dict[str, Any] = told["value"]
        return value

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._kill()
        self._errors.clear()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(self._memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONUTF8": "1"},  # logs are UTF-8 whatever the machine's locale
                start_new_session=True,  # Ctrl-C is for the farm, which ends it
            )
        except OSError as error:
            raise GraderError(f"the grading process does not start: {error}", kind="start") from error
        self._process = process
        self._drain = asyncio.create_task(self._keep_errors(process))
        self.starts += 1
        told = await self._answer(process, frame({"op": "hello"}), self._start_s)
        if not told["ok"]:
            raise GraderError(f"official grading: {told['error']}: {INSTALL}", kind=told["kind"], retryable=False)
        self.version = told["value"]["version"]
        return process

    async def _answer(self, process: asyncio.subprocess.Process, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Raises _BrokenError: it is then in no state to be asked again."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(request)
                await process.stdin.drain()
                (length,) = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
                if length > MAX_FRAME_BYTES:
                    raise _BrokenError(f"announced an answer of {length} bytes", kind="protocol")
                told: dict[str, Any] = json.loads(await process.stdout.readexactly(length))
        except TimeoutError as error:
            raise _BrokenError(f"gave no answer in {timeout_s:g} s", kind="timeout") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _BrokenError("died", kind="died") from error
        except ValueError as error:
            raise _BrokenError(f"sent what can't be read ({error})", kind="protocol") from error
        if not {"ok", "rss_bytes"} <= told.keys():
            raise _BrokenError("sent what is no answer", kind="protocol")
        return told

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self.close()

    async def _keep_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            self._errors.extend(line for line in chunk.decode(errors="replace").splitlines() if line.strip())

    def _said(self) -> str:
        return f"; it said: {self._errors[-1][-300:]}" if self._errors else ""


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of ``process``; an answer that nobody wants any more must not hold it up."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 16):
        pass
    await process.wait()


class _BrokenError(Exception):
    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
