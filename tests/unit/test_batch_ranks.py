"""Micro-batches packed, shared out over ranks, and padded to what sequence parallelism cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.batch import MicroBatch, TokenSequence, aligned, micro_batches, pack, share


def sequence(n: int, seed: int = 0) -> TokenSequence:
    chance = np.random.default_rng(seed)
    return TokenSequence(
        ids=chance.integers(1, 90, n),
        sampled=np.arange(n) % 2 == 1,
        logprobs=chance.normal(-2, 1, n).astype(np.float32),
        advantage=float(seed),
    )


def loss_tokens(batches: list[MicroBatch]) -> list[tuple[int, float, float]]:
    found = []
    for batch in batches:
        found += zip(batch.labels[batch.mask], batch.old_logprobs, batch.advantages, strict=True)
    return sorted((int(a), float(b), float(c)) for a, b, c in found)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
def test_packing_holds_each_sequence_once_within_the_limit(lengths: list[int], limit: int) -> None:
    parts = pack(lengths, max_tokens=limit)
    assert sorted(n for part in parts for n in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[n] for n in part) <= limit
    if lengths and max(lengths) <= limit:
        assert len(parts) <= 11 / 9 * -(-sum(lengths) // limit) * 2  # no worse than every second one half empty


def test_packed_and_padded_hold_the_same_loss() -> None:
    rows = [sequence(n, seed) for seed, n in enumerate((9, 4, 17, 6, 12))]
    padded = micro_batches(rows, max_tokens=24)
    packed = micro_batches(rows, max_tokens=24, packed=True)
    assert loss_tokens(padded) == loss_tokens(packed)
    assert len(packed) <= len(padded)
    for batch in packed:
        assert batch.bounds is not None
        assert batch.ids.shape == (1, batch.bounds[-1])
    first = packed[0].bounds
    assert first is not None
    assert first[:2] == (0, 16)  # the longest of them, whose first id has no label


@pytest.mark.parametrize("packed", [False, True])
def test_every_rank_gets_equally_many(packed: bool) -> None:
    batches = micro_batches([sequence(10, seed) for seed in range(5)], max_tokens=9, packed=packed)
    shares = [share(batches, rank, 3) for rank in range(3)]
    assert [len(s) for s in shares] == [2, 2, 2]
    assert loss_tokens([b for s in shares for b in s]) == loss_tokens(batches)
    blank = shares[2][1]
    assert (blank.tokens, blank.ids.shape, blank.bounds) == (0, (1, 1), (0, 1) if packed else None)
    assert share(batches, 0, 1) == batches
    assert share([], 0, 2) == []


@pytest.mark.parametrize("packed", [False, True])
def test_alignment_adds_only_padding(packed: bool) -> None:
    (batch,) = micro_batches([sequence(6), sequence(8, 1)], max_tokens=99, packed=packed)
    longer = aligned(batch, 8)
    length = batch.ids.shape[1]
    assert longer.ids.shape[1] % 8 == 0
    assert (longer.ids[:, :length] == batch.ids).all()
    assert not longer.mask[:, length:].any()
    assert loss_tokens([longer]) == loss_tokens([batch])
    if packed:
        assert longer.bounds == (*batch.bounds, longer.ids.shape[1])  # type: ignore[misc]
    assert aligned(batch, 1) is batch
