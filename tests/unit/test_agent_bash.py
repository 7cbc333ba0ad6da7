"""The bash loop: ids are only appended, every cap has its end reason, nothing untrustworthy is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from farm.agent.bash import BashAgent
from farm.agent.partial import partial_run
from farm.errors import EngineError, SandboxLostError
from farm.protocols import Action, AgentRun, ExecResult, GenerateRequest, Generation
from farm.types import EndReason, InlineFiles, Limits, SamplingParams, Task, VersionSpan

STOP, SUBMIT, BAD = 0, 1, 2  # the words of the toy policy; any other id is a command
TASK = Task(
    instance_id="toy-1",
    dataset="toy",
    repo="toy/toy",
    base_commit="0" * 40,
    problem_statement="fix it",
    patch="",
    test_patch="",
    fail_to_pass=(),
    pass_to_pass=(),
    eval_script="",
    log_parser="micro",
    workspace=InlineFiles(files={}),
)
LIMITS = Limits(max_turns=4, max_tokens_per_turn=4, max_context_tokens=100, tool_s=1.0, agent_s=5.0)


class ToyRenderer:
    stop_token_ids = (STOP,)

    def start(self, task: Task) -> list[int]:
        return [100, 101]

    def parse(self, output_ids: Sequence[int]) -> Action:
        word = output_ids[0]
        return Action(command=None if word in (BAD, SUBMIT) else f"run {word}", submit=word == SUBMIT)

    def observe(self, output_ids: Sequence[int], result: ExecResult | None) -> list[int]:
        closing = [] if output_ids[-1] == STOP else [STOP]
        return [*closing, 200 if result else 201, 100]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class ToyEngine:
    """Answers with the next of ``script``: ids, or something to await."""

    url = "toy://"

    def __init__(self, *script: Sequence[int] | Callable[[], Awaitable[Any]], **change: Any) -> None:
        self.script, self.change = list(script), change
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str | None] = []

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation:
        self.requests.append(request)
        step = self.script.pop(0)
        if callable(step):
            await step()
            raise AssertionError("the step was to raise")
        ids = tuple(step)[: request.max_new_tokens]
        generation = Generation(
            output_ids=ids,
            logprobs=(-0.5,) * len(ids),
            spans=(VersionSpan(step=3, start=0, end=len(ids)),),
            finish_reason="stop" if STOP in ids else "length",
            prompt_tokens=len(request.input_ids),
            cached_tokens=2,
            retractions=0,
            queue_s=0.0,
            e2e_s=0.0,
        )
        return replace(generation, **self.change)

    async def abort(self, rid: str | None = None) -> None:
        self.aborted.append(rid)


class ToySandbox:
    id = "toy"

    def __init__(self, *, fails: bool = False) -> None:
        self.commands: list[str] = []
        self.timeouts: list[float] = []
        self.fails = fails

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        self.commands.append(command)
        self.timeouts.append(timeout_s)
        if self.fails:
            raise SandboxLostError("gone")
        return ExecResult(exit_code=0, output="ok", truncated=False, timed_out=False, duration_s=0.0)


def run(engine: ToyEngine, sandbox: ToySandbox | None = None, limits: Limits = LIMITS, min_step: int = 0) -> AgentRun:
    async def main() -> AgentRun:
        return await BashAgent(now=lambda: 1000.0).run(
            TASK,
            episode_id="e",
            sandbox=sandbox or ToySandbox(),  # type: ignore[arg-type]
            engine=engine,  # type: ignore[arg-type]
            renderer=ToyRenderer(),
            sampling=SamplingParams(),
            limits=limits,
            min_step=min_step,
        )

    return asyncio.run(main())


def test_every_prompt_is_the_concatenation_of_what_came_before() -> None:
    engine, sandbox = ToyEngine([7, STOP], [8, 9, STOP], [SUBMIT, STOP]), ToySandbox()
    result = run(engine, sandbox)
    assert result.end_reason is EndReason.SUBMITTED
    assert sandbox.commands == ["run 7", "run 8"]
    seen: list[int] = []
    for turn, request in zip(result.turns, engine.requests, strict=True):
        seen += turn.context_ids
        assert list(request.input_ids) == seen
        seen += turn.output_ids
    assert [turn.action for turn in result.turns] == ["run 7", "run 8", "submit"]
    assert [turn.exit_code for turn in result.turns] == [0, 0, None]
    assert len({request.rid for request in engine.requests}) == 3
    assert [event.name for event in result.timeline] == ["generate", "exec", "generate", "exec", "generate"]
    assert all(1000.0 <= event.start_at_s <= event.end_at_s for event in result.timeline)


def test_two_attempts_at_an_episode_have_different_request_ids() -> None:
    first, second = ToyEngine([SUBMIT, STOP]), ToyEngine([SUBMIT, STOP])
    run(first)
    run(second)
    assert first.requests[0].rid != second.requests[0].rid


def test_the_last_turn_is_still_run() -> None:
    sandbox = ToySandbox()
    assert run(ToyEngine(*[[7, STOP]] * 4), sandbox).end_reason is EndReason.MAX_TURNS
    assert len(sandbox.commands) == 4


def test_a_turn_that_was_cut_off_is_closed_and_never_executed() -> None:
    engine, sandbox = ToyEngine([7, 7, 7, 7, 7], [8, STOP], [SUBMIT, STOP]), ToySandbox()
    result = run(engine, sandbox)
    assert result.end_reason is EndReason.SUBMITTED
    assert sandbox.commands == ["run 8"]
    assert result.turns[1].context_ids == (STOP, 201, 100)


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ([[BAD, STOP], [BAD, STOP]], EndReason.MALFORMED),
        ([[7, 7, 7, 7], [7, 7, 7, 7]], EndReason.MAX_TOKENS),
        ([[BAD, STOP], [7, 7, 7, 7]], EndReason.MAX_TOKENS),
        ([[BAD, STOP], [7, STOP], [BAD, STOP], [7, STOP]], EndReason.MAX_TURNS),
    ],
)
def test_two_unreadable_turns_in_a_row_end_the_episode(script: list[list[int]], end: EndReason) -> None:
    result = run(ToyEngine(*script))
    assert result.end_reason is end
    assert len(result.turns) == len(script)


def test_no_room_for_the_observation_ends_the_episode() -> None:
    result = run(ToyEngine([7, STOP]), limits=replace(LIMITS, max_context_tokens=6))
    assert result.end_reason is EndReason.CONTEXT_FULL
    assert len(result.turns) == 1


def test_a_turn_cut_off_by_the_context_ends_the_episode() -> None:
    engine = ToyEngine([7, 7, 7])
    assert run(engine, limits=replace(LIMITS, max_context_tokens=5)).end_reason is EndReason.CONTEXT_FULL
    assert engine.requests[0].max_new_tokens == 3


def test_a_prompt_that_fills_the_context_is_never_sent() -> None:
    engine = ToyEngine()
    assert run(engine, limits=replace(LIMITS, max_context_tokens=2)).end_reason is EndReason.CONTEXT_FULL
    assert engine.requests == []


def test_the_time_limit_aborts_the_request_and_keeps_the_turns() -> None:
    engine = ToyEngine([7, STOP], lambda: asyncio.sleep(30))
    result = run(engine, limits=replace(LIMITS, agent_s=0.1))
    assert result.end_reason is EndReason.TIME_LIMIT
    assert len(result.turns) == 1
    assert engine.aborted == [engine.requests[1].rid]


def test_a_command_gets_no_more_time_than_is_left() -> None:
    sandbox = ToySandbox()
    run(ToyEngine([7, STOP], [SUBMIT, STOP]), sandbox, limits=replace(LIMITS, tool_s=4.0, agent_s=3.0))
    assert sandbox.timeouts[0] <= 3.0


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"finish_reason": "abort"}, "aborted"),
        ({"spans": (VersionSpan(step=2, start=0, end=2),)}, "unverified_weights"),
        ({"spans": (VersionSpan(step=3, start=0, end=1),)}, "malformed_answer"),
        ({"spans": ()}, "malformed_answer"),
        ({"spans": (VersionSpan(step=3, start=0, end=1), VersionSpan(step=2, start=1, end=2))}, "unverified_weights"),
        ({"spans": (VersionSpan(step=3, start=1, end=2),)}, "malformed_answer"),
        ({"logprobs": (-0.5,)}, "malformed_answer"),
        ({"output_ids": (), "logprobs": (), "spans": ()}, "malformed_answer"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(change: dict[str, Any], kind: str) -> None:
    with pytest.raises(EngineError) as caught:
        run(ToyEngine([7, STOP], **change), min_step=3)
    assert caught.value.kind == kind


def test_what_was_sampled_before_a_failure_is_kept_with_it() -> None:
    with pytest.raises(SandboxLostError) as caught:
        run(ToyEngine([7, STOP]), ToySandbox(fails=True))
    kept = partial_run(caught.value)
    assert kept is not None
    assert kept.end_reason is EndReason.FAILED
    assert [turn.output_ids for turn in kept.turns] == [(7, STOP)]


def test_cancelling_aborts_the_request() -> None:
    async def main() -> ToyEngine:
        waiting = asyncio.Event()

        async def hang() -> None:
            waiting.set()
            await asyncio.sleep(30)

        engine = ToyEngine(hang)
        agent = BashAgent().run(
            TASK,
            episode_id="e",
            sandbox=ToySandbox(),  # type: ignore[arg-type]
            engine=engine,  # type: ignore[arg-type]
            renderer=ToyRenderer(),
            sampling=SamplingParams(),
            limits=LIMITS,
            min_step=0,
        )
        running = asyncio.create_task(agent)
        await waiting.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return engine

    engine = asyncio.run(main())
    assert engine.aborted == [engine.requests[0].rid]
