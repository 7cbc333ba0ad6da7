from __future__ import annotations

import json
import math

import pytest
from makers import row

from farm.types import (
    Boundary,
    Cursor,
    Dropped,
    Failed,
    Outcome,
    Trajectory,
)  # fmt: skip
from trainer.group import Batch, Batcher, BatchRules

LOST = Failed(boundary=Boundary.SANDBOX_LOST, kind="lost", message="")


class Feed:
    """Pushes rows at successive positions and keeps the batches."""

    def __init__(self, **rules: int | bool) -> None:
        self.batcher = Batcher(BatchRules(**{"groups_per_step": 1, "min_attempts": 2, "max_staleness": 2} | rules))  # type: ignore[arg-type]
        self.at = 0
        self.batches: list[Batch] = []

    def push(self, *rows: Trajectory) -> list[Batch]:
        new = []
        for r in rows:
            batch = self.batcher.push(Cursor(row=self.at), r)
            self.at += 1
            if batch is not None:
                new.append(batch)
        self.batches += new
        return new


def ids(batch: Batch) -> list[str]:
    return [s.episode_id for s in batch.samples]


def test_a_group_trains_as_soon_as_enough_attempts_are_graded_and_stragglers_follow() -> None:
    feed = Feed()
    assert feed.push(row("a", 0, 1.0)) == []
    (first,) = feed.push(row("a", 1, 0.0))
    assert ids(first) == ["a-0", "a-1"]
    assert [s.advantage for s in first.samples] == pytest.approx([1.0, -1.0])
    assert feed.push(row("a", 2, 0.0), row("a", 3, 0.0)) == []
    (second,) = feed.push(row("b", 0, 1.0), row("b", 1, 0.0))
    assert ids(second) == ["a-2", "a-3", "b-0", "b-1"]
    # The advantage of the stragglers is from all four attempts of their group.
    assert [s.advantage for s in second.samples][:2] == pytest.approx([-1 / math.sqrt(3)] * 2)
    assert [s.straggler for s in second.samples] == [True, True, False, False]
    assert (second.step, second.consumed_groups) == (1, 2)


def test_failed_attempts_enter_neither_mean_nor_std() -> None:
    feed = Feed(min_attempts=3)
    (batch,) = feed.push(row("a", 0, 1.0), row("a", 1, LOST), row("a", 2, 0.0), row("a", 3, 0.0))
    assert [s.advantage for s in batch.samples] == pytest.approx([math.sqrt(2), *[-1 / math.sqrt(2)] * 2])
    assert (batch.graded, batch.failed, batch.resolved, batch.rewards) == (3, 1, 1, (1.0, 0.0, 0.0))


def test_a_reward_that_is_not_finite_counts_as_a_failure() -> None:
    feed = Feed()
    (batch,) = feed.push(row("a", 0, math.nan), row("a", 1, math.inf), row("a", 2, 1.0), row("a", 3, 0.0))
    assert ids(batch) == ["a-2", "a-3"]
    assert batch.failed == 2


@pytest.mark.parametrize("others", [LOST, Dropped(reason="stale")])
def test_a_group_that_cannot_reach_min_attempts_is_closed_and_consumed(others: Outcome) -> None:
    feed = Feed()
    (batch,) = feed.push(row("a", 0, 1.0), *(row("a", i, others) for i in (1, 2, 3)))
    assert (batch.samples, batch.closed_groups, batch.zero_variance_groups) == ((), 1, 0)
    assert [(d.episode_id, d.reason) for d in batch.dropped] == [("a-0", "too_few_graded")]
    assert batch.consumed_groups == 1


def test_a_group_without_variance_gives_no_gradient_but_is_consumed() -> None:
    feed = Feed(min_attempts=4)
    (batch,) = feed.push(*(row("a", i, 1.0) for i in range(4)))
    assert (batch.samples, batch.zero_variance_groups, batch.closed_groups) == ((), 1, 0)
    assert feed.batcher.pending() == []


def test_a_straggler_that_brings_variance_takes_the_waiting_attempts_along() -> None:
    feed = Feed()
    (flat,) = feed.push(row("a", 0, 0.0), row("a", 1, 0.0))
    assert (flat.samples, flat.zero_variance_groups) == ((), 1)
    assert len(feed.batcher.pending()) == 2
    (batch,) = feed.push(row("a", 2, 1.0), row("b", 0, 0.0), row("b", 1, 0.0))
    assert ids(batch) == ["a-0", "a-1", "a-2"]


def test_one_graded_attempt_alone_says_nothing() -> None:
    feed = Feed(min_attempts=1)
    (batch,) = feed.push(row("a", 0, 1.0, size=1))
    assert (batch.samples, batch.zero_variance_groups) == ((), 1)


def test_stale_rows_are_dropped_with_a_reason_but_stay_in_the_mean() -> None:
    feed = Feed(max_staleness=0)
    feed.push(row("a", 0, 1.0), row("a", 1, 0.0))
    (batch,) = feed.push(row("b", 0, 1.0, step=0), row("b", 1, 0.0, step=1))
    assert ids(batch) == ["b-1"]
    assert batch.samples[0].advantage == pytest.approx(-1.0)
    assert [(d.episode_id, d.reason) for d in batch.dropped] == [("b-0", "stale")]
    assert batch.samples[0].staleness == 0


def test_sync_mode_waits_for_every_attempt() -> None:
    feed = Feed(wait_for_all=True)
    assert feed.push(row("a", 0, 1.0), row("a", 1, 0.0), row("a", 2, 0.0)) == []
    (batch,) = feed.push(row("a", 3, LOST))
    assert ids(batch) == ["a-0", "a-1", "a-2"]


def test_a_batch_takes_groups_per_step_groups_and_counts_what_landed_since() -> None:
    feed = Feed(groups_per_step=2)
    assert feed.push(row("a", 0, 1.0), row("b", 0, 0.0), row("a", 1, 0.0), row("c", 0, 1.0)) == []
    (batch,) = feed.push(row("c", 1, 0.0))
    assert ids(batch) == ["a-0", "a-1", "c-0", "c-1"]
    assert (batch.groups, batch.graded) == (2, 5)


def test_rows_of_an_evaluation_change_nothing() -> None:
    feed = Feed()
    before = json.dumps(feed.batcher.state())
    assert feed.push(row("a", 0, 1.0, purpose="eval"), row("a", 1, 0.0, purpose="eval")) == []
    assert json.dumps(feed.batcher.state()) == before


@pytest.mark.parametrize("rules", [{"groups_per_step": 0}, {"min_attempts": 0}, {"max_staleness": -1}])
def test_impossible_rules_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rules"):
        Feed(**rules)
