"""Supervised training on a trajectory log: pretraining on all ids, or fine-tuning on sampled ids."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from farm.durable import REAL_DISK, temporary_name
from farm.errors import UsageError
from farm.types import Trajectory
from trainer.batch import TokenSequence, micro_batches, sequences
from trainer.config import ONE_RANK, ParallelConfig

if TYPE_CHECKING:
    from trainer.megatron.ranks import Line

MICRO_BATCH_TOKENS = 2048
"""Rows x length of one forward: larger no longer gains on one core, and activations grow with it."""

_WARMUP_SHARE = 0.04
_FINAL_LR_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """``loss`` is the mean over the step's loss tokens, before its update; ``tokens`` counts all ids."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 4 % of the steps, then cosine to a tenth of ``peak``. ``step`` counts from 0."""
    warmup = max(1, round(steps * _WARMUP_SHARE))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (_FINAL_LR_SHARE + (1 - _FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def train_sft(
    trajectories: Iterable[Trajectory],
    *,
    policy: Path,
    out: Path,
    loss: Literal["outputs", "all"] = "outputs",
    init: Literal["policy", "random"] = "policy",
    epochs: int = 1,
    steps: int | None = None,
    lr: float = 1e-3,
    batch: int = 16,
    seed: int = 0,
    micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    parallel: ParallelConfig = ONE_RANK,
    line: Line | None = None,
    on_step: Callable[[SftStep], None] = lambda _: None,
) -> list[SftStep]:
    """Train ``policy`` (a Hugging Face folder) on ``trajectories`` and write the result to the new folder ``out``.

    ``init="random"`` takes only configuration and tokenizer from ``policy``. An epoch goes through all sequences in an
    order of its own, ``batch`` sequences a step; ``steps`` caps the number of steps (and may exceed ``epochs``: then
    epochs go on until it is reached). Equal input and ``seed`` give equal weights on one machine and layout. ``line``
    leads to the other ranks of ``parallel``, where there are any.

    Raises ``UsageError`` for an empty log, a malformed model folder, ids outside the vocabulary or an existing ``out``.
    """
    data = [sequence for trajectory in trajectories for sequence in sequences(trajectory)]
    _check(data, batch=batch, out=out)
    from trainer.megatron import losses  # torch and Megatron: seconds to import
    from trainer.megatron.learner import Learner
    from trainer.megatron.ranks import RankedLearner

    random_weights = init == "random"
    learner: Learner | RankedLearner
    if line is None:
        learner = Learner(policy, seed=seed, random_weights=random_weights, parallel=parallel)
    else:
        learner = RankedLearner(line, policy, seed=seed, random_weights=random_weights, parallel=parallel)
    learner.check_ids(max(int(s.ids.max()) for s in data), max(len(s.ids) for s in data))
    total = steps if steps is not None else epochs * math.ceil(len(data) / batch)
    history = []
    for step, chosen in zip(range(total), _batches(data, batch, seed), strict=False):
        started = time.monotonic()
        rate = learning_rate(step, total, lr)
        batches = micro_batches(
            chosen, max_tokens=micro_batch_tokens, loss_on_all=loss == "all", packed=parallel.packing
        )
        result = learner.step(batches, losses.nll, lr=rate)
        history.append(
            SftStep(
                step=step + 1,
                steps=total,
                loss=result.sums["loss"] / result.tokens,
                grad_norm=result.grad_norm,
                lr=rate,
                tokens=sum(len(s.ids) for s in chosen),
                seconds=time.monotonic() - started,
            )
        )
        on_step(history[-1])
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name("." + temporary_name(out.name))
    staging.mkdir()
    try:
        learner.write(staging, source=policy)
        REAL_DISK.rename(staging, out)
    finally:
        REAL_DISK.remove_tree(staging)
    learner.close()
    return history


def _check(data: Sequence[TokenSequence], *, batch: int, out: Path) -> None:
    if not data:
        raise UsageError("the trajectory log holds no sampled ids to train on; fill it with demonstrations first")
    if batch < 1:
        raise UsageError(f"batch is {batch}; allowed: 1 or more")
    if out.exists():
        raise UsageError(f"{out} exists; name a new folder")


def _batches(data: Sequence[TokenSequence], size: int, seed: int) -> Iterator[list[TokenSequence]]:
    """Epoch after epoch without end, each in an order of its own; the last batch of an epoch may be smaller."""
    order = random.Random(seed)
    while True:
        index = list(range(len(data)))
        order.shuffle(index)
        for start in range(0, len(index), size):
            yield [data[i] for i in index[start : start + size]]
