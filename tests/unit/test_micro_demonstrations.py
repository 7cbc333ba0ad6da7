"""Transcripts and demonstrations: the shares they promise, and rows that the trainer can train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from farm.errors import UsageError
from farm.render.micro import MicroRenderer
from farm.suites.micro_edits import candidate_edits
from farm.suites.micro_sim import READ, SUBMIT, UNDO
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded, Trajectory
from trainer.base_policy import make_base_policy, write_initial_weights, write_start
from trainer.batch import sequences
from trainer.demonstrations import DEMONSTRATION, PRETRAINING, TOUR_EDITS, transcripts, write_log

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
    pretraining = list(transcripts(renderer, "sft", count=COUNT, habit=PRETRAINING, seed=1))
    worked = [row for row in pretraining if row.turns[-1].action == SUBMIT]
    assert solved(worked) < 0.4 < 0.55 < solved(demonstrations)
    assert all(row.turns[-1].action == SUBMIT for row in demonstrations)


def test_half_of_pretraining_tries_edits_of_one_listing_and_undoes_each(renderer: MicroRenderer) -> None:
    rows = list(transcripts(renderer, "sft", count=COUNT, habit=PRETRAINING, seed=1))
    tours = [row for row in rows if row.turns[-1].action == UNDO]
    assert 0.3 < len(tours) / COUNT < 0.7
    for row in tours:
        read, *rest = [turn.action for turn in row.turns]
        assert read == READ
        assert rest[1::2] == [UNDO] * TOUR_EDITS
        assert all(edit in {e.command for e in candidate_edits(row.turns[0].observation)} for edit in rest[::2])


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


def test_initial_weights_follow_from_the_seed_and_hand_on_what_they_read(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        write_start(tmp_path / name)
        write_initial_weights(tmp_path / name, seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(np.array_equal(a[key], b[key]) for key in a)
    assert not np.array_equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    values, output = (a[f"model.layers.3.self_attn.{n}_proj.weight"] for n in "vo")
    assert np.array_equal(output[:, :32], values[:32].T)  # heads 0 and 1 read the first key-value head
    assert np.array_equal(output[:, 96:], values[32:].T)
    assert 0.075 < a["model.layers.0.mlp.up_proj.weight"].std() < 0.085
