"""The bash loop over token ids: sample, run the command, append what it printed, sample again.

Invariant (Rule 4): the ids the engine saw in turn k are the concatenation of all context and output ids up to the
context of turn k. Ids are only ever appended and no sampled id is rendered again. A ``Renderer`` can always extend
what is there, so a run is one segment.

How a run ends:

- SUBMITTED: the policy said so.
- MAX_TURNS: the last command was run, then no more turns were left.
- CONTEXT_FULL: no room is left for one more token, or the turn was cut off because it filled the context.
- TIME_LIMIT: ``limits.agent_s`` have passed. A command is given no more time than is left and is never cut off from
  outside, so the sandbox stays in order; only a running ``generate`` is cancelled (and aborted at the engine).
- MALFORMED, MAX_TOKENS: ``UNREADABLE_TURNS`` turns in a row held no action that could be run. A turn that hit
  ``max_tokens_per_turn`` without a stop token is such a turn, whatever it holds: half a command is never executed. The
  renderer closes it and the policy may go on. MAX_TOKENS when the last of them was cut off, else MALFORMED.

An engine that keeps one turn waiting for more than half of ``agent_s`` is broken, not slow: the client raises
``EngineError``, so a stalled engine is not graded as an agent that ran out of time (Rule 3).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

from farm.agent.caps import ENGINE_SHARE, allowance, end_of_turn
from farm.agent.partial import attach
from farm.errors import EngineError
from farm.protocols import Action, AgentRun, Engine, ExecResult, GenerateRequest, Generation, Renderer, Sandbox
from farm.types import EndReason, Event, Limits, SamplingParams, Task, Turn

_ABORT_S = 2.0


class BashAgent:
    """Runs what the policy writes, one command a turn. ``now`` gives wall-clock seconds for the timeline."""

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
        """See ``farm.protocols.Agent``. What was done before an error is attached to it (``farm.agent.partial``)."""
        run = _Run(episode_id, sandbox, engine, renderer, sampling, limits, min_step, self._now)
        try:
            end = await run.loop(task)
        except BaseException as error:
            attach(error, run.result(EndReason.FAILED))
            raise
        return run.result(end)


class _Run:
    """The state of one run."""

    def __init__(
        self,
        episode_id: str,
        sandbox: Sandbox,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        limits: Limits,
        min_step: int,
        now: Callable[[], float],
    ) -> None:
        self._rid = f"{episode_id}-{secrets.token_hex(4)}"  # another attempt at this episode may still be running
        self._sandbox, self._engine, self._renderer = sandbox, engine, renderer
        self._sampling, self._limits, self._min_step = sampling, limits, min_step
        self._clock = asyncio.get_running_loop().time
        self._wall = now() - self._clock()
        self._deadline = self._clock() + limits.agent_s
        self._turns: list[Turn] = []
        self._timeline: list[Event] = []

    def result(self, end: EndReason) -> AgentRun:
        return AgentRun(turns=tuple(self._turns), end_reason=end, timeline=tuple(self._timeline))

    async def loop(self, task: Task) -> EndReason:
        context = self._renderer.start(task)
        ids: list[int] = []
        unreadable = 0
        while True:
            ids += context
            allowed = allowance(self._limits, turns=len(self._turns), context_tokens=len(ids), left_s=self._left())
            if isinstance(allowed, EndReason):
                return allowed
            generation = await self._generate(ids, allowed)
            if generation is None:
                return EndReason.TIME_LIMIT
            ids += generation.output_ids
            cut = generation.finish_reason != "stop"
            action = Action(command=None) if cut else self._renderer.parse(generation.output_ids)
            result = None
            if action.command is not None and not action.submit:
                if self._left() <= 0:
                    self._record(context, generation, action, None)
                    return EndReason.TIME_LIMIT
                result = await self._exec(action.command, context, generation, action)
            self._record(context, generation, action, result)
            if action.submit:
                return EndReason.SUBMITTED
            unreadable = unreadable + 1 if action.command is None else 0
            end = end_of_turn(self._limits, cut=cut, context_tokens=len(ids), unreadable=unreadable)
            if end is not None:
                return end
            context = self._renderer.observe(generation.output_ids, result)

    def _left(self) -> float:
        return self._deadline - self._clock()

    async def _generate(self, ids: list[int], max_new_tokens: int) -> Generation | None:
        """One sampling; None when the agent's time ran out while it waited."""
        request = GenerateRequest(
            rid=f"{self._rid}-{len(self._turns)}",
            input_ids=tuple(ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            sampling=self._sampling,
        )
        start = self._clock()
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                generation = await self._engine.generate(request, timeout_s=self._limits.agent_s * ENGINE_SHARE)
        except (TimeoutError, asyncio.CancelledError):
            await self._abort(request.rid)
            if not limit.expired():
                raise
            return None
        finally:
            self._event("generate", start)
        check_generation(generation, max_new_tokens=max_new_tokens, min_step=self._min_step)
        return generation

    async def _abort(self, rid: str) -> None:
        """Tell the engine to give up ``rid``. What matters is on its way already, so a failure here is not raised: an
        engine that can't be told also drops the request when its connection closes."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._engine.abort(rid)

    async def _exec(self, command: str, context: list[int], generation: Generation, action: Action) -> ExecResult:
        start = self._clock()
        try:
            return await self._sandbox.exec(command, timeout_s=min(self._limits.tool_s, self._left()))
        except BaseException:
            self._record(context, generation, action, None)  # what was sampled is kept
            raise
        finally:
            self._event("exec", start)

    def _record(self, context: list[int], generation: Generation, action: Action, result: ExecResult | None) -> None:
        self._turns.append(
            Turn(
                segment=0,
                context_ids=tuple(context),
                output_ids=generation.output_ids,
                output_logprobs=generation.logprobs,
                spans=generation.spans,
                finish_reason=generation.finish_reason,
                action=_describe(action, self._renderer, generation),
                observation=result.output if result else "",
                exit_code=result.exit_code if result else None,
                cached_tokens=generation.cached_tokens,
                retractions=generation.retractions,
            )
        )

    def _event(self, name: str, start: float) -> None:
        self._timeline.append(Event(name=name, start_at_s=self._wall + start, end_at_s=self._wall + self._clock()))


def _describe(action: Action, renderer: Renderer, generation: Generation) -> str:
    """The turn for people: the command, "submit", or what was written when neither could be read."""
    if action.command is not None:
        return action.command
    return "submit" if action.submit else renderer.decode(generation.output_ids)


def check_generation(generation: Generation, *, max_new_tokens: int, min_step: int) -> None:
    """Refuse an answer that can't be trained on. Raises EngineError."""
    if generation.finish_reason == "abort":
        raise EngineError("the engine aborted the request", kind="aborted")
    count = len(generation.output_ids)
    if not 0 < count <= max_new_tokens or len(generation.logprobs) != count:
        raise EngineError(
            f"{count} tokens with {len(generation.logprobs)} log-probabilities, asked for up to {max_new_tokens}",
            kind="malformed_answer",
        )
    place = 0
    for span in generation.spans:
        if span.start != place or span.end <= span.start:
            raise EngineError(f"version spans {generation.spans} leave gaps", kind="malformed_answer")
        if span.step < min_step:
            raise EngineError(f"sampled by step {span.step}, at least {min_step} is wanted", kind="unverified_weights")
        place = span.end
    if place != count:
        raise EngineError(f"version spans cover {place} of {count} tokens", kind="malformed_answer")
