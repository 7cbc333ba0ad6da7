"""Run by ci/clusters.sh, which names in ROLLOUT_FARM_CLUSTERS what it has set this machine up for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_hosts import NetHosts
from ssh_hosts import SshHosts

SET_UP = frozenset(filter(None, os.environ.get("ROLLOUT_FARM_CLUSTERS", "").split(",")))
_NEEDS = {
    "test_cluster_ssh.py": "ssh",
    "test_cluster_cut.py": "netns",
    "test_cluster_engine.py": "netns",
    "test_cluster_slurm.py": "slurm",
    "test_cluster_kubernetes.py": "kubernetes",
}
collect_ignore = [name for name, needs in _NEEDS.items() if needs not in SET_UP]


@pytest.fixture
def net() -> Iterator[NetHosts]:
    """Two hosts on a network of their own."""
    with NetHosts("worker-a", "worker-b") as net:
        yield net


@pytest.fixture
def hosts(tmp_path: Path, net: NetHosts) -> Iterator[SshHosts]:
    """An ssh server on each of them."""
    with SshHosts(tmp_path / "ssh", "worker-a", "worker-b", net=net) as hosts:
        yield hosts
