"""Transcripts and demonstrations: the shares they promise, and rows that the trainer can train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.render.micro import MicroRenderer
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, EndReason, Graded, Trajectory
from trainer.base_policy import make_base_policy, write_start
from trainer.batch import sequences
from trainer.demonstrations import DEMONSTRATION, PRETRAINING, transcripts, write_log

COUNT = 60


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> MicroRenderer:
    return write_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def demonstrations(renderer: MicroRenderer) -> list[Trajectory]:
    return list(transcripts(renderer, "sft", count=COUNT, habit=DEMONSTRATION, seed=1))


def solved(rows: list[Trajectory]) -> float:
    return sum(isinstance(row.outcome, Graded) and row.outcome.reward for row in rows) / len(rows)


def test_the_same_seed_gives_the_same_rows(renderer: MicroRenderer, demonstrations: list[Trajectory]) -> None:
    assert list(transcripts(renderer, "sft", count=20, habit=DEMONSTRATION, seed=1)) == demonstrations[:20]
    assert list(transcripts(renderer, "sft", count=20, habit=DEMONSTRATION, seed=2)) != demonstrations[:20]


def test_demonstrations_solve_most_and_pretraining_few(
    renderer: MicroRenderer, demonstrations: list[Trajectory]
) -> None:
    assert solved(demonstrations) > 0.8
    pretraining = list(transcripts(renderer, "sft", count=COUNT, habit=PRETRAINING, seed=1))
    assert 0.1 < solved(pretraining) < 0.7 < solved(demonstrations)
    assert all(row.end_reason == EndReason.SUBMITTED and row.turns[-1].action == "submit" for row in pretraining)


def test_ids_are_what_the_renderer_appends_and_fit_the_context(
    renderer: MicroRenderer, demonstrations: list[Trajectory]
) -> None:
    for row in demonstrations:
        for turn, following in zip(row.turns, row.turns[1:], strict=False):
            assert renderer.parse(turn.output_ids).command == turn.action
            assert list(following.context_ids) == renderer.observe_text(turn.output_ids, turn.observation)
        assert row.total_tokens < 400


def test_they_travel_through_the_log_to_the_trainer(tmp_path: Path, demonstrations: list[Trajectory]) -> None:
    assert write_log(demonstrations, tmp_path / "log") == COUNT
    read = [row for _, row in DirectoryLog(tmp_path / "log").read(Cursor())]
    assert sorted(read, key=lambda row: row.episode_id) == sorted(demonstrations, key=lambda row: row.episode_id)
    (sequence,) = sequences(read[0])
    assert len(sequence.ids) == read[0].total_tokens
    assert int(sequence.sampled.sum()) == read[0].output_tokens


def test_a_base_policy_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        make_base_policy(tmp_path)
