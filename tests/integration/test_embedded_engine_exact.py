"""The embedded engine against transformers: greedy output and log-probs, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from farm.engine.embedded.config import read_config
from farm.engine.embedded.model import load_weights
from farm.engine.embedded.request import Request
from farm.engine.embedded.scheduler import Limits, Scheduler

VOCAB, CONTEXT = 160, 160
TOLERANCE = 1e-4

torch.set_num_threads(1)
Forward = Callable[[Sequence[int]], "np.ndarray[tuple[int, int], np.dtype[np.float32]]"]


def _save(folder: Path, kind: str, seed: int) -> None:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,  # sharp enough that greedy choices are no near ties
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if kind == "moe":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **common,
                num_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                norm_topk_prob=True,
                mlp_only_layers=[1],
                tie_word_embeddings=False,
            )
        )
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=kind == "tied", rope_theta=50_000.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones after initialisation: would hide a mistake
                parameter.uniform_(0.5, 1.5)
    shards = {"max_shard_size": "40KB"} if kind == "untied" else {}
    model.save_pretrained(folder, **shards)


@pytest.fixture(scope="module", params=["tied", "untied", "moe", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    _save(path, request.param, seed=3)
    return path


@pytest.fixture(scope="module")
def forward(folder: Path) -> Forward:
    """Ids -> log-probs [len, vocab] by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(ids: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], -1).numpy()

    return run


def _scheduler(folder: Path, *, budget: int = 4096, running: int = 12, chunk: int = 48) -> Scheduler:
    config = read_config(folder)
    limits = Limits(
        max_total_tokens=budget, context_length=CONTEXT, max_running=running, max_queued=None, chunk_tokens=chunk
    )
    return Scheduler(load_weights(config, folder), limits, version="step-000001")


def _request(
    finished: list[Request],
    rid: str,
    ids: Sequence[int],
    new: int,
    *,
    temperature: float = 0.0,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    start: int | None = None,
    seed: int = 1,
) -> Request:
    return Request(
        rid=rid,
        tokens=np.array(ids, np.int32),
        max_new_tokens=new,
        stop_ids=(),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        logprob_start=start,
        on_finish=finished.append,
        arrived_s=0.0,
    )


def _run(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        scheduler.step()


def _check(request: Request, forward: Forward) -> None:
    ids, n = request.tokens, request.prompt_length
    expected = forward(ids.tolist())
    for position in range(n, len(ids)):
        row = expected[position - 1]
        assert abs(row[ids[position]] - request.logprobs[position]) < TOLERANCE
        if request.temperature == 0:
            assert row[ids[position]] > row.max() - TOLERANCE
    if request.logprob_start is not None:
        at = np.arange(request.logprob_start + 1, n)
        assert np.abs(expected[at - 1, ids[at]] - request.logprobs[at]).max(initial=0.0) < TOLERANCE


def test_any_batch_composition(folder: Path, forward: Forward) -> None:
    """Mixed lengths, shared prefixes, prompts above a chunk, sampled and greedy, scored and not, arriving over time."""
    rng = np.random.default_rng(0)
    scheduler = _scheduler(folder)
    finished: list[Request] = []
    shared = rng.integers(0, VOCAB, 40).tolist()
    for n in range(40):
        ids = rng.integers(0, VOCAB, int(rng.integers(1, 70))).tolist()
        if n % 3 == 0:
            ids = shared + ids
        scheduler.submit(
            _request(
                finished,
                f"r{n}",
                ids,
                int(rng.integers(0, 40)),
                temperature=(0.0, 1.0, 0.7)[n % 3],
                top_p=(1.0, 0.9)[n % 2],
                start=(None, 0, len(ids) // 2)[n % 3],
                seed=n,
            )
        )
        for _ in range(int(rng.integers(0, 4))):
            scheduler.step()
    _run(scheduler)
    assert len(finished) == 40
    assert scheduler.counters.cached_tokens > 0
    for request in finished:
        _check(request, forward)


def test_turns_of_episodes_reuse_everything_but_the_new_tokens(folder: Path, forward: Forward) -> None:
    rng = np.random.default_rng(1)
    scheduler = _scheduler(folder)
    episodes = {f"e{n}": rng.integers(0, VOCAB, 12 + n).tolist() for n in range(6)}
    for turn in range(4):
        finished: list[Request] = []
        before = {rid: len(ids) for rid, ids in episodes.items()}
        for rid, ids in episodes.items():
            scheduler.submit(_request(finished, rid, ids, 6))
        _run(scheduler)
        for request in finished:
            _check(request, forward)
            if turn:
                observation = 9
                assert request.cached_tokens == before[request.rid] - observation - 1, (
                    "the last sampled token has no KV"
                )
            episodes[request.rid] = request.tokens.tolist() + rng.integers(0, VOCAB, 9).tolist()


def test_retraction_changes_nothing(folder: Path, forward: Forward) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB, 30).tolist() for _ in range(6)]

    def run(budget: int) -> list[Request]:
        scheduler = _scheduler(folder, budget=budget)
        scheduler.new_token_ratio = 0.0  # admit as if requests hardly grew
        finished: list[Request] = []
        for n, ids in enumerate(prompts):
            scheduler.submit(_request(finished, f"r{n}", ids, 40, temperature=float(n % 2), seed=n))
        while scheduler.has_work:
            scheduler.step()
            assert scheduler.running_tokens - scheduler.running <= budget
        return sorted(finished, key=lambda request: request.rid)

    squeezed, roomy = run(160), run(4096)
    assert sum(request.retractions for request in squeezed) > 0
    assert sum(request.retractions for request in roomy) == 0
    for one, other in zip(squeezed, roomy, strict=True):
        _check(one, forward)
        assert one.tokens.tolist() == other.tokens.tolist()


