"""The program that runs commands inside an E2B sandbox, run here: it touches only what it starts itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farm.sandbox import e2b_runner
from farm.sandbox.e2b_runner import Ended


def call(*words: str) -> str:
    argv = ["/usr/bin/perl", "-e", e2b_runner.RUNNER, "--", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended | None]:
    """Start (or ask for) a job; None when it is still running after ``wait_ms``."""

    def start(number: str, command: str, *, ms: int = 10_000, cap: int = 1000, wait_ms: int = 9_000) -> Ended | None:
        packed = e2b_runner.job(command.encode(), str(tmp_path), {"A": "x y"})
        argument = e2b_runner.inline(packed)
        assert argument is not None
        return e2b_runner.ended(call("run", str(tmp_path / "jobs"), number, str(ms), str(cap), str(wait_ms), argument))

    return start


def test_a_job_and_its_end(run: Callable[..., Ended | None]) -> None:
    end = run("1", "echo 1; echo 2 >&2; printf '\\xff'; echo \"$A\" $PWD | cut -c-5; exit 7")
    assert end is not None
    assert (end.exit_code, end.output, end.truncated, end.timed_out) == (7, b"1\n2\n\xffx y /\n", False, False)
    assert run("2", "cd /none || exit 9").exit_code == 9  # type: ignore[union-attr]
    assert run("3", "kill -9 $$").exit_code == 137  # type: ignore[union-attr]


def test_starting_it_again_is_asking_for_it(run: Callable[..., Ended | None], tmp_path: Path) -> None:
    assert run("1", "echo x >> log; sleep 0.5; cat log", wait_ms=0) is None
    ends = [run("1", "echo x >> log; sleep 0.5; cat log") for _ in range(2)]
    assert [end.output for end in ends if end] == [b"x\n", b"x\n"]
    assert e2b_runner.ended(call("poll", str(tmp_path / "jobs"), "1", "0")) == ends[0]


def test_output_is_capped(run: Callable[..., Ended | None]) -> None:
    end = run("1", "head -c 300000 /dev/zero | tr '\\0' x", cap=1000)
    assert end is not None
    assert (end.output, end.truncated, end.exit_code) == (b"x" * 1000, True, 0)
    long = run("2", "head -c 100000 /dev/zero | tr '\\0' x", cap=1 << 20)
    assert long is not None
    assert long.output is None  # to be fetched


def test_a_time_out_kills_the_whole_tree(run: Callable[..., Ended | None], tmp_path: Path) -> None:
    loop = "while :; do echo x >> alive; sleep 0.02; done"
    end = run(
        "1", f"trap '' TERM; setsid bash -c '{loop}' & (setsid nohup bash -c '{loop}' &) ; echo out; sleep 60", ms=500
    )
    assert end is not None
    assert (end.timed_out, end.output) == (True, b"out\n")
    size = (tmp_path / "alive").stat().st_size
    assert size > 0
    time.sleep(0.2)
    assert (tmp_path / "alive").stat().st_size == size


def test_a_job_is_stopped(run: Callable[..., Ended | None], tmp_path: Path) -> None:
    assert run("1", "echo early; sleep 60", wait_ms=200) is None
    end = e2b_runner.ended(call("stop", str(tmp_path / "jobs"), "1", "0"))
    assert end is not None
    assert (end.timed_out, end.output) == (True, b"early\n")


def test_a_job_whose_supervisor_is_killed(run: Callable[..., Ended | None]) -> None:
    end = run("1", "kill -9 $PPID; sleep 0.1")
    assert end is not None
    assert end.exit_code == 137


def test_what_a_job_leaves_running_goes_on(run: Callable[..., Ended | None], tmp_path: Path) -> None:
    end = run("1", "(sleep 0.5; echo late > file) > /dev/null 2>&1 & echo now")
    assert end is not None
    assert end.output == b"now\n"
    time.sleep(0.8)
    assert (tmp_path / "file").read_text() == "late\n"


def test_files(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(range(256)))
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    assert call("get", str(tmp_path / "none"), "10") == "MISSING\n"
    assert call("get", str(tmp_path), "10") == "MISSING\n"
    assert call("get", "/dev/zero", "10") == "MISSING\n"
    assert call("get", str(tmp_path / "small"), "255") == "BIG\n"
    assert call("get", str(tmp_path / "big"), "100000") == "FETCH\n"
    word, _, rest = call("get", str(tmp_path / "small"), "256").partition("\n")
    assert (word, e2b_runner.uudecoded(rest)) == ("DATA", bytes(range(256)))


def test_nonsense_is_told() -> None:
    for answer in ("", "END 1 2", "perl: command not found"):
        with pytest.raises(ValueError):
            e2b_runner.ended(answer)
