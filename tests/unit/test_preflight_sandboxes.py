"""What is said of sandboxes that an account limits, before a run starts."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest

from farm import preflight
from farm.config import SANDBOX_GRACE_S, FarmConfig, load_config
from farm.episode import run_episode


def configured(*sets: str) -> FarmConfig:
    return load_config(sets=["sandbox.provider=e2b", *sets])


@pytest.mark.parametrize(
    ("sets", "advice"),
    [
        (("cluster.workers=4", "cluster.slots=16"), "= 64 episodes at once, and e2b.concurrent = 20 sandboxes"),
        (("cluster.workers=4", "cluster.slots=16"), "--set cluster.slots=5"),
        (("cluster.workers=1:40", "cluster.slots=1"), "--set cluster.slots=1"),
        (("cluster.workers=2", "cluster.slots=10"), ""),
        (("cluster.workers=4", "cluster.slots=16", "e2b.concurrent=100"), ""),
        (("cluster.workers=4", "cluster.slots=16", "sandbox.provider=docker"), ""),
    ],
)
def test_episodes_that_only_wait_are_told(sets: tuple[str, ...], advice: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="farm"):
        preflight._warn_of_waiting(configured(*sets))
    assert (advice in caplog.text) if advice else not caplog.text


def test_the_account_is_asked_for_as_long_a_life_as_episodes_need(tmp_path: Path) -> None:
    config = configured("limits.episode_s=3000", "limits.lease_s=9000")
    grace_s = inspect.signature(run_episode).parameters["grace_s"].default
    assert grace_s == SANDBOX_GRACE_S
    assert config.sandbox_options(tmp_path)["life_s"] == 3000 + grace_s
