"""Farm and trainer are started side by side, in any order: what one needs of the other is waited for, for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from farm.errors import UsageError
from farm.policy_log import PolicyLog
from farm.run_folder import RunFolder
from farm.types import PolicyVersion
from trainer.publish import copy_hf
from trainer.tail import POLL_S


def await_run(path: Path, *, wait_s: float, stop: threading.Event, say: Callable[[str], None]) -> RunFolder:
    """The run at ``path``, once a farm has laid it out. Raises ``UsageError`` after ``wait_s`` seconds, and at once for
    a folder that is something else."""
    give_up_at = time.monotonic() + wait_s
    said = False
    while not (path / "config.json").exists() and time.monotonic() < give_up_at and not _foreign(path):
        if not said:
            say(f"waiting up to {wait_s:g} s for a farm to start on {path}")
            said = True
        if stop.wait(POLL_S):
            break
    return RunFolder.open(path)


def _foreign(path: Path) -> bool:
    """Whether something is there that no farm is about to turn into a run (it writes run.json before all else)."""
    if not path.is_dir():
        return path.exists()
    names = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
    return bool(names) and not (path / "run.json").exists()


def first_policy(policies: PolicyLog, folder: Path | None, *, wait_s: float, stop: threading.Event) -> PolicyVersion:
    """Policy 0: the published one, else ``folder`` published as such, else the one that the farm publishes in time.

    The farm may publish the same folder at the same moment: whoever is second finds it there. Raises ``UsageError``."""
    give_up_at = time.monotonic() + wait_s
    while (first := policies.get(0)) is None:
        if folder is not None:
            try:
                return policies.publish(0, lambda into: copy_hf(folder, into), consumed_groups=0)
            except UsageError:
                if policies.get(0) is None and time.monotonic() > give_up_at:
                    raise
                if not (folder / "config.json").is_file():
                    raise
        elif time.monotonic() > give_up_at:
            raise UsageError(
                f"{policies.path}: no policy was published within {wait_s:g} s; start the farm on this run folder, or "
                "give the first policy with --policy DIR"
            )
        if stop.wait(POLL_S):
            raise UsageError(f"{policies.path}: stopped before there was a first policy; start again")
    return first
