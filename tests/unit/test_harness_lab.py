"""harness/lab.py with programs that stand in for ``farm`` and ``trainer``."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from harness.lab import Lab, StageError
from harness.profiles import profile

TRAINER = """case "$1" in
    train) {train} ;;
    sft) mkdir -p "${{@: -3:1}}" ;;
esac
"""


def lab(folder: Path, *, farm: str, train: str) -> Lab:
    programs = folder / "bin"
    programs.mkdir()
    for name, script in {"farm": farm, "trainer": TRAINER.format(train=train)}.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    return Lab(
        folder=folder / "stages",
        profile=profile("quick"),
        console=Console(file=io.StringIO()),
        programs=programs,
    )


def test_a_farm_that_dies_ends_its_stage_at_once_and_is_quoted(tmp_path: Path) -> None:
    bench = lab(tmp_path, farm="echo engine-0 did not come up; exit 3", train="exec sleep 600")
    with pytest.raises(StageError, match=r"the farm beside `trainer train .*` ended with 3:\nengine-0 did not come up"):
        bench.rl()
    assert not (bench.folder / "rl" / "done.json").exists()


def test_a_trainer_that_fails_is_quoted_and_its_farm_ended(tmp_path: Path) -> None:
    bench = lab(tmp_path, farm="trap 'kill $!; exit 0' INT; sleep 600 & wait", train="echo no policy >&2; exit 2")
    with pytest.raises(StageError, match=r"`trainer train .*` ended with 2:\nno policy"):
        bench.rl()


def test_what_a_killed_reproduction_started_dies_with_it(tmp_path: Path) -> None:
    bench = lab(
        tmp_path,
        farm=f"echo $$ > {tmp_path}/farm; exec sleep 600",
        train=f"echo $$ > {tmp_path}/trainer; exec sleep 600",
    )
    child = os.fork()
    if child == 0:
        try:
            bench.rl()
        finally:
            os._exit(1)
    pids = [int(_written(tmp_path / name)) for name in ("farm", "trainer")]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    give_up_at = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _written(file: Path) -> str:
    give_up_at = time.monotonic() + 20
    while not (file.exists() and file.read_text().endswith("\n")) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return file.read_text()


def test_a_damaged_record_of_a_stage_costs_that_stage_only(tmp_path: Path) -> None:
    bench = lab(tmp_path, farm="trap 'kill $!; exit 0' INT; sleep 600 & wait", train="exit 0")
    bench.rl()
    (bench.folder / "rl" / "done.json").write_text('{"wall_s": 1')
    (bench.folder / "old").mkdir()
    (bench.folder / "old" / "done.json").write_text("[]")
    bench.rl()
    assert json.loads((bench.folder / "rl" / "done.json").read_text())["wall_s"] > 0


def test_a_stage_whose_farm_outlives_its_trainer_is_done(tmp_path: Path) -> None:
    bench = lab(tmp_path, farm="trap 'kill $!; exit 0' INT; sleep 600 & wait", train="exit 0")
    bench.rl()
    assert (bench.folder / "rl" / "done.json").exists()


STEPPING = """
        mkdir -p "$3/trainer"; f="$3/trainer/metrics.jsonl"; touch "$f"
        for n in $(seq $(($(wc -l < "$f") + 1)) 10); do sleep 0.4; echo "{\\"step\\": $n}" >> "$f"; done ;;
    replay) echo '{"steps": []}' > "$4"; exit 1"""


def test_a_trainer_is_killed_and_started_again_and_its_run_replayed(tmp_path: Path) -> None:
    bench = lab(tmp_path, farm="trap 'kill $!; exit 0' INT; sleep 600 & wait", train=STEPPING)
    folder = bench.restarted(kills=3, rate=0.03, seed=1)
    kills = json.loads((folder / "kills.json").read_text())["kills"]
    after = [kill["after_step"] for kill in kills]
    assert after == sorted(after)
    wanted = [bench.profile.restart_steps * n // 4 for n in (1, 2, 3)]
    assert all(reached >= step for reached, step in zip(after, wanted, strict=True))
    assert (folder / "replay.json").exists()


def test_a_trainer_that_ends_before_it_can_be_killed_breaks_the_stage(tmp_path: Path) -> None:
    bench = lab(tmp_path, farm="trap 'kill $!; exit 0' INT; sleep 600 & wait", train="echo no policy >&2; exit 2")
    with pytest.raises(StageError, match=r"the trainer came to step 0 only:\nno policy"):
        bench.restarted(kills=3, rate=0.03, seed=1)
