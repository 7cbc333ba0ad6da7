from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from farm.errors import UsageError
from farm.log_bench import synthetic
from farm.replay import render
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import Boundary, Dropped, Failed, FailedAttempt, Outcome, Trajectory


def episode(number: int, episode_id: str) -> Trajectory:
    return replace(synthetic(number, turns=2, context=8, output=4), episode_id=episode_id)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run", {})
    with DirectoryLog(folder.trajectories) as log:
        log.append_many([episode(1, "aa11bb22cc33dd44"), episode(2, "aa22")])
        log.seal()
        log.append(episode(3, "bb33"))
    return folder.path


def shown(run: Path, prefix: str) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render(run, prefix))
    return console.export_text()


def add(run: Path, trajectory: Trajectory) -> None:
    DirectoryLog(RunFolder.open(run).trajectories).append(trajectory)


def test_a_sealed_episode_is_shown_whole(run: Path) -> None:
    text = shown(run, "aa1")
    for part in (
        "episode aa11bb22cc33dd44",
        "synthetic/synthetic",
        "kind=arith, size=2",
        "attempt 2 of 8",
        "8 sampled of 24",
        "turn 2",
        "log-prob mean",
        "step-000000 [0, 4)",
        "graded: resolved",
        "PASSED",
        "sandbox_start",
        "submitted after 2 turns",
    ):
        assert part in text, part


def test_an_open_episode_is_shown_as_well(run: Path) -> None:
    assert "episode bb33" in shown(run, "bb")


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Failed(boundary=Boundary.ENGINE, kind="timeout", message="no answer"), "engine/timeout: no answer"),
        (Dropped(reason="the task was withdrawn"), "the task was withdrawn"),
    ],
)
def test_what_has_no_reward_says_so(run: Path, outcome: Outcome, expected: str) -> None:
    tried = FailedAttempt(
        attempt=1,
        boundary=Boundary.SANDBOX_LOST,
        kind="lost",
        message="gone",
        worker="w1",
        started_at_s=1.0,
        ended_at_s=3.0,
    )
    add(run, replace(episode(5, "cc"), outcome=outcome, turns=(), timeline=(), prior=(tried,)))
    text = shown(run, "cc")
    assert expected in text
    assert "no reward" in text
    assert "nothing was sampled" in text
    assert "sandbox_lost/lost: gone" in text


def test_what_a_sandbox_wrote_can_not_steer_the_terminal_nor_the_markup(run: Path) -> None:
    turn = replace(episode(6, "dd").turns[0], action="echo [bold]x[/bold]", observation="\x1b[2J\x07gone", exit_code=3)
    add(run, replace(episode(6, "dd"), turns=(turn,)))
    text = shown(run, "dd")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "echo [bold]x[/bold]" in text
    assert "exit code 3" in text


def test_a_long_observation_is_clipped_in_the_middle(run: Path) -> None:
    turn = replace(episode(7, "ee").turns[0], observation="\n".join(f"line {n}" for n in range(100)))
    add(run, replace(episode(7, "ee"), turns=(turn,)))
    text = shown(run, "ee")
    assert "line 0" in text
    assert "line 99" in text
    assert "line 50" not in text
    assert "60 lines" in text


def test_prefixes_that_name_no_episode_or_many(run: Path) -> None:
    with pytest.raises(UsageError, match=r"2 episodes start with 'aa' \(aa11bb22cc33, aa22\)"):
        render(run, "aa")
    with pytest.raises(UsageError, match=r"none of the 3 landed episodes starts with 'aa11bb23'; .*aa11bb22cc33"):
        render(run, "aa11bb23")
    empty = RunFolder.create(run.parent / "empty", {})
    DirectoryLog(empty.trajectories)
    with pytest.raises(UsageError, match="no episode has landed yet"):
        render(empty.path, "a")
    with pytest.raises(UsageError, match="is not a rollout-farm run"):
        render(run.parent, "a")
