"""A whole farm (driver, scheduler, jobs, sandboxes) on a real Slurm of one node: what is preempted, cancelled, killed
or refused there. The agent knows the solution, so an episode that lands without a reward of 1 was harmed by its worker.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster

from farm.sandbox.state import Record, read_records, sweep
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded, Trajectory

WAIT_S = 400.0  # they take a tenth of it on an idle machine
REQUEUE_S = 600.0  # Slurm itself holds a requeued job back for two minutes

pytestmark = pytest.mark.timeout(1800)


def until(what: str, condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"waited in vain for: {what}"
        time.sleep(0.1)


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout.strip()


class Farm:
    """``farm rollout --cluster slurm`` as a process of its own; its output is in ``run``.txt."""

    def __init__(self, run: Path, *, tasks: int, attempts: int, workers: str, settings: tuple[str, ...] = ()) -> None:
        self.run, self.episodes, self.group = run, tasks * attempts, attempts
        self.output = run.with_suffix(".txt")
        command = [
            sys.executable, "-m", "farm.cli", "rollout", "--cluster", "slurm", "--workers", workers,
            "--tasks", "micro:benchmark", "--limit", str(tasks), "--attempts", str(attempts), "--agent", "oracle",
            "--run", str(run),
        ]  # fmt: skip
        own = ("cluster.host=127.0.0.1", "cluster.slots=2", "cluster.settle_s=1", 'cluster.environment=["TMPDIR"]')
        for setting in (*own, *settings):
            command += ["--set", setting]
        environment = {**os.environ, "TMPDIR": str(slurm_cluster.temporary())}
        with self.output.open("ab") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, start_new_session=True, env=environment
            )

    def landed(self) -> int:
        episodes = self.record().get("episodes", {})
        return int(episodes.get("landed", 0) + episodes.get("landed_before", 0))

    def record(self) -> dict:  # type: ignore[type-arg]
        try:
            value: dict = json.loads((self.run / "farm.json").read_text())  # type: ignore[type-arg]
        except (OSError, ValueError):
            return {}
        return value if value.get("process", {}).get("pid") == self.process.pid else {}

    def until(self, what: str, condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
        def check() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return condition()

        until(what, check, within_s)

    def jobs(self) -> dict[int, str]:
        """Job -> worker, of every job that this run folder has had."""
        lines = (self.run / "logs" / "slurm-jobs.jsonl").read_text().splitlines()
        return {record["job"]: record["worker"] for record in map(json.loads, lines)}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self, within_s: float = WAIT_S) -> list[Trajectory]:
        """Every episode has landed once, solved, and nothing is left."""
        assert self.process.wait(timeout=within_s) == 0, self.output.read_text()
        rows = [row for _, row in DirectoryLog(self.run / "trajectories", create=False).read(Cursor())]
        assert len({row.episode_id for row in rows}) == len(rows) == self.episodes
        assert set(Counter(row.group_id for row in rows).values()) == {self.group}
        assert all(isinstance(row.outcome, Graded) and row.outcome.reward == 1.0 for row in rows)
        nothing_left()
        assert not (self.run / "cluster").exists(), "the ticket holds a key"
        return rows


def state_directory() -> Path:
    """Of this Slurm's farms and jobs alone, by their TMPDIR."""
    return slurm_cluster.temporary() / f"rollout-farm-{os.getuid()}"


def sandboxes() -> list[Record]:
    return [record for _, record in read_records(state_directory())]


@pytest.fixture(autouse=True)
def no_sandbox_for_the_next_test() -> Iterator[None]:
    yield
    sweep(state_directory(), now_s=math.inf)


def nothing_left() -> None:
    assert slurm_cluster.queue_is_empty()
    until("the end of all sandboxes", lambda: not sandboxes(), within_s=20)


@pytest.fixture
def farms() -> Iterator[list[Farm]]:
    started: list[Farm] = []
    yield started
    for farm in started:
        if farm.process.poll() is None:
            farm.kill()
    if left := [line.split()[0] for line in slurm_cluster.queue()]:
        slurm("scancel", *left)
        slurm_cluster.queue_is_empty(within_s=60)


