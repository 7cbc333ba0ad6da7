"""The contract of Agent, on every implementation, with a scripted engine and a sandbox in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from farm.agent import AGENTS, make_agent
from farm.agent.partial import partial_run
from farm.engine.scripted import ScriptedEngine
from farm.errors import AgentError, EngineError, SandboxLostError, UsageError
from farm.protocols import Action, AgentRun, ExecResult, GenerateRequest, SandboxSpec
from farm.sandbox.fake import FakeProvider, result
from farm.types import EndReason, InlineFiles, Limits, SamplingParams, Task, VersionSpan

SAMPLES = ("bash",)  # agents that ask an engine
ACTS = ("bash", "oracle")  # agents that use the sandbox
NEEDS_A_PROGRAM = {"external"}  # its contract: tests/integration/test_external_agent.py
LIMITS = Limits(max_turns=4, max_tokens_per_turn=8, max_context_tokens=64, tool_s=1.0, agent_s=2.0)
TASK = Task(
    instance_id="toy-1",
    dataset="toy",
    repo="toy/toy",
    base_commit="0" * 40,
    problem_statement="fix it",
    patch="diff --git a/x b/x\n",
    test_patch="",
    fail_to_pass=(),
    pass_to_pass=(),
    eval_script="",
    log_parser="micro",
    workspace=InlineFiles(files={}),
)


class Words:
    """A renderer of three words: 0 stops, 1 submits, 2 is a command."""

    stop_token_ids = (0,)

    def start(self, task: Task) -> list[int]:
        return [10, 11]

    def parse(self, output_ids: Sequence[int]) -> Action:
        return Action(command="ls" if output_ids[0] == 2 else None, submit=output_ids[0] == 1)

    def observe(self, output_ids: Sequence[int], result: ExecResult | None) -> list[int]:
        return [12, 13]

    def decode(self, ids: Sequence[int]) -> str:
        return str(ids)


def two_commands_then_submit(request: GenerateRequest) -> list[int]:
    return [1, 0] if len(request.input_ids) > 8 else [2, 0]


def run(
    name: str, provider: FakeProvider, engine: ScriptedEngine, *, limits: Limits = LIMITS, min_step: int = 0
) -> AgentRun:
    async def main() -> AgentRun:
        async with provider.open(SandboxSpec(owner="test", deadline_at_s=0.0)) as sandbox:
            return await make_agent(name).run(
                TASK,
                episode_id="episode",
                sandbox=sandbox,
                engine=engine,
                renderer=Words(),
                sampling=SamplingParams(),
                limits=limits,
                min_step=min_step,
            )

    return asyncio.run(main())


def test_every_agent_is_tested() -> None:
    assert set(AGENTS) == {"bash", "oracle", "null"} | NEEDS_A_PROGRAM
    with pytest.raises(UsageError, match="bash, external, null, oracle"):
        make_agent("other")


@pytest.mark.parametrize("name", sorted(AGENTS.keys() - NEEDS_A_PROGRAM))
def test_a_run_ends_with_what_was_sampled(name: str) -> None:
    provider, engine = FakeProvider(), ScriptedEngine(two_commands_then_submit)
    done = run(name, provider, engine)
    assert done.end_reason is EndReason.SUBMITTED
    assert len(done.turns) == (3 if name in SAMPLES else 0)
    assert all(event.start_at_s <= event.end_at_s for event in done.timeline)
    assert {event.name for event in done.timeline} <= {"generate", "exec"}
    assert bool(provider.opened[0].commands) is (name in ACTS)
    for turn in done.turns:
        assert len(turn.output_ids) == len(turn.output_logprobs) > 0
        assert turn.spans == (VersionSpan(step=0, start=0, end=len(turn.output_ids)),)


@pytest.mark.parametrize("name", ACTS)
def test_a_lost_sandbox_raises(name: str) -> None:
    with pytest.raises(SandboxLostError):
        run(name, FakeProvider(lost_at_exec=1), ScriptedEngine(two_commands_then_submit))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_dead_engine_raises_and_the_turns_are_kept(name: str) -> None:
    answers = iter([None, EngineError("dead", kind="dead")])

    def answer(_: GenerateRequest) -> list[int]:
        error = next(answers)
        if error is not None:
            raise error
        return [2, 0]

    engine = ScriptedEngine(answer)
    with pytest.raises(EngineError) as caught:
        run(name, FakeProvider(), engine)
    kept = partial_run(caught.value)
    assert kept is not None
    assert len(kept.turns) == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_weights_that_are_too_old_raise(name: str) -> None:
    with pytest.raises(EngineError) as caught:
        run(name, FakeProvider(), ScriptedEngine(two_commands_then_submit, version="step-000002"), min_step=3)
    assert caught.value.kind == "unverified_weights"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_stalled_engine_is_not_a_slow_agent(name: str) -> None:
    engine = ScriptedEngine(two_commands_then_submit)
    engine.stall("generate")
    limits = Limits(max_turns=4, tool_s=0.05, agent_s=0.2, max_context_tokens=64)
    with pytest.raises(EngineError) as caught:
        run(name, FakeProvider(), engine, limits=limits)
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_slow_agent_is_stopped_and_graded(name: str) -> None:
    limits = Limits(max_turns=4, tool_s=5.0, agent_s=0.2, max_context_tokens=64)
    done = run(name, FakeProvider(exec_s=1.0), ScriptedEngine(two_commands_then_submit), limits=limits)
    assert done.end_reason is EndReason.TIME_LIMIT
    assert len(done.turns) == 1


def test_a_gold_patch_that_does_not_apply_is_a_defect_of_the_task() -> None:
    provider = FakeProvider(lambda *_: result("error: patch failed", exit_code=1))
    with pytest.raises(AgentError) as caught:
        run("oracle", provider, ScriptedEngine(two_commands_then_submit))
    assert (caught.value.kind, caught.value.retryable) == ("gold_patch", False)