def test_the_last_request_that_does_not_fit_is_ended(folder: Path) -> None:
    scheduler = _scheduler(folder, budget=50)
    finished: list[Request] = []
    scheduler.submit(_request(finished, "r", [1] * 20, 100))
    _run(scheduler)
    assert finished[0].finish["status_code"] == 500
    assert finished[0].finish["message"].startswith("Out of memory even after retracting all other requests")
    assert len(finished[0].tokens) == 51


def test_new_weights_take_effect_between_steps_and_old_kv_is_never_reused(
    folder: Path, forward: Forward, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    _save(tmp_path, folder.name.rstrip("0123456789"), seed=4)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()

    def forward_new(ids: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        with torch.inference_mode():
            return torch.log_softmax(other(torch.tensor([list(ids)])).logits[0], -1).numpy()

    scheduler = _scheduler(folder)
    finished: list[Request] = []
    prompt = list(range(30))
    scheduler.submit(_request(finished, "before", prompt, 5))
    _run(scheduler)
    scheduler.submit(_request(finished, "across", [7, *prompt], 20))
    for _ in range(6):
        scheduler.step()
    scheduler.paused = True
    scheduler.retract_all()
    scheduler.set_weights(load_weights(read_config(tmp_path), tmp_path), "step-000002")
    scheduler.paused = False
    _run(scheduler)
    scheduler.submit(_request(finished, "after", prompt, 5))
    _run(scheduler)
    before, across, after = finished
    _check(before, forward)
    _check(after, forward_new)
    assert after.cached_tokens == 0
    assert [span["version"] for span in across.versions] == ["step-000001", "step-000002"]
    edge = across.prompt_length + across.versions[0]["end"]
    old, new = forward(across.tokens.tolist()), forward_new(across.tokens.tolist())
    for position in range(across.prompt_length, len(across.tokens)):
        row = (old if position < edge else new)[position - 1]
        assert abs(row[across.tokens[position]] - across.logprobs[position]) < TOLERANCE


def test_kv_computed_across_an_in_place_swap_is_dropped(folder: Path) -> None:
    scheduler = _scheduler(folder)
    finished: list[Request] = []
    scheduler.submit(_request(finished, "across", list(range(30)), 20))
    for _ in range(5):
        scheduler.step()
    scheduler.set_weights(load_weights(read_config(folder), folder), "step-000002")
    _run(scheduler)
    assert [span["version"] for span in finished[0].versions] == ["step-000001", "step-000002"]
    assert scheduler.kept_tokens == 0
    scheduler.submit(_request(finished, "next", finished[0].tokens.tolist(), 2))
    _run(scheduler)
    assert finished[1].cached_tokens == 0
