"""A scripted sandbox in memory, for tests of what stands above: no process, no clock of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from farm.errors import SandboxLostError, SandboxStartError
from farm.protocols import ExecResult, Sandbox, SandboxSpec

Respond = Callable[[str, dict[str, bytes]], ExecResult]


def result(output: str = "", exit_code: int = 0) -> ExecResult:
    """An ``ExecResult`` as a short command gives it."""
    return ExecResult(exit_code=exit_code, output=output, truncated=False, timed_out=False, duration_s=0.0)


def succeed(command: str, files: dict[str, bytes]) -> ExecResult:  # noqa: ARG001
    """The default response: every command does nothing, well."""
    return result()


@dataclass(slots=True)
class FakeSandbox:
    """``commands`` is what was run; ``files`` (path -> content) may be changed by ``respond``."""

    id: str
    spec: SandboxSpec
    respond: Respond
    lost_at_exec: int | None = None
    exec_s: float = 0.0
    files: dict[str, bytes] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    closed: bool = False

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        self._check()
        self.commands.append(command)
        if self.lost_at_exec is not None and len(self.commands) >= self.lost_at_exec:
            self.closed = True
            self._check()
        if self.exec_s > timeout_s:
            await asyncio.sleep(timeout_s)
            return ExecResult(exit_code=124, output="", truncated=False, timed_out=True, duration_s=timeout_s)
        await asyncio.sleep(self.exec_s)
        return self.respond(command, self.files)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self._check()
        for path in files:
            if not path.startswith("/"):
                raise ValueError(f"{path!r} is not an absolute path")
        self.files.update(files)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        self._check()
        if path not in self.files:
            raise FileNotFoundError(path)
        if len(self.files[path]) > max_bytes:
            raise ValueError(f"{path} is longer than {max_bytes} bytes")
        return self.files[path]

    async def cpu_s(self) -> float:
        return 0.001 * len(self.commands)

    def _check(self) -> None:
        if self.closed:
            raise SandboxLostError(f"sandbox {self.id}: lost")


class FakeProvider:
    """``fail_starts``: how many of the first starts fail. ``lost_at_exec``: the k-th command (from 1) of every sandbox
    loses it. ``start_s``, ``exec_s``: how slow it is. ``opened`` lists all sandboxes, ``open_now`` counts."""

    name = "fake"

    def __init__(
        self,
        respond: Respond = succeed,
        *,
        fail_starts: int = 0,
        lost_at_exec: int | None = None,
        start_s: float = 0.0,
        exec_s: float = 0.0,
    ) -> None:
        self._respond = respond
        self._fail_starts = fail_starts
        self._lost_at_exec = lost_at_exec
        self._start_s = start_s
        self._exec_s = exec_s
        self._ids = itertools.count(1)
        self.opened: list[FakeSandbox] = []

    @property
    def open_now(self) -> int:
        return sum(not sandbox.closed for sandbox in self.opened)

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        number = next(self._ids)
        await asyncio.sleep(self._start_s)
        if number <= self._fail_starts:
            raise SandboxStartError(f"start {number} fails as told")
        sandbox = FakeSandbox(
            id=f"fake-{number}",
            spec=spec,
            respond=self._respond,
            lost_at_exec=self._lost_at_exec,
            exec_s=self._exec_s,
        )
        self.opened.append(sandbox)
        try:
            yield sandbox
        finally:
            sandbox.closed = True

    async def sweep(self, *, now_s: float) -> int:
        doomed = [sandbox for sandbox in self.opened if not sandbox.closed and sandbox.spec.deadline_at_s <= now_s]
        for sandbox in doomed:
            sandbox.closed = True
        return len(doomed)
