"""The test logs of graded runs, kept in the run folder: what official reports are made of.

One folder per grading, ``<instance>/<key>/``, with what the official harness has of one: ``test_output.txt``,
``eval.sh``, ``patch.diff`` and, where the log could be graded, ``report.json``. The key is made of the patch and of the
end of the log, both of which a landed trajectory holds: so it finds the log of its own grading, and what attempts left
that never landed is found by nobody.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOG, REPORT, PATCH, SCRIPT = "test_output.txt", "report.json", "patch.diff", "eval.sh"
_KEY_LETTERS = 16

_log = logging.getLogger(__name__)


def kept_log(folder: Path, *, instance_id: str, patch: str, log_tail: str) -> Path:
    """Where the files of this grading are, or would be."""
    key = hashlib.sha256(f"{len(patch)} {patch}{log_tail}".encode()).hexdigest()[:_KEY_LETTERS]
    return folder / instance_id.replace("/", "__") / key


def keep(place: Path, *, instance_id: str, patch: str, script: str, log: str, report: Mapping[str, Any] | None) -> None:
    """Write the files, all or none. A grade does not depend on it: where they can't be written, that is only said."""
    files = {PATCH: patch, SCRIPT: script, LOG: log}
    if report is not None:
        files[REPORT] = json.dumps({instance_id: report}, indent=4)
    fresh = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
        for name, text in files.items():
            (fresh / name).write_text(text, encoding="utf-8")
        fresh.chmod(0o755)
        fresh.rename(place)
    except OSError as error:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        if not (place / PATCH).exists():  # else it has been graded to the same end before
            _log.warning("the test log of %s is not kept: %s", instance_id, error)
