"""The batcher over any interleaving of landings."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from makers import graded, row

from farm.types import (
    Boundary,
    Cursor,
    Dropped,
    Failed,
    Graded,
    Outcome,
    Trajectory,
)  # fmt: skip
from trainer.group import Batch, Batcher, BatchRules

outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, math.nan]).map(graded),
    st.just(Failed(boundary=Boundary.ENGINE, kind="k", message="")),
    st.just(Dropped(reason="stale")),
)


@st.composite
def logs(draw: st.DrawFn) -> list[Trajectory]:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    rows = [
        row(str(group), index, draw(outcomes), size=size, step=draw(st.integers(0, 4)))
        for group, size in enumerate(sizes)
        for index in range(size)
    ]
    rows += [row("99", i, draw(outcomes), size=3, purpose="eval") for i in range(draw(st.integers(0, 3)))]
    return draw(st.permutations(rows))


rules = st.builds(
    BatchRules,
    groups_per_step=st.integers(1, 3),
    min_attempts=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    wait_for_all=st.booleans(),
)


def feed(batcher: Batcher, log: list[Trajectory], start: int = 0) -> list[Batch]:
    batches = (batcher.push(Cursor(row=i), log[i]) for i in range(start, len(log)))
    return [batch for batch in batches if batch is not None]


@given(logs(), rules)
def test_rows_are_used_once_and_advantages_are_from_graded_attempts_only(
    log: list[Trajectory], how: BatchRules
) -> None:
    batcher = Batcher(how)
    used: set[str] = set()
    dropped: set[str] = set()
    seen: dict[str, list[float]] = {}
    groups = 0
    for i, trajectory in enumerate(log):
        outcome = trajectory.outcome
        good = trajectory.purpose == "rl" and isinstance(outcome, Graded) and math.isfinite(outcome.reward)
        if good:
            assert isinstance(outcome, Graded)
            seen.setdefault(trajectory.group_id, []).append(outcome.reward)
        batch = batcher.push(Cursor(row=i), trajectory)
        if batch is None:
            continue
        groups += how.groups_per_step
        assert batch.groups == how.groups_per_step
        assert batch.consumed_groups == groups
        assert list(batch.samples) == sorted(batch.samples, key=lambda s: s.at)
        for sample in batch.samples:
            source = log[sample.at.row]
            assert source.episode_id == sample.episode_id
            assert source.purpose == "rl"
            assert sample.episode_id not in used | dropped
            used.add(sample.episode_id)
            assert isinstance(source.outcome, Graded)
            assert source.oldest_step is not None
            assert sample.staleness == batch.step - source.oldest_step <= how.max_staleness
            rewards = seen[source.group_id]
            assert len(rewards) >= how.min_attempts
            mean = math.fsum(rewards) / len(rewards)
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
            assert math.isclose(sample.advantage, (source.outcome.reward - mean) / std, rel_tol=1e-9, abs_tol=1e-9)
        for row_ in batch.dropped:
            assert row_.episode_id not in used | dropped
            dropped.add(row_.episode_id)


@given(logs(), rules)
def test_every_finished_group_is_consumed_so_the_farm_is_never_held_up(log: list[Trajectory], how: BatchRules) -> None:
    batches = feed(Batcher(how), log)
    finished = {t.group_id for t in log if t.purpose == "rl"}
    assert sum(b.groups for b in batches) == len(finished) // how.groups_per_step * how.groups_per_step
    assert [b.step for b in batches] == list(range(len(batches)))


@settings(max_examples=60)
@given(logs(), rules, st.integers(0, 40))
def test_stopping_and_resuming_anywhere_changes_nothing(log: list[Trajectory], how: BatchRules, cut: int) -> None:
    cut = min(cut, len(log))
    whole = feed(Batcher(how), log)
    first = Batcher(how)
    before = feed(first, log[:cut])
    state = json.loads(json.dumps(first.state()))
    second = Batcher.restore(how, state)
    assert second.pending() == first.pending()
    assert before + feed(second, log, cut) == whole
    assert all(log[at.row].purpose == "rl" for at in first.pending())
