"""A real farm (Dask, embedded engine, sandboxes) with its parts killed -9 in turn: no episode is lost or doubled,
and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from farm_process import FarmProcess, farm_command, rows, runs, until

from farm.engine.bench import BenchShape, write_random_model
from farm.render.micro_tokenizer import save_tokenizer, train_tokenizer
from farm.suites import micro
from farm.trajectory_log import DirectoryLog
from farm.types import Graded, InlineFiles, Trajectory

TASKS, ATTEMPTS = 16, 4
WAIT_S = 150.0

pytestmark = pytest.mark.timeout(600)


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


class Driver(FarmProcess):
    """``farm rollout`` of :data:`TASKS` tasks. Sandboxes start slowly, so that a kill finds something left to do."""

    def __init__(self, run: Path, *arguments: str) -> None:
        super().__init__(
            run, "rollout", "--tasks", "micro:benchmark", "--limit", str(TASKS), "--attempts", str(ATTEMPTS),
            "--set", "cluster.slots=4", "--set", "sandbox.start_delay_s=0.3", *arguments,
        )  # fmt: skip

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self) -> int:
        """The process id of one Dask worker."""
        return next(p.pid for p in self.family() if "spawn_main" in " ".join(p.cmdline()))


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.kill()


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

    driver.until_landed_more(4)
    os.kill(driver.worker(), signal.SIGKILL)
    driver.until_landed_more(6)
    engine = driver.status()["engines"][0]["process"]["pid"]
    os.kill(engine, signal.SIGKILL)
    driver.until_landed_more(6)
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
    driver.until_landed_more(1)
    family = driver.family()
    os.killpg(driver.process.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
    assert "goes on" in driver.finish()
    until("the end of all its processes", lambda: not any(runs(process) for process in family))
    assert len(rows(run)) < TASKS * ATTEMPTS

    second = Driver(run, "--agent", "null")
    drivers.append(second)
    until("the farm", lambda: bool(second.status()))
    ended = farm_command("down", str(run))
    assert ended.returncode == 0, ended.stderr
    assert second.process.wait(timeout=WAIT_S) in {0, 130}
    third = Driver(run, "--agent", "null")
    drivers.append(third)
    third.finish()
    complete(run)
