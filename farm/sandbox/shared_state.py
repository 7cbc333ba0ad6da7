"""A small JSON file that several processes change in turn, under a lock that the kernel frees when its holder dies.

On a folder that several hosts mount this holds between them too, as far as that file system honours ``flock`` (local
ones, NFS since version 4); times in it are wall-clock, so hosts must agree on the time to within a second or so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farm.durable import write_json


@contextlib.contextmanager
def locked(path: Path) -> Iterator[dict[str, Any]]:
    """The object in ``path`` ({} when there is none, or it is torn); what the body makes of it is written back whole.

    Blocks while somebody else is inside, so keep the body short. Raises ``OSError``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        value = peek(path)
        before = json.dumps(value, sort_keys=True)
        yield value
        if json.dumps(value, sort_keys=True) != before:
            write_json(path, value)
    finally:
        os.close(descriptor)


def peek(path: Path) -> dict[str, Any]:
    """The object in ``path`` as it is; {} when there is none, or it is torn."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether the lock at ``path`` is ours in the body; never waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        yield mine
    finally:
        os.close(descriptor)
