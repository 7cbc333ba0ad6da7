from __future__ import annotations

import math

import numpy as np
import pytest

from farm.types import Dropped, EndReason, SamplingParams, Trajectory, Turn, Usage, VersionSpan
from trainer.batch import TokenSequence, micro_batches, sequences


def turn(context: list[int], output: list[int], *, segment: int = 0, logprobs: list[float] | None = None) -> Turn:
    return Turn(
        segment=segment,
        context_ids=tuple(context),
        output_ids=tuple(output),
        output_logprobs=tuple(logprobs if logprobs is not None else [-0.5 - i for i in range(len(output))]),
        spans=(VersionSpan(step=0, start=0, end=len(output)),),
        finish_reason="stop",
        action="",
        observation="",
        exit_code=0,
        cached_tokens=0,
        retractions=0,
    )


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(
        episode_id="e", group_id="g", group_size=1, index=0, instance_id="i", task_digest="", dataset="", repo="",
        strata={}, weight=1.0, seed=0, purpose="rl", sampling=SamplingParams(), attempt=1, worker="", engine_url="",
        outcome=Dropped(reason=""), end_reason=EndReason.SUBMITTED, turns=turns, patch="", timeline=(), usage=Usage(),
    )  # fmt: skip


def sequence(length: int, *, sampled: set[int] = frozenset({1}), advantage: float = 0.0) -> TokenSequence:  # type: ignore[assignment]
    return TokenSequence(
        ids=np.arange(1, length + 1),
        sampled=np.array([i in sampled for i in range(length)]),
        logprobs=np.array([-float(i) for i in range(length)], dtype=np.float32),
        advantage=advantage,
    )


def test_ids_are_the_concatenation_and_only_sampled_ids_carry_loss() -> None:
    (one,) = sequences(trajectory(turn([1, 2, 3], [4, 5]), turn([6], [7])), advantage=0.5)
    assert one.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert one.sampled.tolist() == [False, False, False, True, True, False, True]
    assert one.logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -1.5, 0.0, -0.5]
    assert one.advantage == 0.5


def test_each_segment_is_a_sequence_and_one_without_samples_is_none() -> None:
    got = sequences(trajectory(turn([1], [2]), turn([9], [8], segment=1), turn([3], [], segment=2)))
    assert [s.ids.tolist() for s in got] == [[1, 2], [9, 8]]
    assert sequences(trajectory()) == []


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, math.nan], [-math.inf, -1.0]])
def test_logprobs_that_do_not_fit_are_refused(logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match="episode e"):
        sequences(trajectory(turn([1], [2, 3], logprobs=logprobs)))


def test_micro_batch_shifts_labels_and_pads_on_the_right() -> None:
    (batch,) = micro_batches([sequence(4, sampled={2, 3}, advantage=2.0), sequence(3, sampled={1}, advantage=-1.0)],
                             max_tokens=100)  # fmt: skip
    assert batch.ids.tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch.labels.tolist() == [[2, 3, 0], [2, 3, 4]]
    assert batch.mask.tolist() == [[True, False, False], [False, True, True]]
    assert batch.old_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert batch.advantages.tolist() == [-1.0, 2.0, 2.0]
    assert batch.tokens == 3


def test_micro_batches_keep_every_loss_token_within_the_budget() -> None:
    chance = np.random.default_rng(0)
    rows = [sequence(int(n), sampled={1, int(n) - 1}) for n in chance.integers(2, 60, 40)]
    batches = micro_batches(rows, max_tokens=128)
    assert sum(len(b.ids) for b in batches) == 40
    assert all(b.ids.size <= 128 for b in batches)
    assert sum(b.tokens for b in batches) == sum(int(r.sampled[1:].sum()) for r in rows)
    padding = 1 - sum(len(r.ids) - 1 for r in rows) / sum(b.ids.size for b in batches)
    assert padding < 0.15


def test_a_sequence_longer_than_the_budget_stands_alone() -> None:
    assert [b.ids.shape for b in micro_batches([sequence(50), sequence(4)], max_tokens=10)] == [(1, 3), (1, 49)]


def test_loss_on_all_takes_every_id_but_the_first() -> None:
    (batch,) = micro_batches([sequence(5, sampled=set())], max_tokens=10, loss_on_all=True)
    assert batch.tokens == 4
    assert micro_batches([sequence(5, sampled={0}), sequence(1)], max_tokens=10) == []
