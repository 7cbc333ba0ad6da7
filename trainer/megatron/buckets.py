"""Weights on their way to engines: whole, under Hugging Face names, in buckets, with a checksum each.

Sending side: :func:`outgoing` (through ``Learner.outgoing`` or ``RankedLearner.outgoing``) gathers the weights from all
ranks and gives rank 0 one :class:`Outgoing` after the other. Whoever speaks to engines takes it from there: announce
``bucket`` (names, types, shapes) and ``checksum``, then :func:`send` over the group that holds trainer and engines; the
other side is :func:`receive`. Both sides can plan the same buckets from ``config.json`` alone.

Nothing here waits without a limit: :func:`send` and :func:`receive` raise ``BucketError`` after ``timeout_s``, when the
other side refused, hangs or is gone. A group over which a time-out was met must be given up; the trainer goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from farm.errors import FarmError
from trainer.buckets import DEFAULT_BUCKET_BYTES, Bucket, plan_buckets
from trainer.megatron.convert import DTYPES, hf_weights, in_buckets, tensor_infos

_CHUNK = 1 << 22  # elements at once, so that a checksum needs 100 MB and not eight times the tensor


class BucketError(FarmError):
    """A bucket did not get to the other side, or not as it was sent."""

    default_kind = "bucket"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outgoing:
    """``tensors`` in the order of ``bucket.tensors``, contiguous, on the trainer's device."""

    bucket: Bucket
    tensors: Sequence[Tensor]
    checksum: str


def buckets_of(
    hf: Mapping[str, Any], *, max_bytes: int = DEFAULT_BUCKET_BYTES, dtype: str | None = None
) -> list[Bucket]:
    """The buckets in which the model of ``hf`` (its ``config.json``) is pushed, the same on both sides."""
    return plan_buckets(tensor_infos(hf, dtype=dtype), max_bytes=max_bytes)


def outgoing(
    weights: Iterable[tuple[str, Tensor]],
    hf: Mapping[str, Any],
    *,
    max_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: str | None = None,
) -> Iterator[Outgoing]:
    """Whole Megatron ``weights`` (:func:`trainer.megatron.sharding.whole_weights`) as buckets, one held at a time."""
    planned = buckets_of(hf, max_bytes=max_bytes, dtype=dtype)
    for bucket, tensors in in_buckets(hf_weights(weights, hf, dtype=dtype), planned):
        yield Outgoing(bucket=bucket, tensors=tensors, checksum=checksum(tensors))


def checksum(tensors: Iterable[Tensor]) -> str:
    """16 hex digits over the bytes of ``tensors``, in order; made where the tensors are.

    Sum over all 32-bit words ``w`` of ``(w + 1) * odd(position)`` modulo 2^64: integers, so the order of addition does
    not matter and every device gets the same; a changed bit, swapped words or swapped tensors change it. It is no
    protection against malice. (A tensor whose bytes are no multiple of 4 is filled up with zeros.)"""
    total, position = 0, 0
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if raw.numel() % 4:
            raw = torch.cat([raw, raw.new_zeros(4 - raw.numel() % 4)])
        elif raw.storage_offset() % 4:
            raw = raw.clone()
        words = raw.view(torch.int32)
        for chunk in words.split(_CHUNK):
            at = torch.arange(position, position + chunk.numel(), dtype=torch.int64, device=chunk.device)
            # An odd factor can be undone modulo 2^64, so no single change can cancel out. Overflow wraps, as is meant.
            factors = (at * 0x1E3779B97F4A7C15).bitwise_or_(1)
            total += int(((chunk.to(torch.int64) + 1) * factors).sum())
            position += chunk.numel()
    return f"{total % (1 << 64):016x}"


def send(tensors: Sequence[Tensor], *, group: Any, source: int, timeout_s: float) -> None:
    """Broadcast the tensors of a bucket from rank ``source`` of ``group``. Raises :class:`BucketError` after
    ``timeout_s`` seconds in all."""
    _broadcast(tensors, group=group, source=source, timeout_s=timeout_s, doing="sending")


def receive(
    bucket: Bucket, expected: str, *, group: Any, source: int, timeout_s: float, device: str = "cpu"
) -> list[Tensor]:
    """The tensors of ``bucket`` from rank ``source`` of ``group``. Raises :class:`BucketError` after ``timeout_s``, or
    (``checksum``) when they are not those that were sent."""
    tensors = [torch.empty(info.shape, dtype=DTYPES[info.dtype], device=device) for info in bucket.tensors]
    _broadcast(tensors, group=group, source=source, timeout_s=timeout_s, doing="receiving")
    found = checksum(tensors)
    if found != expected:
        raise BucketError(
            f"bucket {bucket.number} ({bucket.tensors[0].name} …): checksum {found}, sent was {expected}; the weights "
            "must not be used",
            kind="checksum",
        )
    return tensors


def _broadcast(tensors: Sequence[Tensor], *, group: Any, source: int, timeout_s: float, doing: str) -> None:
    try:
        works = [torch.distributed.broadcast(t, group=group, group_src=source, async_op=True) for t in tensors]
        for work in works:
            work.wait(timedelta(seconds=timeout_s))
        if tensors and tensors[0].is_cuda:
            torch.cuda.synchronize()
    except RuntimeError as error:
        what = str(error).strip().splitlines()[0][:200]
        raise BucketError(
            f"{doing} weights did not end within {timeout_s:g} s ({what}); the group is given up", kind="bucket_timeout"
        ) from error
