"""Pinned source distributions: where they are kept, and the work tree a task makes from one.

A source distribution is named by its SHA-256 alone; a file whose digest differs is never read.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from functools import lru_cache
from pathlib import Path

from farm.durable import temporary_name
from farm.errors import UsageError
from farm.types import SdistFiles


def cache_dir() -> Path:
    """``$ROLLOUT_FARM_CACHE/sdists``, else ``$XDG_CACHE_HOME/rollout-farm/sdists``, else under ``~/.cache``."""
    own = os.environ.get("ROLLOUT_FARM_CACHE")
    if own:
        return Path(own) / "sdists"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollout-farm" / "sdists"


def archive_path(sha256: str) -> Path:
    return cache_dir() / f"{sha256}.tar.gz"


def store(sha256: str, data: bytes) -> None:
    """Put a distribution into the cache, whole or not at all. Its digest must have been checked."""
    path = archive_path(sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name(path.name))
    temporary.write_bytes(data)
    temporary.replace(path)


def is_cached(sha256: str) -> bool:
    """Whether the cache has it, whole."""
    path = archive_path(sha256)
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


@lru_cache(maxsize=8)
def files(sha256: str) -> dict[str, bytes]:
    """All regular files of the distribution: path below its top folder -> bytes. Not to be changed by the caller.

    Raises UsageError when it is not in the cache or is not the file that the digest names.
    """
    path = archive_path(sha256)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"source distribution {sha256[:12]} is not at {path}: run `python -m farm.suites.pypi fetch`",
            kind="no_sdist",
        ) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UsageError(f"{path} does not have the digest in its name: delete it and fetch again", kind="bad_sdist")
    return unpack(data)


def unpack(data: bytes) -> dict[str, bytes]:
    """Regular files of a ``.tar.gz`` or ``.tar``, top folder stripped. Nothing is written to disk; links are left
    out."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            stream = archive.extractfile(member) if member.isfile() and path else None
            if stream is not None:
                found[path] = stream.read()
    return found


def work_tree(source: SdistFiles) -> dict[str, bytes]:
    """The files the agent starts from: the distribution with the bug and without what ``remove`` names.

    Raises UsageError when the bug's old text does not occur exactly once.
    """
    kept = {path: data for path, data in files(source.sha256).items() if not path.startswith(source.remove)}
    path, old, new = source.edit
    text = kept.get(path, b"").decode()
    if text.count(old) != 1:
        raise UsageError(f"{source.package} {source.version}: {path} does not hold the text to change exactly once")
    kept[path] = text.replace(old, new).encode()
    return kept
