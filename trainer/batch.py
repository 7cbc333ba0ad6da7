"""PURE: trajectories to token sequences to micro-batches, padded or packed, shared out over ranks.

Invariant: the ids of a sequence are the concatenation of what the engine was given and what it sampled, in order, and
nothing else (Rule 4); the loss covers sampled ids only, each with the log-probability recorded when it was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from farm.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """One segment of a trajectory. ``ids`` [L]; ``sampled`` [L] marks sampled ids, ``logprobs`` [L] holds their
    recorded log-probabilities (0 elsewhere); ``advantage`` is that of the whole trajectory."""

    ids: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """``ids``, ``labels`` (the next id) and ``mask`` (loss here) are [B, T], padded on the right with id 0;
    ``old_logprobs`` and ``advantages`` are [N], in row-major order of the mask. Packed, B is 1 and sequence i is at
    [``bounds[i]``, ``bounds[i + 1]``) of T."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    mask: NDArray[np.bool_]
    old_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    bounds: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """Loss tokens."""
        return len(self.advantages)


def sequences(trajectory: Trajectory, *, advantage: float = 0.0) -> list[TokenSequence]:
    """One sequence for each segment that has sampled ids. Raises ``ValueError`` when a turn's log-probabilities do not
    match its ids or are not finite."""
    segments: dict[int, tuple[list[int], list[bool], list[float]]] = {}
    for turn in trajectory.turns:
        if len(turn.output_ids) != len(turn.output_logprobs):
            raise ValueError(
                f"episode {trajectory.episode_id}: {len(turn.output_ids)} sampled ids but "
                f"{len(turn.output_logprobs)} log-probabilities"
            )
        ids, sampled, logprobs = segments.setdefault(turn.segment, ([], [], []))
        context = len(turn.context_ids)
        ids += turn.context_ids
        ids += turn.output_ids
        sampled += [False] * context + [True] * len(turn.output_ids)
        logprobs += [0.0] * context
        logprobs += turn.output_logprobs
    out = []
    for ids, sampled, logprobs in segments.values():
        values = np.asarray(logprobs, dtype=np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"episode {trajectory.episode_id}: a recorded log-probability is not finite")
        if any(sampled):
            out.append(
                TokenSequence(
                    ids=np.asarray(ids, dtype=np.int64),
                    sampled=np.asarray(sampled, dtype=np.bool_),
                    logprobs=values,
                    advantage=advantage,
                )
            )
    return out


def micro_batches(
    items: Iterable[TokenSequence], *, max_tokens: int, loss_on_all: bool = False, packed: bool = False
) -> list[MicroBatch]:
    """Group sequences of like length so that rows x longest <= ``max_tokens``, or, ``packed``, any sequences so that
    the sum of their lengths is (one longer sequence stands alone).

    The order depends on the sequences alone, so equal input gives equal batches. ``loss_on_all`` takes every id but
    the first into the loss, not sampled ids only. Sequences without a loss token are left out.
    """
    usable = [s for s in items if len(s.ids) > 1 and (loss_on_all or s.sampled[1:].any())]
    lengths = [len(s.ids) - 1 for s in usable]
    if packed:
        return [_packed([usable[n] for n in part], loss_on_all) for part in pack(lengths, max_tokens=max_tokens)]
    parts = split(lengths, max_tokens=max_tokens)
    return [_padded([usable[n] for n in part], loss_on_all) for part in parts]


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Which sequences are packed into one micro-batch, by their number in ``lengths``: the longest first, each into the
    first that has room. At most 11/9 of the fewest possible, and one (first-fit decreasing)."""
    parts: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        fit = next((i for i, left in enumerate(room) if lengths[number] <= left), None)
        if fit is None:
            parts.append([number])
            room.append(max_tokens - lengths[number])
        else:
            parts[fit].append(number)
            room[fit] -= lengths[number]
    return parts


def share(batches: Sequence[MicroBatch], rank: int, ranks: int) -> list[MicroBatch]:
    """The micro-batches of data rank ``rank``: every ``ranks``-th, so that long ones are spread. All ranks get equally
    many, for they meet in every one of them: what is missing is filled with one blank token that has no loss."""
    mine = list(batches[rank::ranks])
    blanks = -(-len(batches) // ranks) - len(mine)
    packed = bool(batches) and batches[0].bounds is not None
    return mine + [_blank(packed)] * blanks


def aligned(batch: MicroBatch, multiple: int) -> MicroBatch:
    """``batch`` with padding on the right so that its length is a multiple (sequence parallelism cuts it evenly)."""
    length = batch.ids.shape[1]
    more = -length % multiple
    if not more:
        return batch
    blank = np.zeros((batch.ids.shape[0], more), np.int64)
    return replace(
        batch,
        ids=np.concatenate([batch.ids, blank], axis=1),
        labels=np.concatenate([batch.labels, blank], axis=1),
        mask=np.concatenate([batch.mask, blank.astype(np.bool_)], axis=1),
        bounds=None if batch.bounds is None else (*batch.bounds, length + more),
    )


def split(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Which sequences share a micro-batch, by their number in ``lengths``: shortest first, and as many as keep
    rows x longest <= ``max_tokens``."""
    parts: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if parts and (len(parts[-1]) + 1) * lengths[number] <= max_tokens:
            parts[-1].append(number)
        else:
            parts.append([number])
    return parts


def _padded(rows: Sequence[TokenSequence], loss_on_all: bool) -> MicroBatch:
    shape = (len(rows), len(rows[-1].ids) - 1)  # the last row is the longest
    ids, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask, old, advantages = np.zeros(shape, np.bool_), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        n = len(row.ids) - 1
        ids[i, :n], labels[i, :n] = row.ids[:-1], row.ids[1:]
        mask[i, :n] = True if loss_on_all else row.sampled[1:]
        old[i, :n], advantages[i, :n] = row.logprobs[1:], row.advantage
    return MicroBatch(ids=ids, labels=labels, mask=mask, old_logprobs=old[mask], advantages=advantages[mask])


def _packed(rows: Sequence[TokenSequence], loss_on_all: bool) -> MicroBatch:
    single = [_padded([row], loss_on_all) for row in rows]
    ends = np.cumsum([batch.ids.shape[1] for batch in single])
    return MicroBatch(
        ids=np.concatenate([batch.ids for batch in single], axis=1),
        labels=np.concatenate([batch.labels for batch in single], axis=1),
        mask=np.concatenate([batch.mask for batch in single], axis=1),
        old_logprobs=np.concatenate([batch.old_logprobs for batch in single]),
        advantages=np.concatenate([batch.advantages for batch in single]),
        bounds=(0, *(int(end) for end in ends)),
    )


def _blank(packed: bool) -> MicroBatch:
    none = np.zeros(0, np.float32)
    ids = np.zeros((1, 1), np.int64)
    return MicroBatch(
        ids=ids, labels=ids, mask=np.zeros((1, 1), np.bool_), old_logprobs=none, advantages=none,
        bounds=(0, 1) if packed else None,
    )  # fmt: skip
