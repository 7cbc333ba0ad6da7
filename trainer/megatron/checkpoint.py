"""Checkpoints: one file per step with all that the next step depends on, in place whole or not at all.

``step-000012.pt`` holds the learner's state (weights, optimizer, random state) and the loop's own (step, cursor,
batcher), written under a temporary name, flushed, renamed (Rule 2). Bit-equal on load: tensors are stored as they are.

Why not Megatron's ``dist_checkpointing``: on one rank it buys nothing, its first save in a process costs seconds (it
starts a manager process, and a forked writer that can hang for ever), and its optimizer state comes back without the
step count. Many ranks have a format of their own, :mod:`trainer.megatron.sharded`; a learner knows which one is its.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from farm.durable import REAL_DISK, Disk, storage_errors, temporary_name
from farm.errors import UsageError

SCHEMA_VERSION = 1
_NAME = re.compile(r"step-(\d{6,})\.pt")


def save(
    folder: Path, step: int, *, learner: Mapping[str, Any], loop: Mapping[str, Any], keep: int, disk: Disk = REAL_DISK
) -> Path:
    """Write the checkpoint of ``step``, then remove all but the newest ``keep``. ``loop`` must be plain JSON data.

    Blocks until it is on disk; raises :class:`farm.errors.FarmError` (``disk_full``, ``storage``)."""
    path = folder / f"step-{step:06d}.pt"
    with storage_errors(f"{path}: cannot write the checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / temporary_name(path.name)
        try:
            record = {"schema_version": SCHEMA_VERSION, "step": step, "learner": dict(learner), "loop": dict(loop)}
            disk.write(temporary, lambda file: torch.save(record, file))
            disk.rename(temporary, path)
            disk.sync_folder(folder)
        finally:
            disk.unlink(temporary)
        for old in sorted(steps(folder))[:-keep]:
            disk.unlink(folder / f"step-{old:06d}.pt")
    return path


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    names = (_NAME.fullmatch(p.name) for p in folder.glob("step-*.pt"))
    return sorted(int(match[1]) for match in names if match)


def load(folder: Path) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """(step, learner, loop) of the newest checkpoint; None when there is none. Removes what a crash left half-written.

    Raises ``UsageError`` for a checkpoint of another schema version or that can't be read."""
    for stray in folder.glob("step-*.pt.*.tmp"):
        stray.unlink()
    found = steps(folder)
    if not found:
        return None
    path = folder / f"step-{found[-1]:06d}.pt"
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
        version = record["schema_version"]
    except Exception as error:  # torch raises whatever its unpickler meets
        raise UsageError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error}); remove it") from error
    if version != SCHEMA_VERSION:
        raise UsageError(f"{path}: schema version {version}, this program reads {SCHEMA_VERSION}; use a new run folder")
    return record["step"], record["learner"], record["loop"]