def running() -> set[int]:
    return {int(line.split()[0]) for line in slurm_cluster.queue() if line.split()[2] == "RUNNING"}


def test_up_to_the_maximum_and_down_again_without_a_loss(tmp_path: Path, farms: list[Farm]) -> None:
    farm = Farm(tmp_path / "run", tasks=8, attempts=3, workers="1:3", settings=("sandbox.start_delay_s=1.5",))
    farms.append(farm)
    farm.until("three workers", lambda: len(running()) == 3)
    rows = farm.finish()
    assert len({row.worker for row in rows}) == 3
    assert not any(row.prior for row in rows), "scale-down ended an episode"
    assert set(farm.jobs().values()) == {"worker-0", "worker-1", "worker-2"}
    states = slurm("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={','.join(map(str, farm.jobs()))}")
    assert set(states.split()) <= {"COMPLETED", "CANCELLED"}, "each ended by itself, or with the farm"


def test_preempted_jobs_hand_back_their_episodes_and_join_again(tmp_path: Path, farms: list[Farm]) -> None:
    """Both workers are preempted; each episode that is running then takes longer than Slurm does to end its job."""
    delay_s = slurm_cluster.GONE_S * 0.6  # an episode starts two sandboxes
    farm = Farm(
        tmp_path / "run",
        tasks=4,
        attempts=3,
        workers="2",
        settings=(f"sandbox.start_delay_s={delay_s:g}", "cluster.slurm.cpus=6"),
    )
    farms.append(farm)
    farm.until("landed episodes", lambda: farm.landed() >= 3)
    before = running()
    assert len(before) == 2
    # It needs the CPUs of both, and has them when both are gone.
    other = int(
        slurm("sbatch", "--parsable", "--partition=high", "--cpus-per-task=14", "--output=/dev/null", "--wrap=sleep 1")
    )
    farm.until("the job that preempts", lambda: other not in {int(line.split()[0]) for line in slurm_cluster.queue()})
    until("the end of all sandboxes", lambda: not sandboxes(), within_s=5)
    farm.until("both jobs again", lambda: before <= running(), REQUEUE_S)
    again_at_s = time.time()
    restarts = {int(line.split()[0]): int(line.split()[3]) for line in slurm_cluster.queue()}
    assert all(restarts[job] == 1 for job in before)

    rows = farm.finish(REQUEUE_S)
    late = {row.worker for row in rows if row.started_at_s > again_at_s}
    assert late == {farm.jobs()[job] for job in before}, "both joined again, under their names"
    lost = [failure for row in rows for failure in row.prior]
    assert 1 <= len(lost) <= 4, "what ran, and nothing was started in the grace time"
    assert {failure.boundary.value for failure in lost} == {"farm"}
    assert "preempted" in {failure.kind for failure in lost}
    assert all(row.attempt == 1 + len(row.prior) for row in rows)


def test_a_farm_that_is_killed_leaves_no_job_and_goes_on(tmp_path: Path, farms: list[Farm]) -> None:
    def start() -> Farm:
        farm = Farm(
            tmp_path / "run",
            tasks=10,
            attempts=3,
            workers="1:3",
            settings=("sandbox.start_delay_s=1", "cluster.slurm.cpus=6"),  # the third never fits in
        )
        farms.append(farm)
        return farm

    farm = start()
    farm.until("two workers, and one that waits", lambda: len(running()) == 2 and len(slurm_cluster.queue()) == 3)
    farm.until("landed episodes", lambda: farm.landed() >= 2)
    victim = min(running())
    slurm("scancel", str(victim))
    farm.until("another worker in its place", lambda: len(running() - {victim}) == 2)
    at = farm.landed()
    farm.until("landed episodes", lambda: farm.landed() >= at + 2)
    farm.kill()
    until("the end of all jobs, the one that waited too", lambda: not slurm_cluster.queue(), within_s=150)
    nothing_left()

    farm = start()
    farm.until("two workers, and one that waits", lambda: len(running()) == 2 and len(slurm_cluster.queue()) == 3)
    at = farm.landed()
    farm.until("landed episodes", lambda: farm.landed() >= at + 2)
    farm.kill()
    before = {int(line.split()[0]) for line in slurm_cluster.queue()}
    farm = start()  # at once: the jobs of the one before are still there
    rows = farm.finish()
    assert before, "there was something to end"
    assert {failure.kind for row in rows for failure in row.prior} <= {"preempted", "worker_lost"}


