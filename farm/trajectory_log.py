"""The trajectory log: a folder that many workers append to, one sealer seals and any number of readers follow.

    trajectories/
      log.json                 format and schema version
      open/<episode id>.arrow  landed, not sealed yet: one file per episode, put in place by link: first wins
      shard-00000012.parquet   sealed, numbered without gaps from 0; all that readers see (Rule 2)
      shard-00000012.json      its rows, bytes and SHA-256
      quarantine/              open files that were not whole, each with the reason
      sealer.lock              held by the one sealer

Invariants, over any interleaving of appends, seals and crashes: an episode whose append returned True is in the log; no
episode is in the sealed log twice; a shard never changes; a reader's cursor only grows. What makes them hold:

* An append is durable before it returns: the file is fsynced, linked, and the folder is fsynced. A worker's episode
  costs seconds of engine time and the two fsyncs under a millisecond, so none is given up to a power cut.
* The sealer renames a shard into place *before* it deletes the open files in it. So an append that found its name free
  looks at the shards once more: if the episode is in one by now, it lost.
* After a crash in between, the open files that are in a shard already are deleted by the next ``seal``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import pyarrow as pa

from farm.durable import REAL_DISK, Disk, FolderLock, claim_folder, remove_stray, storage_errors, temporary_name
from farm.errors import UsageError
from farm.trajectory_codec import decode, encode
from farm.trajectory_open import SUFFIX, TornFileError, file_name, pack, unpack
from farm.trajectory_schema import SCHEMA_VERSION
from farm.trajectory_shard import digest_of, load_shard, read_batches, read_columns, write_shard
from farm.types import Cursor, Shard, Trajectory

FORMAT = "rollout-farm trajectory log"

_POLL_S = 0.05
_STRAY_S = 600.0  # a temporary file this old has no living writer
_APPEND_BATCH = 256
# How much is decoded at once: what a reader holds beside its row group. The records of half a megabyte stay in a core's
# cache until the reader has them; those of ten megabytes cost 1.7 times the time.
_READ_ROWS = 32
_READ_BYTES = 1 << 19

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What has landed but is not sealed. ``oldest_at_s``: wall-clock time of the first; None when there is none."""

    rows: int
    bytes: int
    oldest_at_s: float | None


