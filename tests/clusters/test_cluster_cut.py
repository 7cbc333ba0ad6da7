"""Workers in network namespaces, one of them cut off for longer than every time-out: its episodes are issued again,
none lands twice, its worker ends by itself, and comes back when the link does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from farm_process import FarmProcess, farm_command, rows, runs, until
from net_hosts import NetHosts
from ssh_hosts import SshHosts

from farm.types import Graded

SLOTS = 4

pytestmark = pytest.mark.timeout(900)


def write_config(folder: Path, hosts: SshHosts) -> Path:
    path = folder / "farm.toml"
    path.write_text(f"""
[cluster]
kind = "ssh"
workers = 2
slots = {SLOTS}
[cluster.ssh]
hosts = {list(hosts.names)}
options = {list(hosts.options)}
[sandbox]
start_delay_s = 3.0
""")
    return path


def test_a_cut_off_worker_lands_nothing_twice_and_comes_back(tmp_path: Path, net: NetHosts, hosts: SshHosts) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path, hosts)
    farm = FarmProcess(
        run, "rollout", "--config", str(config), "--tasks", "micro:benchmark", "--attempts", "8", "--agent", "oracle"
    )
    try:
        farm.until("both workers", lambda: farm.workers() == 2)
        assert farm.status()["cluster"]["address"].startswith(f"tls://{net.address}:")
        farm.until("landed episodes", lambda: farm.landed() >= 8)
        (cut_off,) = hosts.workers("worker-b")

        net.cut("worker-b")
        began_s = time.monotonic()
        farm.until("the loss of worker-b", lambda: farm.workers() == 1)
        print(f"the farm noticed after {time.monotonic() - began_s:.1f} s")
        until("the end of the cut-off worker", lambda: not runs(cut_off))
        print(f"the cut-off worker was gone after {time.monotonic() - began_s:.1f} s")
        farm.until_landed_more(8)
        assert farm.workers() == 1
        net.mend("worker-b")
        farm.until("worker-b again", lambda: farm.workers() == 2)
        farm.until_landed_more(16)
        assert farm_command("down", str(run)).returncode == 0
        farm.finish()
        status = farm.status()
    finally:
        farm.kill()
    found = rows(run)
    assert len({row.episode_id for row in found}) == len(found) == status["episodes"]["landed"]
    assert all(isinstance(row.outcome, Graded) for row in found), "a cut link became more than a retry"
    assert len({row.worker for row in found}) == 3, "the host that was cut off did not come back to work"
    # What the cut-off worker finished in the dark landed, and its second attempt did not; the others were done again.
    again = [failure for row in found for failure in row.prior]
    assert {failure.kind for failure in again} <= {"worker_lost"}
    assert 1 <= len(again) + status["recent"]["duplicates"] <= status["episodes"]["lost"]
    until("no worker on any host", lambda: not any(hosts.workers(name) for name in hosts.names))
