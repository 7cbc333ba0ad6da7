"""A farm whose engine is here and whose workers are on other networks: their episodes sample from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from farm_process import FarmProcess, farm_command, rows, until
from net_hosts import NetHosts
from ssh_hosts import SshHosts

from farm.types import Graded

pytestmark = pytest.mark.timeout(600)


def write_config(folder: Path, hosts: SshHosts, engine_host: str) -> str:
    path = folder / "farm.toml"
    path.write_text(f"""
[cluster]
kind = "ssh"
workers = 2
slots = 4
[cluster.ssh]
hosts = {list(hosts.names)}
options = {list(hosts.options)}
[engine]
host = "{engine_host}"
""")
    return str(path)


def test_workers_elsewhere_sample_from_the_engine_here(tmp_path: Path, net: NetHosts, hosts: SshHosts) -> None:
    run = tmp_path / "run"
    farm = FarmProcess(run, "up", "--config", write_config(tmp_path, hosts, net.address))
    try:
        farm.until("both workers", lambda: farm.workers() == 2)
        farm.until_landed_more(24)
        assert farm_command("down", str(run)).returncode == 0
        farm.finish()
    finally:
        farm.kill()
    found = rows(run)
    assert len({row.episode_id for row in found}) == len(found) >= 24
    assert all(isinstance(row.outcome, Graded) for row in found)
    assert all(row.engine_url.startswith(f"http://{net.address}:") for row in found)
    assert all(
        turn.output_ids and len(turn.output_ids) == len(turn.output_logprobs) for row in found for turn in row.turns
    )
    assert len({row.worker for row in found}) == 2
    until("no worker on any host", lambda: not any(hosts.workers(name) for name in hosts.names))


def test_an_engine_that_the_hosts_do_not_reach_ends_the_start(tmp_path: Path, hosts: SshHosts) -> None:
    farm = FarmProcess(tmp_path / "run", "up", "--config", write_config(tmp_path, hosts, "127.0.0.1"))
    try:
        until("its end", lambda: farm.process.poll() is not None)
        assert farm.process.returncode == 2, farm.output.read_text()
        assert "engine.host" in farm.output.read_text()
    finally:
        farm.kill()
    until("no worker on any host", lambda: not any(hosts.workers(name) for name in hosts.names))
