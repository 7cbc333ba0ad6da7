"""Planned infrastructure failures, to show what the farm does with real ones.

The plan is pure: which attempt fails at which boundary follows from ids and a seed, so whoever reads the log can
recompute what must be in it. Each fault is raised where a real one would cross: when a sandbox starts, in the first
command, in the first request to the engine, when grading begins, in the agent's code, in the farm's own code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

from farm.errors import AgentError, EngineError, GraderError, SandboxLostError, SandboxStartError
from farm.protocols import (
    Agent,
    AgentRun,
    Engine,
    EngineInfo,
    EngineLoad,
    ExecResult,
    GenerateRequest,
    Generation,
    Grader,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)
from farm.types import Boundary, Evidence, Limits, Task, content_digest

BOUNDARIES = tuple(Boundary)
KIND = "injected"
_STEPS = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Fails a share ``rate`` (0..1) of all attempts, each at one boundary, every boundary equally often."""

    rate: float
    seed: int

    def boundary(self, episode_id: str, attempt: int) -> Boundary | None:
        """Where this attempt is to fail, or None."""
        number = int(content_digest([self.seed, episode_id, attempt])[:16], 16)
        if number % _STEPS >= self.rate * _STEPS:
            return None
        return BOUNDARIES[(number // _STEPS) % len(BOUNDARIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one attempt is run with."""

    provider: SandboxProvider
    engine: Engine
    agent: Agent
    grader: Grader


def sabotage(parts: Parts, boundary: Boundary | None) -> Parts:
    """``parts`` with one of them set to fail at ``boundary``."""
    match boundary:
        case None:
            return parts
        case Boundary.SANDBOX_START | Boundary.SANDBOX_LOST:
            return replace(parts, provider=_FailingProvider(parts.provider, lost=boundary is Boundary.SANDBOX_LOST))
        case Boundary.ENGINE:
            return replace(parts, engine=_FailingEngine(parts.engine))
        case Boundary.GRADER:
            return replace(parts, grader=_FailingGrader(GraderError("planned failure", kind=KIND)))
        case Boundary.AGENT:
            return replace(parts, agent=_FailingAgent(AgentError("planned failure", kind=KIND)))
        case Boundary.FARM:
            return replace(parts, agent=_FailingAgent(RuntimeError("planned failure")))


class _FailingProvider:
    def __init__(self, inner: SandboxProvider, *, lost: bool) -> None:
        self._inner, self._lost = inner, lost
        self.name = inner.name

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self._open(spec)

    @asynccontextmanager
    async def _open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if not self._lost:
            raise SandboxStartError("planned failure", kind=KIND)
        async with self._inner.open(spec) as sandbox:
            yield _LosingSandbox(sandbox)

    async def sweep(self, *, now_s: float) -> int:
        return await self._inner.sweep(now_s=now_s)


class _LosingSandbox:
    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.id = inner.id

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        raise SandboxLostError("planned failure", kind=KIND)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        await self._inner.write_files(files)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return await self._inner.read_file(path, max_bytes=max_bytes)

    async def cpu_s(self) -> float:
        return await self._inner.cpu_s()


class _FailingEngine:
    """Everything but ``generate`` goes to the real engine."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.url = inner.url

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation:
        raise EngineError("planned failure", kind=KIND)

    async def abort(self, rid: str | None = None) -> None:
        await self._inner.abort(rid)

    async def pause(self) -> None:
        await self._inner.pause()

    async def resume(self) -> None:
        await self._inner.resume()

    async def load_weights(self, path: str, *, step: int) -> None:
        await self._inner.load_weights(path, step=step)

    async def info(self) -> EngineInfo:
        return await self._inner.info()

    async def load(self) -> EngineLoad:
        return await self._inner.load()

    async def healthy(self) -> bool:
        return await self._inner.healthy()

    async def close(self) -> None:
        await self._inner.close()


class _FailingAgent:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def run(self, task: Task, **given: object) -> AgentRun:
        del task, given
        raise self._error


class _FailingGrader:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def grade(self, task: Task, patch: str, *, sandbox: Sandbox, limits: Limits) -> Evidence:
        raise self._error

    async def close(self) -> None:
        return
