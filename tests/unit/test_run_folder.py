from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.policy_log import PolicyLog
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog

CONFIG = {"seed": 1, "agent": {"name": "bash", "limits": [1, 2]}}


def test_a_run_is_laid_out_and_explains_itself(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "deep" / "run", CONFIG)
    assert RunFolder.open(run.path).config() == CONFIG
    assert "farm replay" in (run.path / "README.md").read_text()
    for folder in (run.trajectories, run.policies, run.logs, run.trainer, run.checkpoints):
        assert folder.is_dir()
    assert run.metrics.parent == run.trainer
    DirectoryLog(run.trajectories)
    PolicyLog(run.policies)


def test_the_same_configuration_goes_on_and_keeps_what_is_there(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    (run.path / "README.md").write_text("my notes")
    (run.logs / "farm.log").write_text("hello")
    again = RunFolder.create(tmp_path / "run", {"agent": {"limits": (1, 2), "name": "bash"}, "seed": 1})
    assert again.path == run.path
    assert (run.path / "README.md").read_text() == "my notes"
    assert (run.logs / "farm.log").read_text() == "hello"


def test_another_configuration_is_refused_by_the_names_of_its_keys(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", CONFIG)
    with pytest.raises(UsageError) as caught:
        RunFolder.create(tmp_path / "run", {"seed": 2, "agent": {"name": "bash", "turns": 3}})
    message = str(caught.value)
    assert "agent.limits: [1, 2] -> not set; agent.turns: not set -> 3; seed: 1 -> 2" in message
    assert "\n" not in message
    assert RunFolder.open(tmp_path / "run").config() == CONFIG


def test_many_differences_are_not_all_listed(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {f"k{i}": "x" * 100 for i in range(9)})
    with pytest.raises(UsageError, match="and 4 more"):
        RunFolder.create(tmp_path / "run", {})


def test_a_run_whose_making_was_cut_short_is_made_whole(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    (run.path / "config.json").unlink()
    run.logs.rmdir()
    with pytest.raises(UsageError, match="start the run once more"):
        RunFolder.open(run.path)
    RunFolder.create(run.path, CONFIG)
    assert RunFolder.open(run.path).config() == CONFIG
    assert run.logs.is_dir()


def test_foreign_and_other_schemas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a rollout-farm run"):
        RunFolder.open(tmp_path)
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'thesis\.tex'"):
        RunFolder.create(tmp_path, CONFIG)
    run = RunFolder.create(tmp_path / "run", CONFIG)
    (run.path / "run.json").write_text(json.dumps({"format": "rollout-farm run", "schema_version": 7}))
    for use in (lambda: RunFolder.open(run.path), lambda: RunFolder.create(run.path, CONFIG)):
        with pytest.raises(UsageError, match="has schema version 7"):
            use()
