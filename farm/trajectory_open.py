"""The open file: one landed episode that is not in a shard yet.

It is an Arrow IPC stream (any Arrow reader opens it) followed by a CRC-32 of the stream, so that a file that was torn
or altered in any byte is told from a whole one before it is believed.
"""

from __future__ import annotations

import re
import struct
import zlib

import pyarrow as pa

from farm.errors import UsageError
from farm.trajectory_schema import SCHEMA, check_schema

SUFFIX = ".arrow"

_HEAD = SCHEMA.serialize().to_pybytes()
_HEAD_CHECKSUM = zlib.crc32(_HEAD)
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAGIC = b"RFO1"
_TRAILER = struct.Struct("<4sI")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class TornFileError(Exception):
    """The file is not what was written. The message says how one can tell."""


def file_name(episode_id: str) -> str:
    """Raises :class:`UsageError` for an id that can't be a file name."""
    if not _SAFE_NAME.fullmatch(episode_id):
        raise UsageError(
            f"episode id {episode_id!r}: allowed are 1-200 letters, digits, '_', '-' and '.', no leading dot"
        )
    return episode_id + SUFFIX


def pack(batch: pa.RecordBatch) -> tuple[bytes | memoryview, ...]:
    """The bytes of an open file, in parts: copying them into one costs a tenth of making them."""
    body = memoryview(batch.serialize())
    checksum = zlib.crc32(_END_OF_STREAM, zlib.crc32(body, _HEAD_CHECKSUM))
    return (_HEAD, body, _END_OF_STREAM + _TRAILER.pack(_MAGIC, checksum))


def unpack(data: bytes) -> pa.RecordBatch:
    """The one-row batch of an open file. Raises :class:`TornFileError`."""
    if len(data) < _TRAILER.size:
        raise TornFileError(f"{len(data)} bytes, too short to be whole")
    magic, checksum = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    stream = memoryview(data)[: -_TRAILER.size]
    if magic != _MAGIC:
        raise TornFileError("no end mark, the file was cut short")
    if zlib.crc32(stream) != checksum:
        raise TornFileError("checksum differs, the file was altered")
    try:
        if data.startswith(_HEAD):  # saves parsing the schema, most of the cost of a small file
            batch = pa.ipc.read_record_batch(pa.py_buffer(stream[len(_HEAD) :]), SCHEMA)
        else:
            reader = pa.ipc.open_stream(pa.py_buffer(stream))
            check_schema(reader.schema, "open file")
            batch = reader.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration, UsageError) as error:
        raise TornFileError(str(error)) from error
    if batch.num_rows != 1:
        raise TornFileError(f"{batch.num_rows} rows, expected one")
    return batch
