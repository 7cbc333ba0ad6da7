"""The real mini-swe-agent as a black box: a real sandbox, a real repository, tokens on record as they were sampled."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from farm.agent import make_agent
from farm.engine.scripted import ScriptedEngine
from farm.episode import run_episode
from farm.grader import make_grader
from farm.protocols import GenerateRequest
from farm.render.chat import SYSTEM, ChatRenderer
from farm.sandbox import make_provider
from farm.suites.micro import load
from farm.types import Attempt, EndReason, Episode, Graded, Limits, Trajectory

PYTHON = os.environ["ROLLOUT_FARM_MINI_PYTHON"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "mini_swe_agent.py"
LIMITS = Limits(
    max_turns=10, max_tokens_per_turn=600, max_context_tokens=8192, tool_s=10.0, agent_s=60.0, episode_s=120.0
)


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


def test_an_episode_of_mini_swe_agent(model: str) -> None:
    raw = Tokenizer.from_file(f"{model}/tokenizer.json")
    task = load("rl")[0]
    texts = [
        "I look around.\n```bash\nls\n```",
        "no command at all",  # mini-swe-agent drops such a reply from its messages
        f"I apply what I found.\n```bash\ngit apply - <<'X'\n{task.patch}X\n```",
        "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```",
    ]
    queue = [[i for letter in text for i in raw.encode(letter).ids] + [raw.token_to_id("<|im_end|>")] for text in texts]
    seen: list[GenerateRequest] = []

    def answer(request: GenerateRequest) -> Sequence[int]:
        seen.append(request)
        return queue[len(seen) - 1]

    async def main() -> Trajectory:
        episode = Episode(task=task, group_id="g", index=0, group_size=1, seed=0, limits=LIMITS)
        attempt = Attempt(episode=episode, number=1, engine_url="", min_version=0, queued_at_s=time.time())
        return await run_episode(
            attempt,
            provider=make_provider("bubblewrap"),
            engine=ScriptedEngine(answer, context_length=8192),
            agent=make_agent("external", command=(PYTHON, str(EXAMPLE))),
            renderer=ChatRenderer(model),
            grader=make_grader("tests"),
            worker="w",
            now=time.time,
        )

    found = asyncio.run(main())
    assert isinstance(found.outcome, Graded), found.outcome
    assert (found.outcome.reward, found.end_reason) == (1.0, EndReason.SUBMITTED)
    assert len(found.turns) == len(texts)
    assert [turn.segment for turn in found.turns] == [0, 0, 1, 1]
    held: dict[int, tuple[int, ...]] = {}
    for turn, request in zip(found.turns, seen, strict=True):
        prompt = held.get(turn.segment, ()) + turn.context_ids
        assert prompt == tuple(request.input_ids)
        held[turn.segment] = prompt + turn.output_ids
