"""What needs a real SGLang server. ``make test-sglang`` installs one and says where; nothing is collected without."""

from __future__ import annotations

import real_sglang

collect_ignore_glob = [] if real_sglang.PYTHON else ["test_*.py"]
