"""What runs on a worker: one attempt in, a receipt out.

A graded episode is put into the trajectory log here, by the worker that finished it, before anybody is told: so it
survives the death of the worker, of the scheduler and of the driver from that moment on (Rule 1). What goes back is a
small receipt. An attempt that failed goes back whole, for the dispatcher decides whether it is tried again or lands.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from farm.agent import make_agent
from farm.engine import make_engine
from farm.episode import run_episode
from farm.errors import EngineError, FarmError, classify
from farm.grader import make_grader
from farm.inject import FaultPlan, Parts, sabotage
from farm.protocols import (
    Action,
    Engine,
    EngineInfo,
    EngineLoad,
    ExecResult,
    GenerateRequest,
    Generation,
    LogKeeper,
    Renderer,
)
from farm.render import make_renderer
from farm.sandbox import make_provider
from farm.sandbox.slow import SlowStarts
from farm.trajectory_log import DirectoryLog
from farm.types import Attempt, Dropped, EndReason, Failed, Graded, Task, Trajectory, Usage

_APPEND_TRIES = 6
_APPEND_DELAY_S = 0.2
_CANCEL_GRACE_S = 15.0
# run_episode keeps episode_s by itself; this is the wall behind it, for a clean-up that hangs. Both together are less
# than what the lease adds to episode_s.
_WALL_SLACK_S = 10.0
# Who takes a host away signals the processes in its sandboxes and the worker at about the same time, in any order.
_SIGNAL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Everything a worker needs to make its parts; plain values, so that it travels anywhere.

    ``model_path``: folder with the tokenizer for the renderer; "" when the agent samples nothing."""

    log_path: str
    provider: str
    agent: str
    renderer: str
    grader: str
    model_path: str
    agent_command: tuple[str, ...] = ()
    start_delay_s: float = 0.0
    fault_rate: float = 0.0
    fault_seed: int = 0
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    graded_path: str = ""  # where graders that can keep whole test logs do so; "": they aren't kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A graded attempt, durable in the log. ``first`` is False when the episode had landed before: then the log has
    the other attempt's row, and this one was discarded."""

    episode_id: str
    attempt: int
    first: bool
    reward: float
    end_reason: EndReason
    turns: int
    usage: Usage
    total_tokens: int
    oldest_step: int | None
    started_at_s: float
    ended_at_s: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A failed attempt, not in the log."""

    trajectory: Trajectory
    failed: Failed


class EpisodeWorker:
    """Implements ``farm.cluster.EpisodeRunner``. Parts are made once per process, engine clients once per URL.

    An attempt that is still there ``wall_slack_s`` after its ``episode_s`` is cancelled, and given up (it fails, and
    its slot is free) when it is not gone ``cancel_grace_s`` later."""

    def __init__(
        self,
        *,
        worker: str,
        options: WorkerOptions,
        now: Callable[[], float] = time.time,
        wall_slack_s: float = _WALL_SLACK_S,
        cancel_grace_s: float = _CANCEL_GRACE_S,
    ) -> None:
        self._wall_slack_s = wall_slack_s
        self._cancel_grace_s = cancel_grace_s
        self._worker = worker
        self._options = options
        self._now = now
        self.log = DirectoryLog(options.log_path)
        self._provider = make_provider(options.provider, **options.provider_options)
        if options.start_delay_s:
            self._provider = SlowStarts(self._provider, options.start_delay_s)
        self._agent = make_agent(options.agent, command=options.agent_command)
        self._grader = make_grader(options.grader)
        if options.graded_path and isinstance(self._grader, LogKeeper):
            self._grader.keep_logs(Path(options.graded_path))
        self._renderer: Renderer = (
            make_renderer(options.renderer, options.model_path) if options.model_path else NoRenderer()
        )
        self._faults = FaultPlan(rate=options.fault_rate, seed=options.fault_seed)
        self._engines: dict[str, Engine] = {}
        self._distrusted = False

    def distrust(self) -> None:
        """From now on nothing lands from here: sandboxes may have been told to end together with this process, and an
        episode that goes on without them would get a reward for it (Rule 3)."""
        self._distrusted = True

    async def run(self, attempt: Attempt) -> Receipt | Returned:
        """Execute the attempt within its wall limit. Raises only ``CancelledError``."""
        trajectory = await self._bounded(attempt)
        if not (isinstance(trajectory.outcome, Graded) and trajectory.outcome.reward > 0):
            await asyncio.sleep(_SIGNAL_S)  # it may be such a signal's work
        if self._distrusted:
            trajectory = _as_failed(trajectory, FarmError("its worker was told to go while it ran", kind="preempted"))
        match trajectory.outcome:
            case Failed():
                pass
            case Graded() as graded:
                try:
                    return _receipt(trajectory, graded, first=await self._append(trajectory))
                except FarmError as error:
                    trajectory = _as_failed(trajectory, error)
            case other:
                trajectory = _as_failed(trajectory, FarmError(f"an episode can't end as {type(other).__name__}"))
        assert isinstance(trajectory.outcome, Failed)
        return Returned(trajectory=trajectory, failed=trajectory.outcome)

    async def close(self) -> None:
        for engine in self._engines.values():
            with contextlib.suppress(FarmError, OSError):
                await engine.close()
        self._engines.clear()
        await self._grader.close()

    async def _bounded(self, attempt: Attempt) -> Trajectory:
        started_at_s = self._now()
        limit_s = attempt.episode.limits.episode_s + self._wall_slack_s
        task = asyncio.ensure_future(self._episode(attempt))
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
            if not done:
                task.cancel()
                await asyncio.wait({task}, timeout=self._cancel_grace_s)
                raise FarmError(f"the attempt was still running after {limit_s:g} s", kind="wall_limit")
            return task.result()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=self._cancel_grace_s)
            raise
        except Exception as error:
            return bare_trajectory(
                attempt, classify(error), worker=self._worker, started_at_s=started_at_s, ended_at_s=self._now()
            )

    async def _episode(self, attempt: Attempt) -> Trajectory:
        parts = Parts(
            provider=self._provider,
            engine=self._engine(attempt.engine_url),
            agent=self._agent,
            grader=self._grader,
        )
        parts = sabotage(parts, self._faults.boundary(attempt.episode.id, attempt.number))
        return await run_episode(
            attempt,
            provider=parts.provider,
            engine=parts.engine,
            agent=parts.agent,
            renderer=self._renderer,
            grader=parts.grader,
            worker=self._worker,
            now=self._now,
        )

    def _engine(self, url: str) -> Engine:
        if not url:
            return NoEngine()
        if url not in self._engines:
            self._engines[url] = make_engine(url)
        return self._engines[url]

    async def _append(self, trajectory: Trajectory) -> bool:
        """A finished episode is worth some patience with a full disk."""
        delay_s = _APPEND_DELAY_S
        for _ in range(_APPEND_TRIES - 1):
            try:
                return await asyncio.to_thread(self.log.append, trajectory)
            except FarmError:
                await asyncio.sleep(delay_s)
                delay_s *= 2
        return await asyncio.to_thread(self.log.append, trajectory)


def _as_failed(trajectory: Trajectory, error: FarmError) -> Trajectory:
    """What came of it without its grade: it may land when it was the last attempt, and then as a failure."""
    return replace(trajectory, outcome=classify(error), end_reason=EndReason.FAILED)


def make_worker(*, worker: str, options: WorkerOptions) -> EpisodeWorker:
    """The factory that ``farm.cluster`` names to its workers."""
    return EpisodeWorker(worker=worker, options=options)


def bare_trajectory(
    attempt: Attempt, outcome: Failed | Dropped, *, worker: str, started_at_s: float, ended_at_s: float
) -> Trajectory:
    """The row of an attempt of which nothing is known but how it ended."""
    episode, task = attempt.episode, attempt.episode.task
    return Trajectory(
        episode_id=episode.id,
        group_id=episode.group_id,
        group_size=episode.group_size,
        index=episode.index,
        instance_id=task.instance_id,
        task_digest=task.digest,
        dataset=task.dataset,
        repo=task.repo,
        strata=task.strata,
        weight=task.weight,
        seed=episode.seed,
        purpose=episode.purpose,
        sampling=episode.sampling,
        attempt=attempt.number,
        worker=worker,
        engine_url=attempt.engine_url,
        outcome=outcome,
        end_reason=EndReason.FAILED,
        turns=(),
        patch="",
        timeline=(),
        usage=Usage(),
        prior=attempt.prior,
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
    )


def _receipt(trajectory: Trajectory, outcome: Graded, *, first: bool) -> Receipt:
    return Receipt(
        episode_id=trajectory.episode_id,
        attempt=trajectory.attempt,
        first=first,
        reward=outcome.reward,
        end_reason=trajectory.end_reason,
        turns=len(trajectory.turns),
        usage=trajectory.usage,
        total_tokens=trajectory.total_tokens,
        oldest_step=trajectory.oldest_step,
        started_at_s=trajectory.started_at_s,
        ended_at_s=trajectory.ended_at_s,
        worker=trajectory.worker,
    )


def _no_engine() -> NoReturn:
    raise EngineError("this run has no engine", kind="no_engine", retryable=False)


class NoEngine:
    """Stands in for the engine of agents that sample nothing."""

    url = ""

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation:
        _no_engine()

    async def abort(self, rid: str | None = None) -> None:
        _no_engine()

    async def pause(self) -> None:
        _no_engine()

    async def resume(self) -> None:
        _no_engine()

    async def load_weights(self, path: str, *, step: int) -> None:
        _no_engine()

    async def info(self) -> EngineInfo:
        _no_engine()

    async def load(self) -> EngineLoad:
        _no_engine()

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        return


class NoRenderer:
    """Stands in for the renderer of agents that sample nothing."""

    stop_token_ids: tuple[int, ...] = ()

    def start(self, task: Task) -> list[int]:
        return []

    def parse(self, output_ids: Sequence[int]) -> Action:
        return Action(command=None)

    def observe(self, output_ids: Sequence[int], result: ExecResult | None) -> list[int]:
        return []

    def decode(self, ids: Sequence[int]) -> str:
        return ""
