"""Runs of a code base's own tests in one sandbox: as it is, traced, and with a bug in it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from farm.errors import FarmError
from farm.grader import MAX_LOG_BYTES
from farm.protocols import ExecResult, Sandbox, SandboxProvider, SandboxSpec
from farm.suites import pypi
from farm.suites.code_source import Code
from farm.suites.pypi_make import Run, read_run
from farm.suites.tracing import PLUGIN, PLUGIN_NAME, Trace, read_trace
from farm.types import Limits

_FOLDER = "/tmp/farm-trace"
_MAX_TRACE_BYTES = 64 << 20
_LIFE_S = 4 * 3600.0
_LIMITS = Limits(memory_bytes=1 << 30, disk_bytes=256 << 20, pids=256)


class Trials:
    """One code base, unpacked in one sandbox. Tests that leave something behind may see it in later runs; whoever keeps
    a task from here grades it in fresh sandboxes before it counts."""

    def __init__(self, code: Code, sandbox: Sandbox) -> None:
        self._code, self._sandbox = code, sandbox

    async def run(
        self, targets: Sequence[str], *, timeout_s: float, broken: Mapping[str, str] | None = None
    ) -> Run | None:
        """The tests ``targets`` with the files ``broken`` (path -> text) in place; None when they don't come to an
        end."""
        changed = {path: text.encode() for path, text in (broken or {}).items()}
        await self._write(changed)
        try:
            result = await self._exec(targets, timeout_s)
        finally:
            await self._write({path: self._code.files[path] for path in changed})
        return None if result.timed_out else read_run(result.output, cpu_s=result.duration_s)

    async def trace(self, targets: Sequence[str], *, timeout_s: float) -> tuple[Run, Trace] | None:
        """As :meth:`run`, and which functions each test calls; None when they don't come to an end."""
        await self._sandbox.write_files({f"{_FOLDER}/{PLUGIN_NAME}.py": PLUGIN.encode()})
        await self._sandbox.exec(f"rm -f {_FOLDER}/trace.json", timeout_s=timeout_s, cwd="/")
        environment = (
            f"export PYTHONPATH={_FOLDER}:$PYTHONPATH PYTEST_PLUGINS={PLUGIN_NAME} FARM_TRACE={_FOLDER}/trace.json\n"
        )
        result = await self._exec(targets, timeout_s, before=environment)
        if result.timed_out:
            return None
        try:
            data = await self._sandbox.read_file(f"{_FOLDER}/trace.json", max_bytes=_MAX_TRACE_BYTES)
        except (FileNotFoundError, ValueError):
            return None
        return read_run(result.output, cpu_s=result.duration_s), read_trace(data)

    async def _exec(self, targets: Sequence[str], timeout_s: float, before: str = "") -> ExecResult:
        script = before + pypi.eval_script(targets, python_path=self._code.source.python_path)
        return await self._sandbox.exec(script, timeout_s=timeout_s, cwd="/")

    async def _write(self, files: Mapping[str, bytes]) -> None:
        await self._sandbox.write_files({f"{pypi.WORKDIR}/{path}": data for path, data in files.items()})


@contextlib.asynccontextmanager
async def open_trials(code: Code, provider: SandboxProvider, *, now_s: float) -> AsyncIterator[Trials]:
    """A sandbox with all of ``code`` in it, tests included. Raises FarmError when the code has no room in it."""
    size = sum(map(len, code.files.values()))
    if size > _LIMITS.disk_bytes // 2:
        raise FarmError(f"{code.origin}: {size} bytes are too much for a sandbox", kind="size", retryable=False)
    spec = SandboxSpec(
        owner=f"make-{code.source.package}",
        deadline_at_s=now_s + _LIFE_S,
        image="host-pytest",
        memory_bytes=_LIMITS.memory_bytes,
        disk_bytes=_LIMITS.disk_bytes,
        pids=_LIMITS.pids,
        output_bytes=MAX_LOG_BYTES,
        workdir=pypi.WORKDIR,
    )
    async with provider.open(spec) as sandbox:
        await sandbox.write_files({f"{pypi.WORKDIR}/{path}": data for path, data in code.files.items()})
        yield Trials(code, sandbox)
