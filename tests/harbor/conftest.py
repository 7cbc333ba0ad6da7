"""These need the real package ``harbor`` and Python 3.12. They run by ``make test-harbor``, which brings both, and
nowhere else: there none of them is skipped."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("ROLLOUT_FARM_TEST_HARBOR") else ["test_*.py"]
