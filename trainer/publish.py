"""Hugging Face model folders as files: what is copied when a policy is published or exported."""

from __future__ import annotations

import shutil
from pathlib import Path

from farm.durable import REAL_DISK, temporary_name
from farm.errors import UsageError
from farm.policy_log import PolicyLog
from farm.types import PolicyVersion

# The policy log's own record of a version; it describes that version, so it never travels with the files.
_RECORD = "policy.json"


def copy_hf(source: Path, target: Path, *, weights: bool = True) -> None:
    """Copy the files of a model folder (configuration, tokenizer, weights unless ``weights`` is False) into ``target``.

    Raises ``UsageError`` when ``source`` is not a model folder."""
    if not (source / "config.json").is_file():
        raise UsageError(f"{source} is not a model folder: it has no config.json")
    for path in sorted(source.iterdir()):
        is_weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and path.name != _RECORD and (weights or not is_weights):
            shutil.copyfile(path, target / path.name)


def export(policies: PolicyLog, out: Path, *, step: int | None = None) -> PolicyVersion:
    """Copy a published policy (the newest, or of ``step``) to the new folder ``out``, verified against its digest.

    Raises ``UsageError`` when there is no such policy, its files were changed, or ``out`` exists."""
    version = policies.latest() if step is None else policies.get(step)
    if version is None:
        steps = [v.step for v in policies.versions()]
        there = f"there are {', '.join(map(str, steps))}; others were pruned" if steps else "there is none yet"
        raise UsageError(f"{policies.path}: policy {'of any step' if step is None else step} not found; {there}")
    if out.exists():
        raise UsageError(f"{out} exists; name a new folder")
    if not policies.verify(version):
        raise UsageError(
            f"{version.path}: the weights are not those that were published; the disk or someone changed them"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name("." + temporary_name(out.name))
    temporary.mkdir()
    try:
        copy_hf(Path(version.path), temporary)
        REAL_DISK.rename(temporary, out)
    except FileNotFoundError as error:
        raise UsageError(f"{version.path}: was pruned while it was copied ({error}); export the newest") from None
    finally:
        REAL_DISK.remove_tree(temporary)
    return version
