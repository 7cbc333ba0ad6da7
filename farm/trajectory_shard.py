"""Sealed shards: ``shard-00000012.parquet`` and, beside it, ``shard-00000012.json`` (bytes, SHA-256, episode ids).

The Parquet file alone is the truth: it exists once it is whole (Rule 2). The sidecar spares readers the hashing, and
workers the opening of every shard to know what has landed; it is put in place *before* its shard, and made up for when
somebody copied the Parquet files alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from farm.durable import Disk, storage_errors, write_json
from farm.errors import FarmError
from farm.trajectory_schema import check_schema
from farm.types import Shard

# A reader holds two row groups in memory at once.
_GROUP_BYTES = 16 << 20
_GROUP_ROWS = 1024

# Columns whose values repeat. A dictionary of log-probs or of token ids costs three times what zstd takes for them, and
# the file gets no smaller.
_DICTIONARY = [
    "episode_id",
    "group_id",
    "instance_id",
    "task_digest",
    "dataset",
    "repo",
    "strata.key_value.key",
    "strata.key_value.value",
    "purpose",
    "worker",
    "engine_url",
    "outcome_kind",
    "evidence.statuses.key_value.key",
    "evidence.statuses.key_value.value",
    "failure_boundary",
    "failure_kind",
    "end_reason",
    "turns.list.element.finish_reason",
    "turns.list.element.action",
    "timeline.list.element.name",
    "prior.list.element.boundary",
]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:08d}.parquet"


class _Hashing:
    """A file that hashes what is written through it (Parquet is written front to back)."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        written = self._file.write(data)
        self.bytes += written
        return written

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """The file belongs to the disk, which syncs it first."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def write_shard(folder: Path, number: int, table: pa.Table, *, disk: Disk) -> Shard:
    """Make ``table`` the shard ``number``: durable, whole and visible on return; not there at all before."""
    path = shard_path(folder, number)
    temporary = folder / f".{path.name}.tmp"
    disk.unlink(temporary)
    done: list[_Hashing] = []

    def fill(file: BinaryIO) -> None:
        hashing = _Hashing(file)
        rows_per_group = max(1, min(_GROUP_ROWS, _GROUP_BYTES * table.num_rows // max(1, table.nbytes)))
        pq.write_table(
            table,
            hashing,
            row_group_size=rows_per_group,
            compression="zstd",
            compression_level=1,
            use_dictionary=_DICTIONARY,
            write_page_checksum=True,
        )
        done.append(hashing)

    try:
        with storage_errors(f"{path}: cannot seal"):
            disk.write(temporary, fill)
            shard = Shard(
                number=number,
                path=str(path),
                rows=table.num_rows,
                bytes=done[0].bytes,
                digest=done[0].sha256.hexdigest(),
            )
            sidecar = {
                "number": number,
                "rows": shard.rows,
                "bytes": shard.bytes,
                "sha256": shard.digest,
                "episodes": table.column("episode_id").to_pylist(),
            }
            write_json(path.with_suffix(".json"), sidecar, disk=disk)
            disk.rename(temporary, path)
            disk.sync_folder(folder)
    finally:
        disk.unlink(temporary)
    return shard


def load_shard(folder: Path, number: int) -> tuple[Shard, Sequence[str]] | None:
    """Shard ``number`` and its episode ids in the order of its rows; None when it has not been sealed."""
    path = shard_path(folder, number)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
        digest, episodes = str(sidecar["sha256"]), list(sidecar["episodes"])
        known = sidecar["bytes"] == size
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        digest, episodes = digest_of(path), [row["episode_id"] for row in read_columns(path, ["episode_id"])]
    return Shard(number=number, path=str(path), rows=len(episodes), bytes=size, digest=digest), episodes


def digest_of(path: Path) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_columns(path: Path, names: list[str]) -> list[dict[str, Any]]:
    """Some columns of a shard as dictionaries, one per row."""
    with _corruption(path):
        rows: list[dict[str, Any]] = _open(path).read(names, use_threads=False).to_pylist()
    return rows


def read_batches(path: Path, start_row: int) -> Iterator[pa.RecordBatch]:
    """The rows of a shard from ``start_row`` on, by row groups. Raises :class:`FarmError` (``corrupt_shard``)."""
    file = _open(path)
    groups = []
    before = 0
    for number in range(file.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        if before + rows > start_row:
            groups.append((number, max(0, start_row - before)))
        before += rows

    def read(group: int, skip: int) -> list[pa.RecordBatch]:
        with _corruption(path):
            batches: list[pa.RecordBatch] = file.read_row_group(group, use_threads=False).slice(skip).to_batches()
        return batches

    if len(groups) < 2:
        for group in groups:
            yield from read(*group)
        return
    # Decompression lets go of the interpreter: it goes on, one group ahead, while the caller makes records.
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(read, *groups[0])
        for following in groups[1:]:
            ready, coming = coming.result(), pool.submit(read, *following)
            yield from ready
        yield from coming.result()


def _open(path: Path) -> Any:
    with _corruption(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        check_schema(file.schema_arrow, str(path))
    return file


@contextmanager
def _corruption(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        message = f"{path}: unreadable ({error}); restore it from a copy, its digest is in the .json beside it"
        raise FarmError(message, kind="corrupt_shard", retryable=False) from error
