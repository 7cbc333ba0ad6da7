"""The seams. Each Protocol has one conformance suite in ``tests/contracts`` that runs on every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from farm.types import (
    Cursor,
    EndReason,
    Event,
    Evidence,
    Graded,
    Limits,
    Machine,
    SamplingParams,
    Shard,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

# -------------------------------------------------------------------------------------------- sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """``output`` is stdout and stderr merged in order, decoded with replacement, capped by bytes."""

    exit_code: int
    output: str
    truncated: bool
    timed_out: bool
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What to start. ``owner`` labels the sandbox; it is swept once ``deadline_at_s`` (epoch) has passed (Rule 7)."""

    owner: str
    deadline_at_s: float
    image: str = "host"
    memory_bytes: int = 512 << 20
    disk_bytes: int = 64 << 20
    pids: int = 64
    output_bytes: int = 16_384
    workdir: str = "/testbed"
    machine: Machine = field(default_factory=Machine)


class Sandbox(Protocol):
    """A running, isolated machine. A command that fails is an ``ExecResult``; a sandbox that is gone raises
    ``SandboxLostError``."""

    @property
    def id(self) -> str: ...

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run ``command`` with bash in ``cwd`` (default: the spec's workdir). On time-out the command's whole process
        tree is killed, ``timed_out`` is set and the sandbox stays usable."""
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files by absolute path, parents included."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Raises ``FileNotFoundError``; longer files raise ``ValueError``."""
        ...

    async def cpu_s(self) -> float:
        """CPU seconds used inside so far, as well as the back end can tell."""
        ...


class SandboxProvider(Protocol):
    @property
    def name(self) -> str: ...

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Start a sandbox, own it, and leave nothing behind on exit, also under cancellation.

        Raises ``SandboxStartError``."""
        ...

    async def sweep(self, *, now_s: float) -> int:
        """Remove sandboxes of this provider whose deadline has passed; returns how many."""
        ...


@runtime_checkable
class ImageKeeper(Protocol):
    """A provider whose images come from elsewhere: they can be asked for, and made ready, before a run."""

    async def check(self, images: Iterable[str]) -> None:
        """Is there nothing known that keeps them from starting? Raises ``UsageError``."""
        ...

    async def prepare(self, image: str, *, deadline_at_s: float) -> None:
        """Have ``image`` ready. Raises ``SandboxStartError``."""
        ...


# --------------------------------------------------------------------------------------------- engine


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Token-in, token-out. ``rid`` is unique per request; abort goes by it."""

    rid: str
    input_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """``output_ids`` [N] with ``logprobs`` [N] under the policy's own (temperature 1) softmax;
    ``spans`` cover [0, N). A stop token, when sampled, is the last of ``output_ids``."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" | "length" | "abort"
    prompt_tokens: int
    cached_tokens: int
    retractions: int
    queue_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    model_path: str
    version: str  # weight_version; "default" before the first verified load
    max_total_tokens: int  # KV budget
    context_length: int
    max_running_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    running: int
    queued: int
    used_tokens: int
    max_total_tokens: int
    retracted_total: int
    generated_tokens_total: int


class Engine(Protocol):
    """Client of one engine. Every call is bounded in time and raises ``EngineError``."""

    @property
    def url(self) -> str: ...

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation: ...
    async def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all when ``rid`` is None."""
        ...

    async def pause(self) -> None:
        """Stop decoding and keep the requests with their tokens; they go on after :meth:`resume` (their KV may be
        computed anew then: after a weight update it must be)."""
        ...

    async def resume(self) -> None: ...
    async def load_weights(self, path: str, *, step: int) -> None:
        """Swap weights in place and name them ``version_name(step)``. Running requests keep their ids."""
        ...

    async def info(self) -> EngineInfo: ...
    async def load(self) -> EngineLoad: ...
    async def healthy(self) -> bool: ...
    async def close(self) -> None: ...


# ------------------------------------------------------------------------------------ agent, renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy asked for. ``command`` is None when nothing readable was written; ``submit`` ends the episode."""

    command: str | None
    submit: bool = False


class Renderer(Protocol):
    """Messages to token ids and back, append-only: what it returns is appended to the ids so far, never re-rendered."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    def start(self, task: Task) -> list[int]:
        """The ids of the first prompt, up to where the policy begins to write."""
        ...

    def parse(self, output_ids: Sequence[int]) -> Action: ...
    def observe(self, output_ids: Sequence[int], result: ExecResult | None) -> list[int]:
        """The ids appended after ``output_ids`` (which may lack its stop token): closing tokens, the observation, and
        the opening of the next turn. ``result`` is None after a malformed action."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    turns: tuple[Turn, ...]
    end_reason: EndReason
    timeline: tuple[Event, ...]


class Agent(Protocol):
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
        """Drive the episode to its end. Infrastructure failures raise (``SandboxLostError``, ``EngineError``);
        caps end it with an end reason."""
        ...


class Grader(Protocol):
    async def grade(self, task: Task, patch: str, *, sandbox: Sandbox, limits: Limits) -> Evidence:
        """Grade ``patch`` in a *fresh* sandbox. Raises ``GraderError`` when it can't be carried out."""
        ...

    async def close(self) -> None:
        """End what the grader keeps running between gradings, if anything."""
        ...


@runtime_checkable
class MachineGrader(Protocol):
    """A grader that also knows tasks whose result is the machine that the agent leaves, not a diff."""

    def by_machine(self, task: Task) -> bool:
        """Is ``task`` one of them?"""
        ...

    async def grade_machine(self, task: Task, *, sandbox: Sandbox, limits: Limits) -> Graded:
        """Grade what is in the agent's own ``sandbox``. Raises ``GraderError`` when it can't be carried out."""
        ...


@runtime_checkable
class LogKeeper(Protocol):
    """A grader that can keep the whole logs of what it grades."""

    def keep_logs(self, folder: Path) -> None:
        """From now on, in ``folder``, which all workers share."""
        ...


# ----------------------------------------------------------------------------------------------- logs


class TrajectoryLog(Protocol):
    """Append-only, first wins per episode id, sealed shards only for readers (Rules 1, 2)."""

    def append(self, trajectory: Trajectory) -> bool:
        """Make it durable. False when the episode has already landed (the new one is discarded)."""
        ...

    def seal(self) -> Shard | None:
        """Move everything appended so far into one sealed shard; None when there is nothing."""
        ...

    def landed(self) -> frozenset[str]:
        """Episode ids that have landed, sealed or not."""
        ...

    def shards(self, since: int = 0) -> Sequence[Shard]: ...
    def read(self, cursor: Cursor) -> Iterable[tuple[Cursor, Trajectory]]:
        """Sealed rows from ``cursor`` on, each with the cursor *after* it."""
        ...

    def tail(self, cursor: Cursor) -> AsyncIterator[tuple[Cursor, Trajectory]]:
        """Like ``read``, for ever: waits for new shards."""
        ...
