"""Weights on their way to engines: whole, under Hugging Face names, in buckets, with a checksum each.

:func:`outgoing` (through ``Learner.outgoing`` or ``RankedLearner.outgoing``) gathers the weights from all ranks and
gives rank 0 one :class:`Outgoing` after the other; :mod:`trainer.megatron.push` sends them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.buckets import DEFAULT_BUCKET_BYTES, Bucket, plan_buckets
from trainer.megatron.convert import hf_weights, in_buckets, tensor_infos

_CHUNK = 1 << 22  # elements at once, so that a checksum needs 100 MB and not eight times the tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outgoing:
    """``tensors`` in the order of ``bucket.tensors``, contiguous, on the trainer's device."""

    bucket: Bucket
    tensors: Sequence[Tensor]
    checksum: str


def buckets_of(
    hf: Mapping[str, Any], *, max_bytes: int = DEFAULT_BUCKET_BYTES, dtype: str | None = None
) -> list[Bucket]:
    """The buckets in which the model of ``hf`` (its ``config.json``) is pushed."""
    return plan_buckets(tensor_infos(hf, dtype=dtype), max_bytes=max_bytes)


def outgoing(
    weights: Iterable[tuple[str, Tensor]],
    hf: Mapping[str, Any],
    *,
    max_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: str | None = None,
) -> Generator[Outgoing, None, None]:
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
