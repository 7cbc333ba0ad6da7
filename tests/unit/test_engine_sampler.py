"""Draws: what they depend on, and what they are distributed like."""

from __future__ import annotations

import numpy as np
import torch

from farm.engine.embedded.sampler import SamplingRows, sample, uniforms

VOCAB = 12
torch.set_num_threads(1)


def rows(
    count: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = VOCAB, seed: int = 1, first: int = 0
) -> SamplingRows:
    return SamplingRows(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int32),
        seed=np.full(count, seed, np.uint64),
        position=np.arange(first, first + count, dtype=np.int32),
    )


def logits(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, VOCAB, generator=generator).mul(1.5).expand(count, -1).contiguous()


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    drawn = uniforms(np.full(20_000, 7, np.uint64), np.arange(20_000, dtype=np.int32))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.abs(np.histogram(drawn, 20, (0, 1))[0] - 1000).max() < 150
    assert np.abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
    by_seed = uniforms(np.arange(20_000, dtype=np.uint64), np.full(20_000, 100, np.int32))
    assert np.abs(np.histogram(by_seed, 20, (0, 1))[0] - 1000).max() < 150


def test_frequencies_are_the_tempered_softmax_and_logprobs_the_plain_one() -> None:
    count = 20_000
    for temperature in (1.0, 0.5, 2.0):
        ids, logprobs = sample(logits(count), rows(count, temperature=temperature))
        expected = torch.softmax(logits(1)[0] / temperature, -1).numpy()
        assert np.abs(np.bincount(ids, minlength=VOCAB) / count - expected).max() < 0.015
        plain = torch.log_softmax(logits(1)[0], -1).numpy()
        assert np.allclose(logprobs, plain[ids], atol=1e-6)


def test_top_k_and_top_p_cut_the_tail() -> None:
    count = 2_000
    order = torch.argsort(logits(1)[0], descending=True).tolist()
    ids, _ = sample(logits(count), rows(count, top_k=3))
    assert set(ids.tolist()) == set(order[:3])
    probs = torch.softmax(logits(1)[0], -1)[order].cumsum(-1)
    kept = int((probs < 0.6).sum()) + 1
    ids, _ = sample(logits(count), rows(count, top_p=0.6))
    assert set(ids.tolist()) == set(order[:kept])
    ids, _ = sample(logits(count), rows(count, top_p=1e-6))
    assert set(ids.tolist()) == {order[0]}


def test_a_row_draws_the_same_in_any_company() -> None:
    both = rows(2)
    mixed = SamplingRows(
        temperature=np.array([0.0, 1.0], np.float32),
        top_p=np.array([0.5, 1.0], np.float32),
        top_k=both.top_k,
        seed=both.seed,
        position=both.position,
    )
    together, _ = sample(logits(2), mixed)
    alone, _ = sample(logits(1), rows(1, first=1))
    assert together[0] == int(torch.argmax(logits(1)))
    assert together[1] == alone[0]


def test_impossible_tokens_are_never_drawn() -> None:
    hard = torch.full((500, VOCAB), -1e30)
    hard[:, 5] = 0.0
    hard[:, 11] = 0.0
    ids, _ = sample(hard, rows(500))
    assert set(ids.tolist()) == {5, 11}
