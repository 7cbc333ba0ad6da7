"""A scaffold of its own as the agent: exact tokens whatever it does, caps and failures as everywhere, nothing left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from farm.agent import make_agent
from farm.agent.partial import partial_run
from farm.engine.scripted import ScriptedEngine
from farm.errors import AgentError, EngineError, SandboxLostError, UsageError
from farm.protocols import AgentRun, GenerateRequest, SandboxSpec
from farm.render.chat import SYSTEM, ChatRenderer
from farm.sandbox.fake import FakeProvider, result
from farm.types import EndReason, InlineFiles, Limits, SamplingParams, Task

T = TypeVar("T")
SCAFFOLD = Path(__file__).parents[1] / "support" / "scaffold.py"
LIMITS = Limits(max_turns=8, max_tokens_per_turn=64, max_context_tokens=4096, tool_s=5.0, agent_s=40.0, episode_s=60.0)
TASK = Task(
    instance_id="toy-1",
    dataset="toy",
    repo="toy/toy",
    base_commit="0" * 40,
    problem_statement="add() subtracts.",
    patch="",
    test_patch="",
    fail_to_pass=(),
    pass_to_pass=(),
    eval_script="",
    log_parser="pytest",
    workspace=InlineFiles(files={}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([SYSTEM], trainer)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def letter_by_letter(model: str, text: str) -> list[int]:
    """Ids that no tokenizer would give ``text``, as a sampler may: encoding it again would show."""
    raw = Tokenizer.from_file(f"{model}/tokenizer.json")
    ids = [i for letter in text for i in raw.encode(letter, add_special_tokens=False).ids]
    return [*ids, raw.token_to_id("<|im_end|>")]


def script(model: str, *texts: str) -> Callable[[GenerateRequest], Sequence[int]]:
    queue = [letter_by_letter(model, text) for text in texts]
    return lambda _: queue.pop(0) if len(queue) > 1 else queue[0]


def run(
    model: str,
    course: str,
    engine: ScriptedEngine,
    *,
    provider: FakeProvider | None = None,
    limits: Limits = LIMITS,
    command: Sequence[str] = (),
) -> AgentRun:
    async def main() -> AgentRun:
        sandboxes = provider or FakeProvider(lambda command, _: result(f"ran {command}\n"))
        async with sandboxes.open(SandboxSpec(owner="t", deadline_at_s=0.0)) as sandbox:
            return await make_agent("external", command=command or (sys.executable, str(SCAFFOLD), course)).run(
                TASK,
                episode_id="e",
                sandbox=sandbox,
                engine=engine,
                renderer=ChatRenderer(model),
                sampling=SamplingParams(temperature=0.7),
                limits=limits,
                min_step=0,
            )

    return asyncio.run(main())


def requests_of(model: str, *texts: str) -> tuple[ScriptedEngine, list[GenerateRequest]]:
    seen: list[GenerateRequest] = []
    answer = script(model, *texts)

    def keep(request: GenerateRequest) -> Sequence[int]:
        seen.append(request)
        return answer(request)

    return ScriptedEngine(keep, context_length=4096), seen


def check_segments(found: AgentRun, seen: list[GenerateRequest]) -> None:
    """Every prompt the engine saw is the sum of what the turns of its segment hold (Rule 4)."""
    held: dict[int, tuple[int, ...]] = {}
    for turn, request in zip(found.turns, seen, strict=True):
        prompt = held.get(turn.segment, ()) + turn.context_ids
        assert prompt == tuple(request.input_ids)
        held[turn.segment] = prompt + turn.output_ids


def test_a_scaffold_is_recorded_token_for_token(model: str) -> None:
    engine, seen = requests_of(model, "ls -a", "cat x", "submit")
    found = run(model, "plain", engine)
    assert found.end_reason is EndReason.SUBMITTED
    assert [turn.segment for turn in found.turns] == [0, 0, 0]
    check_segments(found, seen)
    assert found.turns[0].observation == "ran ls -a\n"
    assert {request.sampling.temperature for request in seen} == {0.7}, "sampling is the episode's"
    assert [event.name for event in found.timeline] == ["generate", "exec", "generate", "exec", "generate"]
    assert found.turns[1].context_ids != found.turns[0].context_ids


def test_a_reply_that_the_scaffold_drops_stays_on_record(model: str) -> None:
    engine, seen = requests_of(model, "ls", "badly formed", "submit")
    found = run(model, "drops", engine)
    assert [turn.segment for turn in found.turns] == [0, 0, 1]
    check_segments(found, seen)
    first = found.turns[0].context_ids + found.turns[0].output_ids
    assert found.turns[2].context_ids[: len(first)] == first


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 2}, EndReason.MAX_TURNS),
        ({"max_context_tokens": 160}, EndReason.CONTEXT_FULL),
    ],
)
def test_caps_end_the_episode_and_the_scaffold(model: str, limits: dict[str, int], reason: EndReason) -> None:
    changed = Limits(
        **{"max_turns": 50, "max_tokens_per_turn": 32, "max_context_tokens": 4096, "agent_s": 40.0, **limits}
    )
    found = run(model, "endless", ScriptedEngine(script(model, "ls"), context_length=4096), limits=changed)
    assert found.end_reason is reason
    assert found.turns


def test_time_ends_a_scaffold_that_hangs_with_all_it_started(model: str) -> None:
    limits = Limits(tool_s=0.5, agent_s=1.5, episode_s=30.0)
    begun = time.monotonic()
    found = run(model, "hangs", ScriptedEngine(script(model, "ls")), limits=limits)
    assert found.end_reason is EndReason.TIME_LIMIT
    assert time.monotonic() - begun < 20


def test_what_a_scaffold_leaves_running_is_ended(model: str) -> None:
    begun = time.time()
    assert run(model, "leaves", ScriptedEngine(script(model, "ls"))).end_reason is EndReason.SUBMITTED
    left = [p for p in psutil.process_iter(["cmdline", "create_time"]) if p.info["cmdline"] == ["sleep", "600"]]
    assert not [p for p in left if p.info["create_time"] >= begun - 1]


_WORKER = """
import asyncio, os, sys
from farm.agent import make_agent
from farm.engine.scripted import ScriptedEngine
from farm.protocols import SandboxSpec
from farm.render.chat import ChatRenderer
from farm.sandbox.fake import FakeProvider
from farm.types import InlineFiles, Limits, SamplingParams, Task

