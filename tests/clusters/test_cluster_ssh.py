"""Farms on hosts that ssh reaches: hosts and farms that die and come back, workers that come and go, and all that
can be wrong with a host before a start."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster_kinds import RUNNER, interpreter, make_attempt, start_cluster
from distributed import Client
from farm_process import FarmProcess, farm_command, rows, until
from net_hosts import NetHosts
from ssh_hosts import SshHosts

from farm.cluster import Finished, Lost
from farm.cluster.certificates import make_credentials
from farm.cluster.opening import Site, open_cluster
from farm.cluster.settings import security_of
from farm.config import ClusterConfig
from farm.errors import UsageError
from farm.types import Graded

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with SshHosts(tmp_path / "ssh", "worker-a", "worker-b") as hosts:
        yield hosts


def write_config(folder: Path, hosts: SshHosts, *, workers: str = "2", more: str = "") -> str:
    path = folder / "farm.toml"
    path.write_text(f"""
[cluster]
kind = "ssh"
workers = "{workers}"
slots = 4
settle_s = 2.0
[cluster.ssh]
hosts = {list(hosts.names)}
options = {list(hosts.options)}
[sandbox]
start_delay_s = 2.0
{more}
""")
    return str(path)


def nobody_left(hosts: SshHosts) -> bool:
    return not any(hosts.workers(name) for name in hosts.names)


def test_a_host_and_then_the_farm_are_killed(tmp_path: Path, hosts: SshHosts) -> None:
    run = tmp_path / "run"
    command = (
        "rollout", "--config", write_config(tmp_path, hosts), "--tasks", "micro:benchmark", "--limit", "8",
        "--attempts", "6", "--agent", "oracle",
    )  # fmt: skip
    farm = FarmProcess(run, *command)
    try:
        farm.until("both workers", lambda: farm.workers() == 2)
        farm.until("landed episodes", lambda: farm.landed() >= 6)
        hosts.kill("worker-b")
        farm.until("the loss of worker-b", lambda: farm.workers() == 1)
        farm.until_landed_more(4)
        hosts.start("worker-b")
        farm.until("worker-b again", lambda: farm.workers() == 2)
        farm.until_landed_more(2)
        farm.kill()
        until("the end of all workers", lambda: nobody_left(hosts))
        assert not list((run / "cluster").glob("*ticket*")), "a private key lies about"

        again = FarmProcess(run, *command)
        try:
            assert "pass@1" in again.finish()
        finally:
            again.kill()
    finally:
        farm.kill()
    found = rows(run)
    assert len({row.episode_id for row in found}) == len(found) == 48
    assert all(isinstance(row.outcome, Graded) for row in found)
    assert {failure.kind for row in found for failure in row.prior} == {"worker_lost"}
    assert not (run / "cluster").exists()
    until("the end of all workers", lambda: nobody_left(hosts))
    for file in [*run.rglob("*.log"), *run.glob("*.json"), tmp_path / "output.txt"]:
        assert "PRIVATE KEY" not in file.read_text(), file


def test_workers_come_and_go_and_the_commands_see_them(tmp_path: Path, hosts: SshHosts) -> None:
    run = tmp_path / "run"
    farm = FarmProcess(
        run, "rollout", "--config", write_config(tmp_path, hosts, workers="1:2"), "--tasks", "micro:benchmark",
        "--limit", "6", "--attempts", "4", "--agent", "oracle", "--set", "sandbox.start_delay_s=4",
    )  # fmt: skip
    try:
        farm.until("one worker", lambda: farm.workers() >= 1)
        farm.until("a second worker for 24 episodes", lambda: farm.workers() == 2)
        shown = farm_command("status", str(run))
        assert shown.returncode == 0
        assert "workers" in shown.stdout
        # The last four episodes fit one worker: the other is drained, and ends by itself once it is empty.
        until("one worker again, or the end", lambda: farm.process.poll() is not None or nearly_done(farm))
        farm.finish()
    finally:
        farm.kill()
    found = rows(run)
    assert len(found) == 24
    assert not [failure for row in found for failure in row.prior], "scale-down killed a running episode"
    assert len({row.worker for row in found}) == 2
    assert "failed" not in (run / "logs" / "farm.log").read_text(), "one that was drained is no failure"
    until("the end of all workers", lambda: nobody_left(hosts))


def nearly_done(farm: FarmProcess) -> bool:
    return farm.landed() >= 20 and farm.workers() == 1


@pytest.mark.parametrize("leave_s", [0.0, 30.0])
def test_a_worker_that_is_told_to_go(tmp_path: Path, hosts: SshHosts, leave_s: float) -> None:
    """SIGTERM, as a preemption sends it: with time to leave it finishes what runs, without that it is given up."""
    (tmp_path / "cluster_test_runner.py").write_text(RUNNER)
    (tmp_path / "logs").mkdir()

    async def main() -> None:
        cluster = await start_cluster(
            config_of(tmp_path, hosts, workers=2, slots=2, leave_s=leave_s),
            workers=2,
            runner="cluster_test_runner:Runner",
            options={"folder": str(tmp_path)},
            scratch=tmp_path,
        )
        try:
            async with asyncio.timeout(150):
                for index in range(4):
                    cluster.submit(make_attempt(index, "wait go"))
                while len(started := list(tmp_path.glob("started-*"))) < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                told = int(started[0].name.rsplit("-", 1)[1])
                os.kill(told, signal.SIGTERM)
                while leave_s and not (await cluster.scale(2)).draining:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                lost = [] if leave_s else [await cluster.events.get() for _ in range(2)]
                assert all(isinstance(event, Lost) and event.kind == "preempted" for event in lost)
                for index in range(4, 6):
                    cluster.submit(make_attempt(index, "sleep 0.1"))
                (tmp_path / "go").touch()
                finished = [await cluster.events.get() for _ in range(6 - len(lost))]
                pids = {e.result["index"]: e.result["pid"] for e in finished if isinstance(e, Finished)}
                assert len(pids) == len(finished)
                assert told not in {pids[4], pids[5]}, "it took something new"
                await asyncio.to_thread(until, "its end", lambda: not psutil.pid_exists(told))
                assert (tmp_path / f"closed-{told}").exists(), "it did not clean up"
                while (await cluster.scale(2)).workers != 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        finally:
            await cluster.close()

    asyncio.run(main())


# --------------------------------------------------------------------------------------------- bad input


def refused(folder: Path, config: ClusterConfig) -> str:
    """What opening a cluster says; nothing may be left of it."""

    async def main() -> None:
        opened = await open_cluster(config, Site(run=folder / "run", scratch=folder / "scratch"))
        await opened.close()

    (folder / "run" / "logs").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UsageError) as error:
        asyncio.run(main())
    assert not (folder / "run" / "cluster").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def config_of(folder: Path, hosts: SshHosts, **changes: object) -> ClusterConfig:
    ssh = {"hosts": hosts.names, "options": hosts.options, **changes.pop("ssh", {})}  # type: ignore[dict-item]
    return ClusterConfig.model_validate(
        {"kind": "ssh", "workers": 1, "python": interpreter(folder), "ssh": ssh, **changes}
    )


def test_a_host_that_nobody_knows_one_that_is_down_and_a_strange_key(tmp_path: Path, hosts: SshHosts) -> None:
    said = refused(tmp_path, config_of(tmp_path, hosts, ssh={"hosts": ("worker-a", "nowhere.invalid")}))
    assert "'nowhere.invalid'" in said
    assert "there is no host of that name" in said
    hosts.kill("worker-b")
    said = refused(tmp_path, config_of(tmp_path, hosts))
    assert "'worker-b'" in said
    assert "no ssh server listens there" in said
    hosts.start("worker-b")

    known = hosts.folder / "known_hosts"
    lines = known.read_text()
    known.write_text("")
    assert "its host key is not known" in refused(tmp_path, config_of(tmp_path, hosts))
    known.write_text(lines)
    shutil.move(hosts.folder / "user_key", tmp_path / "key")
    said = refused(tmp_path, config_of(tmp_path, hosts))
    assert "it takes no key of this user" in said
    assert "2 of 2 hosts" in said


def test_another_python_and_another_rollout_farm(tmp_path: Path, hosts: SshHosts) -> None:
    said = refused(tmp_path, config_of(tmp_path, hosts, python="/nowhere/python"))
    assert "set cluster.python" in said
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {shutil.which("python3", path="/usr/bin:/usr/local/bin")} -S "$@"\n')
    bare.chmod(0o755)
    assert "set cluster.python" in refused(tmp_path, config_of(tmp_path, hosts, python=str(bare)))

    # The same release with one more line of code, as two checkouts have it.
    import farm

    other = tmp_path / "other"
    shutil.copytree(Path(farm.__file__).parent, other / "farm", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "farm" / "types.py").open("a") as file:
        file.write("\n# changed\n")
    said = refused(tmp_path, config_of(tmp_path, hosts, python=interpreter(other)))
    assert "has rollout-farm" in said
    assert "the farm has" in said


def test_a_sandbox_that_can_not_work_there(tmp_path: Path, hosts: SshHosts) -> None:
    async def main() -> None:
        site = Site(
            run=tmp_path / "run",
            scratch=tmp_path / "scratch",
            provider="docker",
            provider_options={"host": "unix:///nowhere/docker.sock"},
        )
        opened = await open_cluster(config_of(tmp_path, hosts), site)
        await opened.close()

    (tmp_path / "run" / "logs").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"cluster\.ssh\.hosts 'worker-a'.*[Dd]ocker"):
        asyncio.run(main())


def test_who_has_no_certificate_of_this_start_stays_outside(tmp_path: Path, hosts: SshHosts) -> None:
    """Neither without TLS nor with another certificate."""

    async def main() -> list[str]:
        (tmp_path / "run" / "logs").mkdir(parents=True)
        opened = await open_cluster(config_of(tmp_path, hosts), Site(run=tmp_path / "run", scratch=tmp_path))
        address = str(opened.client.scheduler.address)
        told = []
        try:
            for scheme, security in (("tcp", None), ("tls", security_of(make_credentials()))):
                try:
                    intruder = await Client(
                        address.replace("tls", scheme), asynchronous=True, security=security, timeout=5
                    )
                except (OSError, TimeoutError) as error:
                    told.append(type(error).__name__)
                else:
                    await intruder.close()
        finally:
            await opened.close()
        return told

    assert len(asyncio.run(main())) == 2, "somebody got in"


def test_a_scheduler_and_a_run_folder_that_the_hosts_do_not_reach(tmp_path: Path) -> None:
    with NetHosts("worker-a") as net, SshHosts(tmp_path / "ssh", "worker-a", net=net) as hosts:
        said = refused(tmp_path, config_of(tmp_path, hosts, host="127.0.0.1"))
        assert "can't reach the farm's scheduler at tls://127.0.0.1:" in said
        assert "set cluster.host to" in said
    # A host that mounts something else where the run folder is.
    python = tmp_path / "python-elsewhere"
    python.write_text(
        f'#!/bin/sh\nexec unshare -m sh -c "mount -t tmpfs none {tmp_path}/run && exec {sys.executable} $*"\n'
    )
    python.chmod(0o755)
    with SshHosts(tmp_path / "ssh-2", "worker-a") as hosts:
        said = refused(tmp_path, config_of(tmp_path, hosts, python=str(python)))
    assert f"{socket.gethostname()}: does not see {tmp_path}/run/cluster/probe-" in said
    assert "storage that all hosts mount under the same path" in said
