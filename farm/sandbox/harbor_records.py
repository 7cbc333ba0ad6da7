"""What Harbor environments this host has open, on disk: any process of the farm can end what its owner left (Rule 7).

One file per environment in the state directory, from before its start until it is stopped. ``NAME.json`` is one that
may run; a sweep that takes it away renames it to ``NAME.ended``, by which its owner, when it still lives, knows that it
is over. The file lies there until somebody has stopped the environment, so a sweeper that dies in between leaves it to
the next one; a lock on it keeps two from doing the same work.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from farm.sandbox.state import Process, alive, state_directory, this_process

_FOLDER = "harbor"
_FORGET_S = 24 * 3_600.0  # past its deadline; what could not be stopped until then can't be from here

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """``session`` is Harbor's name of the environment; ``environment`` digests the kind of environment and its options,
    ``folder`` holds its trial, ``network`` says whether it has one."""

    session: str
    owner: str
    owner_process: Process
    deadline_at_s: float
    environment: str
    folder: str
    network: bool


class Records:
    """Those of this user on this host, of one kind of ``environment``."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._folder = state_directory() / _FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def add(self, *, session: str, owner: str, deadline_at_s: float, folder: str, network: bool) -> Record:
        """The record of an environment that this process is about to start."""
        record = Record(
            session=session,
            owner=owner,
            owner_process=this_process(os.getpid()),
            deadline_at_s=deadline_at_s,
            environment=self._environment,
            folder=folder,
            network=network,
        )
        path = self._open(session)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record)))
        fresh.replace(path)
        return record

    def is_over(self, session: str) -> bool:
        """Has a sweep taken it away?"""
        return not self._open(session).exists()

    def remove(self, session: str) -> None:
        """It is stopped."""
        for path in (self._open(session), self._ended(session)):
            path.unlink(missing_ok=True)

    def end(self, session: str) -> None:
        """It is over, whether or not it could be stopped."""
        with contextlib.suppress(FileNotFoundError):
            self._open(session).rename(self._ended(session))

    @contextlib.contextmanager
    def overdue(self, *, now_s: float) -> Iterator[list[Record]]:
        """Those past their deadline or whose owner is dead, and those that an earlier sweep did not get to stop: ended,
        and this sweep's alone while the context is open. ``remove`` those that are stopped."""
        with contextlib.ExitStack() as locks:
            yield [
                record for record in self._doomed(now_s) if locks.enter_context(_locked(self._ended(record.session)))
            ]

    def _doomed(self, now_s: float) -> Iterator[Record]:
        for path in sorted((*self._folder.glob("*.json"), *self._folder.glob("*.ended"))):
            record = _read(path)
            if record is None or record.environment != self._environment:
                continue
            if path.suffix == ".json":
                if record.deadline_at_s > now_s and alive(record.owner_process):
                    continue
                self.end(record.session)
            elif record.deadline_at_s + _FORGET_S < now_s:
                _log.warning("environment %s of %s may be left: not stopped in a day", record.session, record.owner)
                self.remove(record.session)
                continue
            yield record

    def _open(self, session: str) -> Path:
        return self._folder / f"{session}.json"

    def _ended(self, session: str) -> Path:
        return self._folder / f"{session}.ended"


def _read(path: Path) -> Record | None:
    try:
        fields = json.loads(path.read_text())
        return Record(**{**fields, "owner_process": Process(**fields["owner_process"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether ``path`` is there and nobody else has it locked. A lock goes with the process that has it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield path.exists()  # another may have stopped it since it was listed
    finally:
        os.close(handle)