def refused(tmp_path: Path, *settings: str, environment: dict[str, str] | None = None, code: int = 2) -> str:
    """What a farm says that can't start. Nothing stays in the queue."""
    command = [
        sys.executable, "-m", "farm.cli", "rollout", "--cluster", "slurm", "--workers", "1",
        "--tasks", "micro:benchmark", "--limit", "1", "--agent", "oracle", "--run", str(tmp_path / "refused"),
        "--set", "cluster.host=127.0.0.1",
    ]  # fmt: skip
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("farm: ")]
    assert len(lines) == 1, done.stderr
    nothing_left()
    return lines[0]


def test_what_slurm_would_never_start_is_refused_with_a_remedy(tmp_path: Path) -> None:
    assert re.search(r"[Ii]nvalid partition", refused(tmp_path, "cluster.slurm.partition=nope"))
    assert "cpus" in refused(tmp_path, "cluster.slurm.cpus=99")
    assert "memory" in refused(tmp_path, "cluster.slurm.memory=999G")
    assert "account" in refused(tmp_path, "cluster.slurm.partition=closed")
    assert "one that is up" in refused(tmp_path, "cluster.slurm.partition=down")
    assert "KillWait" in refused(tmp_path, "cluster.leave_s=100")
    assert "linuxproc" in refused(tmp_path, "cluster.leave_s=2")
    assert "sbatch is not on PATH" in refused(tmp_path, environment={"PATH": str(tmp_path)})
    broken = tmp_path / "slurm.conf"
    broken.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", Path(os.environ["SLURM_CONF"]).read_text()))
    assert "scontrol ping" in refused(tmp_path, environment={"SLURM_CONF": str(broken)})
    assert "has not got rollout-farm" in refused(
        tmp_path, 'cluster.slurm.setup=["echo has not got rollout-farm; exit 1"]', "cluster.start_s=15", code=1
    )


def test_a_full_cluster_is_said_to_be_full(tmp_path: Path) -> None:
    other = slurm("sbatch", "--parsable", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    until("the other job", lambda: int(other) in running())
    try:
        command = [
            sys.executable, "-m", "farm.cli", "rollout", "--cluster", "slurm", "--workers", "1", "--tasks",
            "micro:benchmark", "--limit", "1", "--agent", "oracle", "--run", str(tmp_path / "full"),
            "--set", "cluster.host=127.0.0.1", "--set", "cluster.start_s=5",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 1
        assert re.search(r"job \d+ waits in Slurm's queue \((Resources|Priority|None)\)", done.stderr), done.stderr
    finally:
        slurm("scancel", other)
    nothing_left()


def test_a_drain_ends_what_runs_and_the_jobs(tmp_path: Path, farms: list[Farm]) -> None:
    farm = Farm(tmp_path / "run", tasks=20, attempts=4, workers="2", settings=("sandbox.start_delay_s=1",))
    farms.append(farm)
    farm.until("landed episodes", lambda: farm.landed() >= 2)
    farm.process.send_signal(signal.SIGINT)
    assert farm.process.wait(WAIT_S) == 0, farm.output.read_text()
    nothing_left()
    rows = [row for _, row in DirectoryLog(farm.run / "trajectories", create=False).read(Cursor())]
    assert 2 <= len(rows) < farm.episodes
    assert not any(row.prior for row in rows)
