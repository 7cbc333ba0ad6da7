"""A real pretrained instruct model: its own chat template, the same on both engines, and a farm's episode on it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import real_sglang
import smollm
from tokenizers import Tokenizer

from farm.engine.launch import EngineOptions, launch_engine
from farm.engine.sglang import SGLangEngine
from farm.protocols import GenerateRequest, Generation
from farm.render.chat import SYSTEM, ChatRenderer
from farm.render.messages import Message
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded, SamplingParams

CONTEXT = 2048
QUESTION = "What is the capital of France? Answer in one sentence."

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm.folder()


@pytest.fixture(scope="module")
def renderer(model: Path) -> ChatRenderer:
    return ChatRenderer(str(model))


@pytest.fixture(scope="module")
def template(model: Path) -> Any:
    """Messages -> ids, by the model's own chat template."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def ids(messages: Sequence[dict[str, str]]) -> list[int]:
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(found)

    return ids


@pytest.fixture(scope="module")
def urls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A real server's and an embedded one's."""
    folder = tmp_path_factory.mktemp("servers")
    options = EngineOptions(model=str(model), version="step-000000", context_length=CONTEXT, max_running_requests=4)
    limits = {"max_total_tokens": 2 * CONTEXT, "context_length": CONTEXT, "max_running_requests": 2}
    with real_sglang.real_server(str(model), folder, version="step-000000", **limits) as real:
        embedded = asyncio.run(launch_engine(options, run_folder=folder, name="embedded", timeout_s=300))
        yield real.url, embedded.url
        asyncio.run(embedded.stop())


def generate(url: str, ids: Sequence[int], new: int, stop: tuple[int, ...]) -> Generation:
    async def ask() -> Generation:
        engine = SGLangEngine(url)
        request = GenerateRequest(
            rid="r", input_ids=ids, max_new_tokens=new, stop_token_ids=stop, sampling=SamplingParams(temperature=0.0)
        )
        try:
            return await engine.generate(request, timeout_s=600)
        finally:
            await engine.close()

    return asyncio.run(ask())


def test_rendering_is_the_models_own_template_and_only_appends(
    renderer: ChatRenderer, template: Any, model: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    ids = renderer.open_chat([Message(role=m["role"], text=m["content"]) for m in said], ())
    assert ids == template(said)
    for answer, question in (("It is Paris.", "And of Italy?"), ("Rome\n is it.", "<|im_end|> of Spain?\n")):
        output = encode(answer)
        before = [*ids, *output]
        ids = before + renderer.continue_chat(output, [Message(role="user", text=question)])
        assert ids[: len(before)] == before
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        if "<|" not in question:  # what the template would take for a control token, the renderer does not
            assert ids == template(said)
    assert ids.count(renderer.stop_token_ids[0]) == 6, "none came in by what was said"


def test_both_engines_give_the_same_answer(renderer: ChatRenderer, urls: tuple[str, str]) -> None:
    ids = renderer.open_chat([Message(role="user", text=QUESTION)], ())
    real, embedded = (generate(url, ids, 24, renderer.stop_token_ids) for url in urls)
    assert embedded.output_ids == real.output_ids
    assert embedded.logprobs == pytest.approx(real.logprobs, abs=1e-4)
    assert embedded.finish_reason == real.finish_reason
    assert "Paris" in renderer.decode(real.output_ids)


def test_a_farm_works_on_it(model: Path, tmp_path: Path, renderer: ChatRenderer) -> None:
    run = tmp_path / "run"
    settings = {
        "engine.command": list(real_sglang.command()), "engine.gpus_per_engine": 0, "engine.start_timeout_s": 600.0,
        "engine.context_length": CONTEXT + 8, "engine.max_total_tokens": 2 * CONTEXT + 16,
        "engine.max_running_requests": 2, "limits.max_context_tokens": CONTEXT, "limits.max_turns": 2,
        "limits.max_tokens_per_turn": 48, "limits.agent_s": 800.0, "limits.episode_s": 1000.0, "renderer.name": "chat",
        "cluster.slots": 1,
    }  # fmt: skip
    sets = [text for name, value in settings.items() for text in ("--set", f"{name}={json.dumps(value)}")]
    command = [
        sys.executable, "-m", "farm.cli", "rollout", "--tasks", "micro:benchmark", "--limit", "1", "--attempts", "1",
        "--run", str(run), "--policy", str(model), "--workers", "1", "--launch-engines", "1", *sets,
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=1100)
    ((_, row),) = DirectoryLog(run / "trajectories", create=False).read(Cursor())
    assert isinstance(row.outcome, Graded), row.outcome
    assert len(row.turns) >= 1
    assert renderer.decode(row.turns[0].context_ids).startswith(f"<|im_start|>system\n{SYSTEM}")
    for turn in row.turns:
        assert {span.step for span in turn.spans} == {0}
        assert len(turn.output_logprobs) == len(turn.output_ids) > 0
    for before, after in zip(row.turns, row.turns[1:], strict=False):
        closing = [] if before.output_ids[-1] == renderer.stop_token_ids[0] else [renderer.stop_token_ids[0]]
        assert list(after.context_ids[: len(closing)]) == closing, "only what follows was added"
