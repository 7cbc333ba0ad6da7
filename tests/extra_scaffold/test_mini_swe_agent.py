"""The real mini-swe-agent as a black box: a real sandbox, a real repository, tokens on record as they were sampled."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from farm.agent import make_agent
from farm.config import load_config, to_json
from farm.engine.scripted import ScriptedEngine
from farm.episode import run_episode
from farm.grader import make_grader
from farm.policy_log import PolicyLog
from farm.protocols import GenerateRequest, Generation
from farm.render.chat import SYSTEM, ChatRenderer
from farm.run_folder import RunFolder
from farm.sandbox import make_provider
from farm.suites.micro import load
from farm.trajectory_log import DirectoryLog
from farm.types import Attempt, Cursor, EndReason, Episode, Graded, Limits, Task, Trajectory
from trainer.batch import sequences
from trainer.config import TrainerConfig
from trainer.group import Batcher, BatchRules
from trainer.loop import Trainer
from trainer.megatron.learner import Learner
from trainer.megatron.model import start_megatron, stop_megatron
from trainer.metrics import read_metrics

PYTHON = os.environ["ROLLOUT_FARM_MINI_PYTHON"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "mini_swe_agent.py"
MODEL = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 512, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
LIMITS = Limits(
    max_turns=10, max_tokens_per_turn=600, max_context_tokens=8192, tool_s=10.0, agent_s=60.0, episode_s=120.0
)


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    start_megatron()
    yield
    stop_megatron()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
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
    return [*(i for letter in text for i in raw.encode(letter).ids), raw.token_to_id("<|im_end|>")]


class Engine(ScriptedEngine):
    """Every token has a log-prob of its own."""

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation:
        found = await super().generate(request, timeout_s=timeout_s)
        first = len(request.input_ids)
        return replace(found, logprobs=tuple(-(first + n) / 1_000 for n in range(len(found.output_ids))))


def attempts(model: str, task: Task, *scripts: Sequence[str]) -> tuple[list[Trajectory], list[list[GenerateRequest]]]:
    """One group: an attempt at ``task`` per script, and what the engine was asked in each."""
    seen: list[list[GenerateRequest]] = [[] for _ in scripts]

    async def attempt(index: int) -> Trajectory:
        def answer(request: GenerateRequest) -> Sequence[int]:
            seen[index].append(request)
            return letter_by_letter(model, scripts[index][len(seen[index]) - 1])

        episode = Episode(task=task, group_id="g", index=index, group_size=len(scripts), seed=0, limits=LIMITS)
        return await run_episode(
            Attempt(episode=episode, number=1, engine_url="", min_version=0, queued_at_s=time.time()),
            provider=make_provider("bubblewrap"),
            engine=Engine(answer, context_length=8192),
            agent=make_agent("external", command=(PYTHON, str(EXAMPLE))),
            renderer=ChatRenderer(model),
            grader=make_grader("tests"),
            worker="w",
            now=time.time,
        )

    async def main() -> list[Trajectory]:
        return [await attempt(index) for index in range(len(scripts))]

    return asyncio.run(main()), seen


SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"


def solution(task: Task) -> list[str]:
    return [
        "I look around.\n```bash\nls\n```",
        "no command at all",  # mini-swe-agent drops such a reply from its messages
        f"I apply what I found.\n```bash\ngit apply - <<'X'\n{task.patch}X\n```",
        SUBMIT,
    ]


def test_an_episode_of_mini_swe_agent(model: str) -> None:
    task = load("rl")[0]
    ((found,), (seen,)) = attempts(model, task, solution(task))
    assert isinstance(found.outcome, Graded), found.outcome
    assert (found.outcome.reward, found.end_reason) == (1.0, EndReason.SUBMITTED)
    assert len(found.turns) == len(solution(task))
    assert [turn.segment for turn in found.turns] == [0, 0, 1, 1]
    held: dict[int, tuple[int, ...]] = {}
    for turn, request in zip(found.turns, seen, strict=True):
        prompt = held.get(turn.segment, ()) + turn.context_ids
        assert prompt == tuple(request.input_ids)
        held[turn.segment] = prompt + turn.output_ids


@pytest.mark.usefixtures("megatron")
def test_a_group_of_mini_swe_agent_trains_a_policy(model: str, tmp_path: Path) -> None:
    """What was sampled arrives in the trainer's batch id for id, log-prob for log-prob, and a step is taken on it."""
    task = load("rl")[0]
    rows, seen = attempts(model, task, solution(task), [SUBMIT], solution(task), [SUBMIT])
    assert [row.outcome.reward for row in rows if isinstance(row.outcome, Graded)] == [1.0, 0.0, 1.0, 0.0]

    run = RunFolder.create(
        tmp_path / "run",
        to_json(load_config(sets=["rollout.group_size=4", "rollout.groups_per_step=1", "rollout.min_attempts=4"])),
    )
    with DirectoryLog(run.trajectories) as log:
        log.append_many(rows)
        log.seal()
        landed = [row for _, row in log.read(Cursor())]

    batcher = Batcher(BatchRules(groups_per_step=1, min_attempts=4, max_staleness=1))
    batches = [batcher.push(Cursor(shard=0, row=number), row) for number, row in enumerate(landed)]
    batch = batches[-1]
    assert batches[:-1] == [None, None, None]
    assert batch is not None
    advantages = {sample.episode_id: sample.advantage for sample in batch.samples}
    for row, requests in zip(rows, seen, strict=True):
        assert (advantages[row.episode_id] > 0) == (len(requests) > 1)
        pieces = sequences(row, advantage=advantages[row.episode_id])
        sampled = [id_ for piece in pieces for id_ in piece.ids[piece.sampled].tolist()]
        logprobs = [value for piece in pieces for value in piece.logprobs[piece.sampled].tolist()]
        assert sampled == [id_ for turn in row.turns for id_ in turn.output_ids]
        assert logprobs == pytest.approx([value for turn in row.turns for value in turn.output_logprobs])
        asked = {tuple(request.input_ids) for request in requests}
        assert all(any(tuple(piece.ids.tolist())[: len(prompt)] == prompt for prompt in asked) for piece in pieces)
    trained_tokens = sum(len(turn.output_ids) for row in rows for turn in row.turns)

    (Path(model) / "config.json").write_text(json.dumps(MODEL))
    policy = tmp_path / "policy"
    policy.mkdir()
    Learner(Path(model), random_weights=True).write(policy, source=Path(model))
    trainer = Trainer(run, TrainerConfig(lr=0.01), policy=policy, wait_s=0.1)
    try:
        trainer.run(steps=1)
    finally:
        trainer.close()
    before, after = PolicyLog(run.policies).history()
    assert (before.step, after.step) == (0, 1)
    assert before.digest != after.digest
    (line,) = read_metrics(run.metrics)
    assert (line["trained_episodes"], line["loss_tokens"]) == (4, trained_tokens)
