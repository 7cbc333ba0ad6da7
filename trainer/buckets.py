"""PURE: many tensors in few portions: files of a checkpoint, buckets of a weight push.

Invariant: every tensor is in exactly one portion, in the given order; a portion holds at most ``max_bytes`` unless it
is one larger tensor alone. Equal input gives equal portions, so sender and receiver can plan apart from each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from farm.errors import UsageError
from trainer.shapes import Shape, count

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

DEFAULT_BUCKET_BYTES = 512 << 20
"""What slime, which pushes the same model to the same engines, uses by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """``name`` is a Hugging Face name, ``dtype`` a key of ``DTYPE_BYTES``."""

    name: str
    dtype: str
    shape: Shape

    @property
    def bytes(self) -> int:
        return count(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One portion. ``number`` counts from 0."""

    number: int
    tensors: tuple[TensorInfo, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


def plan_buckets(tensors: Iterable[TensorInfo], *, max_bytes: int = DEFAULT_BUCKET_BYTES) -> list[Bucket]:
    """Fill one portion after the other. Raises ``UsageError`` for a limit below 1 byte and for a name given twice."""
    if max_bytes < 1:
        raise UsageError(f"bucket size is {max_bytes} bytes; allowed: 1 or more")
    buckets: list[Bucket] = []
    names: set[str] = set()
    portion: list[TensorInfo] = []
    filled = 0
    for tensor in tensors:
        if tensor.name in names:
            raise UsageError(f"{tensor.name} is there twice; every weight is sent once")
        names.add(tensor.name)
        if portion and filled + tensor.bytes > max_bytes:
            buckets.append(Bucket(number=len(buckets), tensors=tuple(portion)))
            portion, filled = [], 0
        portion.append(tensor)
        filled += tensor.bytes
    if portion:
        buckets.append(Bucket(number=len(buckets), tensors=tuple(portion)))
    return buckets
