"""farm/cluster/slurm.py against scripts that answer as Slurm's commands do; the real ones are in tests/clusters."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from farm.cluster.launcher import REFUSED, Launch, Phase
from farm.cluster.slurm import SlurmLauncher
from farm.cluster.ticket import Credentials, Expected, Ticket
from farm.config import ClusterConfig
from farm.errors import FarmError, UsageError

# Each writes down how it was called; squeue prints the file "queue", sbatch numbers jobs from 7.
SCRIPTS = {
    "scontrol": 'echo "KillWait = 30 sec"; echo "ProctrackType = proctrack/cgroup"',
    "squeue": 'cat "$here/queue"',
    "scancel": ":",
    "sbatch": 'cat >"$here/script"; [ ! -e "$here/refuse" ] || { cat "$here/refuse" >&2; exit 1; }\n'
    'case " $* " in *" --test-only "*) exit 0;; esac\n'
    'n=$(cat "$here/next" 2>/dev/null || echo 7); echo $((n + 1)) >"$here/next"; echo $n',
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in SCRIPTS.items():
        path = folder / name
        path.write_text(f'#!/bin/bash\nhere={folder}\necho "{name} $*" >>"$here/calls"\n{text}\n')
        path.chmod(0o755)
    (folder / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def using(
    tmp_path: Path, use: Callable[[SlurmLauncher, list[float]], Awaitable[None]], *, leave_s: float = 0.0
) -> None:
    (tmp_path / "cluster").mkdir(exist_ok=True)
    expected = Expected(software={}, probe="", probe_text="", provider="fake", provider_options={})
    launch = Launch(
        config=ClusterConfig(kind="slurm", leave_s=leave_s),
        ticket=Ticket(
            scheduler="tls://h:1", slots=1, credentials=Credentials(ca="", cert="", key="KEY"), expected=expected
        ),
        label="farm-1",
        logs=tmp_path / "logs",
        folder=tmp_path / "cluster",
    )
    clock = [0.0]

    async def main() -> None:
        launcher = SlurmLauncher(launch, clock=lambda: clock[0])
        try:
            await launcher.prepare()
            await use(launcher, clock)
        finally:
            clock[0] += 1000.0
            await launcher.close()

    asyncio.run(main())


def test_the_life_of_a_job(tmp_path: Path, slurm: Path) -> None:
    (slurm / "queue").write_text("3|RUNNING|farm-1-worker-0|N/A|None|\n4|RUNNING|of-somebody|N/A|None|\n")

    async def use(launcher: SlurmLauncher, clock: list[float]) -> None:
        assert await launcher.look() == {}, "a job of a farm before is no worker of this one"
        ticket = tmp_path / "cluster" / "ticket.json"
        assert ticket.stat().st_mode & 0o077 == 0
        await launcher.start("worker-0")
        assert f"--ticket {ticket}" in (slurm / "script").read_text()
        assert "KEY" not in (slurm / "script").read_text()
        assert json.loads((tmp_path / "logs" / "slurm-jobs.jsonl").read_text())["job"] == 7

        async def seen(line: str) -> object:
            (slurm / "queue").write_text(line)
            clock[0] += 10.0
            return (await launcher.look())["worker-0"]

        waiting = await seen("7|PENDING|farm-1-worker-0|N/A|Resources|\n")
        assert (waiting.phase, waiting.hopeless) == (Phase.WAITING, False)  # type: ignore[attr-defined]
        assert "job 7" in waiting.message  # type: ignore[attr-defined]
        running = await seen("7|RUNNING|farm-1-worker-0|N/A|None|\n")
        assert (running.phase, running.leaving) == (Phase.RUNNING, False)  # type: ignore[attr-defined]
        leaving = await seen("7|RUNNING|farm-1-worker-0|2026-11-30T02:17:24|None|\n")
        assert leaving.leaving  # type: ignore[attr-defined]
        again = await seen("7|PENDING|farm-1-worker-0|N/A|BeginTime|\n")
        assert again.phase is Phase.WAITING  # type: ignore[attr-defined]
        (tmp_path / "logs" / "slurm-worker-0-7.log").write_text("a warning\nfarm: node-1: has no bwrap\n")
        ended = await seen("7|FAILED|farm-1-worker-0|N/A|NonZeroExitCode|\n")
        assert (ended.code, ended.message) == (REFUSED, "node-1: has no bwrap")  # type: ignore[attr-defined]
        gone = await seen("")
        assert gone.phase is Phase.ENDED  # type: ignore[attr-defined]
        await launcher.stop("worker-0")
        assert await launcher.look() == {}

    using(tmp_path, use)
    calls = (slurm / "calls").read_text()
    assert "scancel --quiet 3\n" in calls
    assert "scancel --quiet 7" not in calls, "it had ended"
    assert not (tmp_path / "cluster" / "ticket.json").exists()


def test_one_that_was_taken_back_has_not_failed_and_one_that_was_not_heard_of_is_known(
    tmp_path: Path, slurm: Path
) -> None:
    async def use(launcher: SlurmLauncher, _: list[float]) -> None:
        await launcher.start("worker-0")
        await launcher.withdraw("worker-0")
        (slurm / "queue").write_text("7|CANCELLED|farm-1-worker-0|N/A|None|\n8|PENDING|farm-1-worker-1|N/A|None|\n")
        states = await launcher.look()
        assert set(states) == {"worker-1"}
        await launcher.stop("worker-1")

    using(tmp_path, use)
    calls = (slurm / "calls").read_text()
    assert "scancel --quiet 7 --state=PENDING" in calls
    assert "scancel --quiet 8\n" in calls


def test_one_that_began_as_it_was_taken_back_counts_when_it_fails(tmp_path: Path, slurm: Path) -> None:
    async def use(launcher: SlurmLauncher, clock: list[float]) -> None:
        for name in ("worker-0", "worker-1"):
            await launcher.start(name)
            await launcher.withdraw(name)

        async def seen(*lines: str) -> dict[str, Phase]:
            (slurm / "queue").write_text("".join(f"{line}|\n" for line in lines))
            clock[0] += 10.0
            return {name: state.phase for name, state in (await launcher.look()).items()}

        begun = {"worker-0": Phase.RUNNING, "worker-1": Phase.ENDED}
        failed = "8|FAILED|farm-1-worker-1|N/A|NonZeroExitCode"
        assert await seen("7|RUNNING|farm-1-worker-0|N/A|None", failed) == begun
        assert (await seen("7|CANCELLED|farm-1-worker-0|N/A|None", failed))["worker-0"] is Phase.ENDED

    using(tmp_path, use)


def test_whose_jobs_are_asked_for_is_not_left_to_the_environment(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody")

    async def use(launcher: SlurmLauncher, _: list[float]) -> None:
        await launcher.look()

    using(tmp_path, use)
    assert f" --user={os.getuid()} " in (slurm / "calls").read_text()


def test_what_slurm_refuses(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        raise AssertionError("it must not start")

    (slurm / "refuse").write_text("sbatch: error: Invalid account\nallocation failure: Invalid account\n")
    with pytest.raises(UsageError, match=r"Invalid account; correct partition"):
        using(tmp_path, nothing)
    (slurm / "refuse").unlink()
    with pytest.raises(UsageError, match="KillWait"):
        using(tmp_path, nothing, leave_s=28.0)

    async def later(launcher: SlurmLauncher, clock: list[float]) -> None:
        (slurm / "refuse").write_text("sbatch: error: QOSMaxSubmitJobPerUserLimit\n")
        with pytest.raises(FarmError, match="QOSMaxSubmitJobPerUserLimit"):
            await launcher.start("worker-0")
        (slurm / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2; exit 1\n")
        clock[0] += 10.0
        with pytest.raises(FarmError, match="Unable to contact"):
            await launcher.look()

    using(tmp_path, later, leave_s=20.0)
    (slurm / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(slurm))
    with pytest.raises(UsageError, match="scontrol is not on PATH"):
        using(tmp_path, nothing)
