"""The place of a rank, and ranks that end together. The ranks here are commands that end before they import torch."""

from __future__ import annotations

import threading

import pytest

from farm.errors import FarmError, UsageError
from trainer.ranks import RENDEZVOUS, Seat, run_ranks, seat


def test_the_place_comes_from_the_environment() -> None:
    assert seat({}) is None
    assert seat({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Seat(rank=3, ranks=8, local_rank=1)
    assert seat({"RANK": "0", "WORLD_SIZE": "1"}) == Seat(rank=0, ranks=1, local_rank=0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK and WORLD_SIZE must both be whole numbers"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "must both be whole numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 of WORLD_SIZE 2; allowed: 0 to 1"),
    ],
)
def test_a_wrong_place_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        seat(environment)


def test_rank_zero_says_how_it_ended(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(["--help"], 2, stop=threading.Event()) == 0
    assert "Usage" in capfd.readouterr().out


def test_a_rank_that_ends_alone_ends_all(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for a run that is not there; the other is told to do something impossible."""
    monkeypatch.setenv(RENDEZVOUS, "unused")
    command = ["train", "--run", f"{tmp_path}/none", "--wait", "60", "--set", "parallel.tensor=0"]
    assert run_ranks(command, 2, stop=threading.Event()) == 2  # both refuse it, and rank 0 speaks


def test_a_killed_rank_is_named() -> None:
    from trainer import ranks

    class Ended:
        def __init__(self, code: int | None) -> None:
            self.code = code

        def poll(self) -> int | None:
            return self.code

    with pytest.raises(FarmError, match=r"rank 1 of 3 was killed by signal 9 \(SIGKILL\); all ranks were ended"):
        ranks._watch([Ended(1), Ended(-9), Ended(None)], threading.Event())  # type: ignore[list-item]
    with pytest.raises(FarmError, match="rank 2 of 3 ended with exit code 1") as caught:
        ranks._watch([Ended(None), Ended(None), Ended(1)], threading.Event())  # type: ignore[list-item]
    assert caught.value.kind == "ranks"
