"""Files that are either there and whole, or not there (Rule 2).

Every change that the two logs make to a disk goes through :class:`Disk`; one method is one step, and a process or a
machine may die before, inside or after any of them. Tests replace it by a disk that does die. The order that makes
a step safe is always the same: write under a temporary name, fsync the file, put it in place (``link`` when the first
one wins, ``rename`` when there is one writer), fsync the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from farm.errors import FarmError, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Disk:
    """The real disk. Errors are ``OSError``; :func:`storage_errors` words them for people."""

    def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        """Create ``path`` (it must not exist), let ``fill`` write it, fsync it."""
        with path.open("xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())

    def sync_file(self, path: Path) -> None:
        """Make a file that someone else wrote durable."""
        self._sync(path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable (links, renames, deletions)."""
        self._sync(path)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file; ``FileExistsError`` when ``target`` is taken: the first one wins."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces a file, or an empty folder, of the target's name."""
        os.rename(source, target)  # noqa: PTH104 - the one place that names the system call

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is fine."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with everything in it; one that is gone already is fine."""
        shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


REAL_DISK = Disk()


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`FarmError` (kind ``disk_full`` or ``storage``) that says what failed where."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = (
                f"{doing}: no space left ({os.strerror(error.errno or 0)}); free some and start again, nothing is lost"
            )
            raise FarmError(message, kind="disk_full") from error
        raise FarmError(f"{doing}: {error}", kind="storage") from error


def temporary_name(stem: str) -> str:
    """A name that no two writers on any host choose alike."""
    return f"{stem}.{os.getpid()}-{secrets.token_hex(6)}.tmp"


def write_json(path: Path, value: Mapping[str, Any], *, disk: Disk = REAL_DISK, first_wins: bool = False) -> None:
    """Put a JSON file in place whole. With ``first_wins`` an existing file stays as it is."""
    text = (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    temporary = path.with_name("." + temporary_name(path.name))
    try:
        disk.write(temporary, lambda file: file.write(text))
        if first_wins:
            if not path.exists():
                _link_if_free(disk, temporary, path)
        else:
            disk.rename(temporary, path)
        disk.sync_folder(path.parent)
    finally:
        disk.unlink(temporary)


def _link_if_free(disk: Disk, source: Path, target: Path) -> None:
    try:
        disk.link(source, target)
    except FileExistsError:
        return


def remove_stray(folder: Path, *, older_than_s: float, disk: Disk = REAL_DISK) -> int:
    """Remove temporary files that a dead writer left behind; returns how many.

    A live writer's file is seconds old at most, so age tells them apart without any lock on the append path.
    """
    removed = 0
    limit = time.time() - older_than_s
    for entry in os.scandir(folder):
        if entry.name.endswith(".tmp") and entry.is_file(follow_symlinks=False):
            try:
                stray = entry.stat().st_mtime < limit
            except FileNotFoundError:
                continue
            if stray:
                disk.unlink(Path(entry.path))
                removed += 1
    return removed


class FolderLock:
    """At most one holder, over all processes of a host; the kernel releases it when the holder dies."""

    def __init__(self, path: Path, role: str) -> None:
        self._path = path
        self._role = role
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Raises :class:`UsageError` at once when somebody else holds it."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UsageError(
                f"{self._path.parent}: process {holder} is the {self._role} already and there can be only one; "
                "stop it, or use another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.release()


def claim_folder(path: Path, *, marker: str, format_name: str, version: int, create: bool, disk: Disk) -> None:
    """Make ``path`` a folder of ours, or check that it is one.

    The marker (JSON: format, schema_version) is the first thing written into a new folder, so a folder without one is
    either empty or somebody else's. Raises :class:`UsageError` for a foreign folder or another schema version.
    """
    place = path / marker
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file, expected the folder of a {format_name}")
    if not place.exists():
        if not create:
            raise UsageError(f"{path}: is not a {format_name} (no {marker}); give the folder that the farm made")
        foreign = [n for n in os.listdir(path) if not n.startswith(".")] if path.exists() else []  # noqa: PTH208
        # Another process may be making the same folder right now: then its marker is there by now.
        if foreign and not place.exists():
            raise UsageError(
                f"{path}: holds {sorted(foreign)[0]!r} but no {marker}, so it is not a {format_name}; "
                "give a new or empty folder"
            )
        with storage_errors(f"{path}: cannot create the {format_name}"):
            path.mkdir(parents=True, exist_ok=True)
            write_json(place, {"format": format_name, "schema_version": version}, disk=disk, first_wins=True)
            disk.sync_folder(path.parent)
    check_marker(place, format_name=format_name, version=version)


def check_marker(place: Path, *, format_name: str, version: int) -> None:
    """Raises :class:`UsageError` unless the marker file names this format and this version."""
    try:
        found = json.loads(place.read_text())
        name, found_version = found["format"], found["schema_version"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{place}: unreadable ({error}); expected the marker of a {format_name}") from error
    if name != format_name:
        raise UsageError(f"{place.parent}: is a {name!r}, expected a {format_name!r}")
    if found_version != version:
        newer = isinstance(found_version, int) and found_version > version
        advice = "use a newer rollout-farm" if newer else "use the rollout-farm that wrote it, or a new folder"
        raise UsageError(f"{place.parent}: has schema version {found_version}, this program reads {version}; {advice}")
