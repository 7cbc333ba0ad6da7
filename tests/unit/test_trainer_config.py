from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farm.errors import UsageError
from trainer.config import TrainerConfig, batch_rules, load_config, push_time
from trainer.group import BatchRules

ROLLOUT = {"mode": "async", "groups_per_step": 16, "min_attempts": 6, "max_staleness": 2, "purpose": "rl"}


def test_file_then_sets(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("[trainer]\nlr = 1e-3\nseed = 5\n")
    config = load_config(path, sets=["lr=3e-4"])
    assert (config.lr, config.seed) == (3e-4, 5)
    path.write_text("lr = 1e-3\n")
    assert load_config(path).lr == 1e-3


def test_a_key_of_a_table_and_a_shipped_profile() -> None:
    config = load_config(sets=["parallel.ranks=4", "parallel.tensor=2"])
    assert (config.parallel.layout.data, config.parallel.layout.tensor) == (2, 2)
    profile = load_config(Path("qwen3-30b-a3b"), sets=["parallel.ranks=16"])
    assert (profile.parallel.layout.expert_data, profile.parallel.precision) == (2, "bfloat16")


def test_warm_up_is_linear_then_constant() -> None:
    config = TrainerConfig(lr=0.4, warmup_steps=3)
    assert [config.learning_rate(s) for s in (0, 1, 2, 3, 99)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert TrainerConfig(lr=0.4, warmup_steps=0).learning_rate(0) == 0.4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learn_rate=1", r"learn_rate: unknown key; .*allowed: checkpoint_every"),
        ("clip_hi=1", "did you mean 'clip_high'"),
        ("lr=-1", "lr: given -1, but"),
        ("lr", "must be key=value"),
        ("lr=fast", "not a TOML value"),
        ("checkpoint_every=0", "checkpoint_every: given 0"),
        ("parallel.tensor=0", "parallel.tensor: given 0"),
        ("parallel.tensr=2", r"parallel.tensr: unknown key; did you mean 'tensor'\? allowed: distributed_optimizer"),
        ("parallel.tensor=2", r"parallel.tensor is 2, which does not divide the ranks of one pipeline stage \(1\)"),
        ("parallel=3", "parallel: given 3"),
        ("push.backend='mpi'", "push.backend: given 'mpi'"),
        ("push.adress=''", r"push.adress: unknown key; did you mean 'address'\? allowed: address, backend"),
    ],
)
def test_wrong_settings_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_config(sets=[text])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [("lr = ", "not valid TOML"), ("trainer = 3", "must be a table")])
def test_wrong_files_are_one_clear_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load_config(path)
    with pytest.raises(UsageError, match="no such configuration file"):
        load_config(tmp_path / "none.toml")


def test_rules_come_from_the_run() -> None:
    got = batch_rules({"rollout": ROLLOUT}, where="x")
    assert got == BatchRules(groups_per_step=16, min_attempts=6, max_staleness=2)
    got = batch_rules({"rollout": ROLLOUT | {"mode": "sync"}}, where="x")
    assert got == BatchRules(groups_per_step=16, min_attempts=6, max_staleness=0, wait_for_all=True)


def test_a_push_ends_before_the_farm_stops_waiting_for_it() -> None:
    assert push_time({"engine": {"weights": "push", "push_wait_s": 50.0}}) == 40.0
    assert push_time({"engine": {"weights": "disk", "push_wait_s": 50.0}}) is None
    assert push_time({}) is None, "a run of before there were pushes"


@pytest.mark.parametrize(
    "config",
    [{}, {"rollout": {}}, {"rollout": ROLLOUT | {"groups_per_step": 0}}, {"rollout": ROLLOUT | {"purpose": "eval"}}],
)
def test_a_run_that_nobody_can_train_on_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"run/config\.json"):
        batch_rules(config, where="run/config.json")