async def main(model, scaffold):
    task = Task(instance_id="t", dataset="d", repo="r", base_commit="0", problem_statement="p", patch="", test_patch="",
                fail_to_pass=(), pass_to_pass=(), eval_script="", log_parser="pytest", workspace=InlineFiles(files={}))
    async with FakeProvider().open(SandboxSpec(owner="t", deadline_at_s=0.0)) as sandbox:
        await make_agent("external", command=(sys.executable, scaffold, "hides")).run(
            task, episode_id="e", sandbox=sandbox, engine=ScriptedEngine(lambda _: [0]), renderer=ChatRenderer(model),
            sampling=SamplingParams(), limits=Limits(tool_s=1.0, agent_s=100.0, episode_s=200.0), min_step=0)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_killed_worker_takes_its_scaffold_with_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what made sessions of its own, whose parents are gone, and the folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", _WORKER, model, str(SCAFFOLD)]) as worker:
        family = wait_for(lambda: next(tmp_path.glob("farm-scaffold-*/family"), None))
        hidden = [psutil.Process(int(pid)) for pid in wait_for(lambda: family.read_text().split())]
        shown = psutil.Process(worker.pid).children(recursive=True)
        assert len({*hidden, *shown}) > len(hidden)
        worker.kill()
    _, alive = psutil.wait_procs({*hidden, *shown}, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    wait_for(lambda: not list(tmp_path.iterdir()))


def wait_for(look: Callable[[], T]) -> T:
    """What ``look`` says once it says something."""
    until = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < until, "in vain"
        time.sleep(0.02)
    return found


def test_a_command_is_found_from_where_the_farm_was_started(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool").symlink_to("/bin/true")
    monkeypatch.chdir(tmp_path)
    engine = ScriptedEngine(script(model, "ls"))
    assert run(model, "", engine, command=("./tool",)).end_reason is EndReason.SUBMITTED


def test_a_scaffold_that_breaks_is_a_defect_of_the_agent(model: str) -> None:
    with pytest.raises(AgentError, match="exit code 1: Traceback: a defect of the scaffold") as caught:
        run(model, "crashes", ScriptedEngine(script(model, "ls")))
    assert (caught.value.kind, caught.value.retryable) == ("scaffold", False)


def test_an_engine_that_fails_is_not_the_scaffolds_fault(model: str) -> None:
    engine = ScriptedEngine(script(model, "ls"), context_length=4096)
    engine.fail("generate", EngineError("gone", kind="unreachable"))
    with pytest.raises(EngineError, match="gone") as caught:
        run(model, "plain", engine)
    kept = partial_run(caught.value)
    assert kept is not None
    assert kept.end_reason is EndReason.FAILED


def test_a_sandbox_that_is_lost_keeps_what_was_sampled(model: str) -> None:
    engine = ScriptedEngine(script(model, "ls"), context_length=4096)
    with pytest.raises(SandboxLostError) as caught:
        run(model, "plain", engine, provider=FakeProvider(lost_at_exec=1))
    kept = partial_run(caught.value)
    assert kept is not None
    assert len(kept.turns) == 1


def test_what_the_session_refuses(model: str) -> None:
    assert run(model, "probes", ScriptedEngine(script(model, "ls"))).end_reason is EndReason.SUBMITTED


def test_commands_that_can_not_be_run() -> None:
    with pytest.raises(UsageError, match=r"agent\.command is empty"):
        make_agent("external")
    with pytest.raises(UsageError, match="'/no/such' is not a program"):
        make_agent("external", command=("/no/such",))
