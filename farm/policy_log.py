"""The policy log: a folder of published policies, written by the trainer and followed by the farm.

    policies/
      log.json            format and schema version
      step-000012/        a Hugging Face model folder, put in place whole by one rename (Rule 2)
        policy.json       step, digest, time of publication, groups consumed
      pruned/             the policy.json of versions whose folder was removed, as step-000003.json
      publisher.lock      held while the one trainer publishes

The digest is a SHA-256 over the weights, the ``*.safetensors`` files (all files when there are none): for each one, by
sorted relative path, the line ``<sha256 of the file>  <path>\\n``. So ``sha256sum *.safetensors | sha256sum`` says it.

Publishing is idempotent: a trainer that crashed after it published repeats the step when it resumes, comes to the same
bytes, and gets the version that is there. Other bytes under a published step are refused, for engines may have loaded
the first ones. Both hold for pruned versions too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farm.durable import REAL_DISK, Disk, FolderLock, claim_folder, storage_errors, temporary_name, write_json
from farm.errors import FarmError, UsageError
from farm.types import PolicyVersion, version_name

FORMAT = "rollout-farm policy log"
SCHEMA_VERSION = 1

_RECORD = "policy.json"
_POLL_S = 0.05
_FOLDER = re.compile(r"step-(\d{6,})")
_PRUNED = "pruned"
_PRUNED_RECORD = re.compile(r"step-(\d{6,})\.json")


class PolicyLog:
    """The policy log in a folder. One process publishes and prunes, any number read."""

    def __init__(self, path: str | Path, *, create: bool = True, disk: Disk = REAL_DISK) -> None:
        """Open the log, and make it where there is none if ``create``.

        Raises :class:`UsageError` for a foreign folder and for another schema version."""
        self.path = Path(path).absolute()
        self._disk = disk
        claim_folder(self.path, marker="log.json", format_name=FORMAT, version=SCHEMA_VERSION, create=create, disk=disk)
        self._known: dict[int, PolicyVersion] = {}

    def publish(self, step: int, write: Callable[[Path], None], *, consumed_groups: int) -> PolicyVersion:
        """Publish what ``write`` puts into the folder that it is given; durable and whole on return.

        A step that is published already with the same bytes is returned as it is. Raises :class:`UsageError` when its
        bytes differ or when another process is publishing, :class:`FarmError` (``disk_full``, ``storage``) when the
        disk fails; what else ``write`` raises passes through. Readers see the step whole or not at all."""
        if step < 0:
            raise UsageError(f"{self.path}: step {step} can't be published; allowed are steps from 0")
        lock = FolderLock(self.path / "publisher.lock", "publisher")
        lock.acquire()
        temporary = self.path / f".{temporary_name(version_name(step))}"
        try:
            with storage_errors(f"{self.path}: cannot publish {version_name(step)}"):
                self._remove_strays()
                temporary.mkdir()
                write(temporary)
                return self._put_in_place(temporary, step, consumed_groups)
        finally:
            self._disk.remove_tree(temporary)
            lock.release()

    def _put_in_place(self, temporary: Path, step: int, consumed_groups: int) -> PolicyVersion:
        files = _files(temporary)
        if not files:
            raise FarmError(f"{self.path}: nothing was written for {version_name(step)}", kind="empty_policy")
        digest = weights_digest(temporary)
        existing = self.get(step) or self._pruned(step)
        if existing is not None:
            if existing.digest != digest or existing.consumed_groups != consumed_groups:
                raise UsageError(
                    f"{existing.path}: {existing.name} is published already with digest {existing.digest[:12]} after "
                    f"{existing.consumed_groups} groups, now {digest[:12]} after {consumed_groups}; "
                    "resume from the checkpoint of this run, or give a new run folder"
                )
            return existing
        for file in files:
            self._disk.sync_file(file)
        record = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "digest": digest,
            "published_at_s": time.time(),
            "consumed_groups": consumed_groups,
        }
        write_json(temporary / _RECORD, record, disk=self._disk)
        for folder in (*filter(Path.is_dir, temporary.rglob("*")), temporary):
            self._disk.sync_folder(folder)
        self._disk.rename(temporary, self._folder(step))
        self._disk.sync_folder(self.path)
        published = self.get(step)
        if published is None:
            raise FarmError(f"{self._folder(step)}: gone right after it was published", kind="storage")
        return published

    def latest(self) -> PolicyVersion | None:
        """The version with the highest step; None before the first."""
        steps = self._steps()
        return self.get(steps[-1]) if steps else None

    def versions(self) -> Sequence[PolicyVersion]:
        """All versions that are there, by step."""
        return [version for step in self._steps() if (version := self.get(step)) is not None]

    def get(self, step: int) -> PolicyVersion | None:
        """The version of ``step``; None when it is not there (not published, or pruned)."""
        if not self._folder(step).is_dir():
            return None
        if step not in self._known:
            try:
                self._known[step] = self._read(self._folder(step) / _RECORD, step)
            except UsageError:
                if not self._folder(step).is_dir():  # pruned while it was read
                    return None
                raise
        return self._known[step]

    def history(self) -> Sequence[PolicyVersion]:
        """All versions that were ever published, by step. The folders of those that were pruned are gone."""
        found = {
            version.step: version for version in self.versions()
        }  # first: what leaves this is in ``pruned`` by then
        for step in _steps_in(self.path / _PRUNED, _PRUNED_RECORD):
            if step not in found and (version := self._pruned(step)) is not None:
                found[step] = version
        return [found[step] for step in sorted(found)]

    async def wait(self, after_step: int, timeout_s: float) -> PolicyVersion | None:
        """The newest version as soon as its step is above ``after_step``; None after ``timeout_s`` seconds without."""
        deadline = time.monotonic() + timeout_s
        while True:
            version = await asyncio.to_thread(self.latest)
            if version is not None and version.step > after_step:
                return version
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await asyncio.sleep(min(_POLL_S, left))

    def verify(self, version: PolicyVersion) -> bool:
        """Whether the weights on disk are those that were published (reads them all)."""
        return weights_digest(Path(version.path)) == version.digest

    def prune(self, *, keep: int) -> list[int]:
        """Remove the folders of old versions; returns their steps. :meth:`history` goes on to know them.

        The newest ``keep`` (1 at least) stay, for engines may be loading them, and the first one, for a trainer that
        resumes starts from it. Raises :class:`FarmError` (``disk_full``, ``storage``)."""
        if keep < 1:
            raise UsageError(f"{self.path}: prune keep={keep}; it must be at least 1")
        old = self._steps()[1:-keep]
        with storage_errors(f"{self.path}: cannot prune"):
            if old and not (self.path / _PRUNED).exists():
                (self.path / _PRUNED).mkdir()
                self._disk.sync_folder(self.path)
            for step in old:
                record = json.loads((self._folder(step) / _RECORD).read_text())
                write_json(self._pruned_record(step), record, disk=self._disk)
                gone = self.path / f".{temporary_name(version_name(step))}"
                self._disk.rename(self._folder(step), gone)  # at once, so that nobody sees half of it
                self._known.pop(step, None)
                self._disk.remove_tree(gone)
        return old

    # ------------------------------------------------------------------------------------------ inside

    def _folder(self, step: int) -> Path:
        return self.path / version_name(step)

    def _steps(self) -> list[int]:
        return _steps_in(self.path, _FOLDER)

    def _pruned(self, step: int) -> PolicyVersion | None:
        place = self._pruned_record(step)
        return self._read(place, step) if place.exists() else None

    def _pruned_record(self, step: int) -> Path:
        return self.path / _PRUNED / f"{version_name(step)}.json"

    def _read(self, place: Path, step: int) -> PolicyVersion:
        try:
            record: dict[str, Any] = json.loads(place.read_text())
            if record["schema_version"] != SCHEMA_VERSION:
                raise UsageError(
                    f"{place}: has schema version {record['schema_version']}, this program reads {SCHEMA_VERSION}; "
                    "use the rollout-farm that wrote it"
                )
            version = PolicyVersion(
                step=int(record["step"]),
                path=str(self._folder(step)),
                digest=str(record["digest"]),
                published_at_s=float(record["published_at_s"]),
                consumed_groups=int(record["consumed_groups"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{place}: unreadable ({error}); it was not published by this program, remove it"
            ) from error
        if version.step != step:
            raise UsageError(f"{place}: says step {version.step}, its name says {step}; it was renamed, remove it")
        return version

    def _remove_strays(self) -> None:
        """What a publisher that died left behind; the lock is held, so nobody is writing."""
        for name in os.listdir(self.path):  # noqa: PTH208
            if name.startswith(".step-") and name.endswith(".tmp"):
                self._disk.remove_tree(self.path / name)


def _steps_in(folder: Path, names: re.Pattern[str]) -> list[int]:
    try:
        matches = [names.fullmatch(name) for name in os.listdir(folder)]  # noqa: PTH208
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in matches if match)


def weights_digest(folder: Path) -> str:
    """The digest of a policy folder's weights, as the module's documentation defines it."""
    files = _files(folder)
    weights = [file for file in files if file.suffix == ".safetensors"] or files
    total = hashlib.sha256()
    for file in weights:
        with file.open("rb") as opened:
            total.update(
                f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.relative_to(folder).as_posix()}\n".encode()
            )
    return total.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Every file below ``folder`` but the record, by relative path."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / _RECORD)
