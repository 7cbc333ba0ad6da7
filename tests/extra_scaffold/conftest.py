"""Tests with mini-swe-agent. They run by ``ci/mini_swe_agent.sh``, which names its Python, and skip none."""

import os

if "ROLLOUT_FARM_MINI_PYTHON" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
