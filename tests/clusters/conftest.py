"""Run by ci/clusters.sh, which names in ROLLOUT_FARM_CLUSTERS what it has set this machine up for."""

from __future__ import annotations

import os

SET_UP = frozenset(filter(None, os.environ.get("ROLLOUT_FARM_CLUSTERS", "").split(",")))
collect_ignore = [
    name for name, needs in (("test_cluster_ssh.py", "ssh"), ("test_cluster_cut.py", "netns")) if needs not in SET_UP
]
