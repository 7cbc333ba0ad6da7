"""A real farm (Dask, embedded engine, sandboxes) with its parts killed -9 in turn: no episode is lost or doubled,
and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farm.engine.bench import BenchShape, write_random_model
from farm.render.micro_tokenizer import save_tokenizer, train_tokenizer
from farm.suites import micro
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded, InlineFiles, Trajectory

TASKS, ATTEMPTS = 16, 4
WAIT_S = 150.0  # for each step; they take seconds on an idle machine

pytestmark = pytest.mark.timeout(600)


def until(what: str, condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"waited in vain for: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that knows nothing, with a tokenizer of the suite's words."""
    folder = tmp_path_factory.mktemp("policy")
    tasks = micro.load("benchmark")[:20]
    texts = [
        "\n".join((task.problem_statement, *task.workspace.files.values()))
        for task in tasks
        if isinstance(task.workspace, InlineFiles)
    ]
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, folder)
    write_random_model(folder, BenchShape(vocab=tokenizer.get_vocab_size(), layers=1))
    return folder


class Driver:
    """``farm rollout`` as a process of its own, in a session of its own."""

    def __init__(self, run: Path, *arguments: str) -> None:
        self.run = run
        command = [
            sys.executable, "-m", "farm.cli", "rollout", "--tasks", "micro:benchmark", "--limit", str(TASKS),
            "--attempts", str(ATTEMPTS), "--run", str(run), "--set", "cluster.slots=4", *arguments,
        ]  # fmt: skip
        self.output = run.parent / "output.txt"
        with self.output.open("ab") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def status(self) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads((self.run / "farm.json").read_text())
        except (OSError, ValueError):
            return {}
        return value if value.get("process", {}).get("pid") == self.process.pid else {}

    def landed(self) -> int:
        episodes = self.status().get("episodes", {})
        return int(episodes.get("landed", 0) + episodes.get("landed_before", 0))

    def until_landed(self, count: int) -> None:
        def enough() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return self.landed() >= count

        until(f"{count} landed episodes", enough)

    def worker(self) -> int:
        """The process id of one Dask worker."""
        return next(p.pid for p in self.family() if "spawn_main" in " ".join(p.cmdline()))

    def finish(self) -> str:
        assert self.process.wait(timeout=WAIT_S) == 0, self.output.read_text()
        return self.output.read_text()

    def kill(self) -> None:
        """kill -9, and everything it had started must go by itself."""
        family = self.family()
        self.process.kill()
        self.process.wait()
        until("the end of all its processes", lambda: not any(_runs(process) for process in family))


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        if driver.process.poll() is None:
            driver.kill()


def rows(run: Path) -> list[Trajectory]:
    return [row for _, row in DirectoryLog(run / "trajectories", create=False).read(Cursor())]


def complete(run: Path) -> list[Trajectory]:
    found = rows(run)
    assert len({row.episode_id for row in found}) == len(found) == TASKS * ATTEMPTS
    assert set(Counter(row.group_id for row in found).values()) == {ATTEMPTS}
    assert not list((run / "trajectories" / "open").glob("*.arrow"))
    return found


def test_worker_engine_and_driver_killed_in_turn(tmp_path: Path, policy: Path, drivers: list[Driver]) -> None:
    run = tmp_path / "run"
    driver = Driver(run, "--policy", str(policy))
    drivers.append(driver)

    driver.until_landed(4)
    os.kill(driver.worker(), signal.SIGKILL)
    driver.until_landed(driver.landed() + 6)
    engine = driver.status()["engines"][0]["process"]["pid"]
    os.kill(engine, signal.SIGKILL)
    driver.until_landed(driver.landed() + 6)
    driver.kill()
    before = DirectoryLog(run / "trajectories", create=False).landed()
    assert 16 <= len(before) < TASKS * ATTEMPTS

    driver = Driver(run, "--policy", str(policy))
    drivers.append(driver)
    assert "pass@1" in driver.finish()
    found = complete(run)
    assert before <= {row.episode_id for row in found}
    assert all(isinstance(row.outcome, Graded) for row in found), "a kill became more than a retry"
    failures = [failure for row in found for failure in row.prior]
    assert any(failure.boundary == "engine" for failure in failures)
    assert any(failure.kind == "worker_lost" for failure in failures)
    assert all(row.oldest_step == 0 for row in found)
    steps = [json.loads(text) for text in (run / "logs" / "engines.jsonl").read_text().splitlines()]
    assert sum(step["kind"] == "up" for step in steps) >= 3, "each engine was verified before it served"


def test_drain_by_signal_and_by_farm_down(tmp_path: Path, drivers: list[Driver]) -> None:
    run = tmp_path / "run"
    driver = Driver(run, "--agent", "null")
    drivers.append(driver)
    driver.until_landed(1)
    family = driver.family()
    os.killpg(driver.process.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
    assert "goes on" in driver.finish()
    until("the end of all its processes", lambda: not any(_runs(process) for process in family))
    assert len(rows(run)) < TASKS * ATTEMPTS

    second = Driver(run, "--agent", "null")
    drivers.append(second)
    until("the farm", lambda: bool(second.status()))
    refused = subprocess.run(
        [sys.executable, "-m", "farm.cli", "down", str(run)], capture_output=True, text=True, timeout=WAIT_S
    )
    assert refused.returncode == 0, refused.stderr
    assert second.process.wait(timeout=WAIT_S) in {0, 130}
    third = Driver(run, "--agent", "null")
    drivers.append(third)
    third.finish()
    complete(run)
