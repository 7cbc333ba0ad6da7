"""These run in `make test-sandboxes`, which brings what they need, and nowhere else: there none of them is skipped."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("ROLLOUT_FARM_BACK_ENDS") else ["test_*.py"]
