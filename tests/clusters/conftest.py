"""Run by ci/clusters.sh, which names in ROLLOUT_FARM_CLUSTERS what it has set this machine up for."""

from __future__ import annotations

import os

SET_UP = frozenset(filter(None, os.environ.get("ROLLOUT_FARM_CLUSTERS", "").split(",")))
_NEEDS = {
    "test_cluster_ssh.py": "ssh",
    "test_cluster_cut.py": "netns",
    "test_cluster_engine.py": "netns",
    "test_cluster_slurm.py": "slurm",
    "test_cluster_kubernetes.py": "kubernetes",
}
collect_ignore = [name for name, needs in _NEEDS.items() if needs not in SET_UP]