class DirectoryLog:
    """The trajectory log in a folder; implements ``protocols.TrajectoryLog``.

    Any number of processes on hosts that share the folder may append and read. Threads may share one object.
    """

    def __init__(self, path: str | Path, *, create: bool = True, disk: Disk = REAL_DISK) -> None:
        """Open the log, and make it where there is none if ``create``.

        Raises :class:`UsageError` for a foreign folder and for another schema version."""
        self.path = Path(path).absolute()
        self._disk = disk
        claim_folder(self.path, marker="log.json", format_name=FORMAT, version=SCHEMA_VERSION, create=create, disk=disk)
        self._open = self.path / "open"
        self._temporary = self.path / "open" / "tmp"
        self._quarantine = self.path / "quarantine"
        for folder in (self._open, self._temporary, self._quarantine):
            folder.mkdir(exist_ok=True)
        self._lock = FolderLock(self.path / "sealer.lock", "sealer")
        self._sealing = threading.Lock()
        self._sealed = _SealedIndex(self.path)

    # ------------------------------------------------------------------------------------------ append

    def append(self, trajectory: Trajectory) -> bool:
        """Make it durable. False when the episode has already landed (the new one is discarded).

        Raises :class:`FarmError`: ``disk_full``, ``storage``, ``unstorable``. Blocks for about a millisecond."""
        return self._append([trajectory])[0]

    def append_many(self, trajectories: Iterable[Trajectory]) -> list[bool]:
        """``append`` for many, in order, at a lower price each. When it raises, some may have landed."""
        rest = iter(trajectories)
        landed: list[bool] = []
        while batch := list(islice(rest, _APPEND_BATCH)):
            landed += self._append(batch)
        return landed

    def _append(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        names = [file_name(t.episode_id) for t in trajectories]
        seen = self._sealed.refresh()
        staged: dict[int, Path] = {}
        won: set[int] = set()
        with storage_errors(f"{self.path}: cannot append"):
            try:
                for i, trajectory in enumerate(trajectories):
                    if trajectory.episode_id in self._sealed or (self._open / names[i]).exists():
                        continue
                    parts = pack(encode([trajectory]))
                    staged[i] = self._temporary / temporary_name(trajectory.episode_id)
                    self._disk.write(staged[i], partial(_write_parts, parts))
                for i, temporary in staged.items():
                    try:
                        self._disk.link(temporary, self._open / names[i])
                    except FileExistsError:
                        continue
                    won.add(i)
                if won:
                    self._disk.sync_folder(self._open)
            finally:
                for temporary in staged.values():
                    self._disk.unlink(temporary)
            if self._sealed.refresh() > seen:
                for i in sorted(won):
                    if self._was_sealed_before(trajectories[i], seen):
                        self._disk.unlink(self._open / names[i])
                        won.discard(i)
        return [i in won for i in range(len(trajectories))]

    def _was_sealed_before(self, trajectory: Trajectory, seen: int) -> bool:
        """Whether one of the shards from ``seen`` on holds this episode, and not by this very append."""
        number = self._sealed.shard_of(trajectory.episode_id)
        if number is None or number < seen:
            return number is not None
        names = ["attempt", "worker", "started_at_s", "ended_at_s"]
        rows = read_columns(Path(self._sealed.shards[number].path), ["episode_id", *names])
        mine = {"episode_id": trajectory.episode_id, **{name: getattr(trajectory, name) for name in names}}
        return mine not in rows

    # -------------------------------------------------------------------------------------------- seal

    def seal(self) -> Shard | None:
        """Move everything appended so far into one sealed shard; None when there is nothing.

        Rows are ordered by ``ended_at_s``, then episode id. The first call makes this object the sealer until it is
        closed; it raises :class:`UsageError` when another one is. It also clears away what a crash left behind. All
        open rows are in memory at once: seal by size."""
        with self._sealing, storage_errors(f"{self.path}: cannot seal"):
            self._lock.acquire()
            for folder in (self._temporary, self.path):
                remove_stray(folder, older_than_s=_STRAY_S, disk=self._disk)
            number = self._sealed.refresh()
            rows: list[tuple[float, str, pa.RecordBatch]] = []
            for episode_id in self._open_ids():
                if episode_id in self._sealed:
                    self._disk.unlink(self._open / file_name(episode_id))
                    continue
                batch = self._read_open(episode_id)
                if batch is not None:
                    rows.append((batch.column("ended_at_s")[0].as_py(), episode_id, batch))
            if not rows:
                return None
            rows.sort(key=lambda row: row[:2])
            table = pa.Table.from_batches([batch for _, _, batch in rows]).combine_chunks()
            shard = write_shard(self.path, number, table, disk=self._disk)
            self._sealed.refresh()
            for _, episode_id, _ in rows:
                self._disk.unlink(self._open / file_name(episode_id))
            return shard

    def _read_open(self, episode_id: str) -> pa.RecordBatch | None:
        """The row of an open file; None when it was taken back by its writer, or is torn and goes to quarantine."""
        path = self._open / file_name(episode_id)
        try:
            batch = unpack(path.read_bytes())
            named = batch.column("episode_id")[0].as_py()
            if named != episode_id:
                raise TornFileError(f"holds episode {named}")
        except FileNotFoundError:
            return None
        except TornFileError as error:
            _log.warning("%s: quarantined: %s", path, error)
            kept = self._quarantine / f"{path.name}.{time.time_ns()}"
            kept.with_name(kept.name + ".reason.txt").write_text(f"{error}\n")
            self._disk.rename(path, kept)
            return None
        return batch

    def close(self) -> None:
        """Stop being the sealer. Appending and reading go on to work."""
        self._lock.release()

    def __enter__(self) -> DirectoryLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- state

    def landed(self) -> frozenset[str]:
        """Episode ids that have landed, sealed or not. Costs one folder listing, and each new shard once.

        An open file that turns out to be torn leaves this set at the next ``seal``."""
        opened = self._open_ids()  # first: what leaves this list is in a shard by then
        self._sealed.refresh()
        return self._sealed.ids.union(opened)

    def pending(self) -> Pending:
        """How much waits for ``seal``: what sealing by size or age goes by."""
        sizes, times = 0, []
        for entry in os.scandir(self._open):
            if entry.name.endswith(SUFFIX):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                sizes += status.st_size
                times.append(status.st_mtime)
        return Pending(rows=len(times), bytes=sizes, oldest_at_s=min(times, default=None))

    def _open_ids(self) -> list[str]:
        return [name.removesuffix(SUFFIX) for name in os.listdir(self._open) if name.endswith(SUFFIX)]  # noqa: PTH208

    def shards(self, since: int = 0) -> Sequence[Shard]:
        """The sealed shards from number ``since`` on."""
        return self._sealed.shards[since : self._sealed.refresh()]

    def find(self, episode_id: str) -> Trajectory | None:
        """The trajectory of a landed episode, sealed or not; None when it has not landed."""
        try:
            opened = (self._open / file_name(episode_id)).read_bytes()
        except FileNotFoundError:
            opened = b""
        self._sealed.refresh()
        number = self._sealed.shard_of(episode_id)
        if number is not None:
            rows = self.read(Cursor(shard=number))
            return next(trajectory for _, trajectory in rows if trajectory.episode_id == episode_id)
        try:
            return decode(unpack(opened))[0] if opened else None
        except TornFileError as error:
            raise UsageError(
                f"{self._open}: the file of episode {episode_id} is torn ({error}); seal the log"
            ) from error

    def verify(self, shard: Shard) -> bool:
        """Whether a shard's file is, byte for byte, the one that was sealed."""
        return digest_of(Path(shard.path)) == shard.digest

    # -------------------------------------------------------------------------------------------- read

    def read(self, cursor: Cursor) -> Iterator[tuple[Cursor, Trajectory]]:
        """Sealed rows from ``cursor`` on, each with the cursor *after* it.

        Raises :class:`UsageError` for a cursor that is not of this log, :class:`FarmError` (``corrupt_shard``)."""
        for rows in self._chunks(cursor):
            yield from rows

    async def tail(self, cursor: Cursor) -> AsyncIterator[tuple[Cursor, Trajectory]]:
        """Like ``read``, for ever: waits for new shards. Reads in a thread; may be cancelled at any point."""
        while True:
            chunks = self._chunks(cursor)
            while (rows := await asyncio.to_thread(next, chunks, None)) is not None:
                for cursor, trajectory in rows:  # the next round starts from this cursor
                    yield cursor, trajectory
            await asyncio.sleep(_POLL_S)

    def _chunks(self, cursor: Cursor) -> Iterator[list[tuple[Cursor, Trajectory]]]:
        shards = self.shards()
        if cursor.shard > len(shards) or (cursor.shard < len(shards) and cursor.row > shards[cursor.shard].rows):
            raise UsageError(
                f"{self.path}: cursor at shard {cursor.shard}, row {cursor.row} is past the end "
                f"({len(shards)} shards); it belongs to another log: use the run folder it was saved with"
            )
        row = cursor.row
        for shard in shards[cursor.shard :]:
            for batch in read_batches(Path(shard.path), row):
                count = max(1, min(_READ_ROWS, _READ_BYTES * batch.num_rows // max(1, batch.nbytes)))
                for start in range(0, batch.num_rows, count):
                    chunk = []
                    for trajectory in decode(batch.slice(start, count)):
                        row += 1
                        after = Cursor(shard=shard.number, row=row)
                        if row == shard.rows:
                            after = Cursor(shard=shard.number + 1)
                        chunk.append((after, trajectory))
                    yield chunk
            row = 0


def _write_parts(parts: Iterable[bytes | memoryview], file: BinaryIO) -> None:
    file.writelines(parts)


class _SealedIndex:
    """What is in the shards, looked up once each. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._number_of: dict[str, int] = {}
        self.shards: list[Shard] = []
        self.ids: frozenset[str] = frozenset()

    def refresh(self) -> int:
        """Take in new shards (one ``stat`` when there is none); returns the number of shards."""
        with self._lock:
            before = len(self.shards)
            while (found := load_shard(self._folder, len(self.shards))) is not None:
                shard, episodes = found
                self._number_of.update(dict.fromkeys(episodes, shard.number))
                self.shards.append(shard)
            if len(self.shards) > before:
                self.ids = frozenset(self._number_of)
            return len(self.shards)

    def shard_of(self, episode_id: str) -> int | None:
        return self._number_of.get(episode_id)

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._number_of
