"""One learner on many ranks: rank 0 runs the trainer, the others do what it says.

Rank 0 follows the log, forms the batches and holds a :class:`RankedLearner`, which looks like a
:class:`~trainer.megatron.learner.Learner`. Each of its calls goes to all ranks, with its arguments, and is then made by
all of them on their own ``Learner``, which meet in collectives. The other ranks sit in :func:`serve`.

Waiting. Between calls the others wait for rank 0 as long as it takes (it may wait for trajectories for hours): they
look for a key in the store of the process group, which has no time limit. Within a call all are at work, and a rank
that waits for another longer than ``parallel.timeout_s`` gives up. A rank that dies is noticed by whoever started the
ranks (:mod:`trainer.ranks`, or torchrun), who then ends all of them; rank 0 resumes from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from farm.durable import REAL_DISK, Disk, temporary_name
from farm.errors import FarmError, UsageError
from trainer.batch import MicroBatch
from trainer.check import check, remedies
from trainer.config import ParallelConfig, TrainerConfig
from trainer.hf_config import read_hf_config
from trainer.megatron import sharded
from trainer.megatron.buckets import Outgoing
from trainer.megatron.cpu import HAVE_CUDA
from trainer.megatron.learner import Learner, Loss, StepResult
from trainer.megatron.model import stop_megatron
from trainer.memory import GIB
from trainer.ranks import RENDEZVOUS, Seat

_LOOK_S = 20.0


class Line:
    """How rank 0 tells the others what to do next."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._said = 0

    def say(self, call: str, *args: Any, **kw: Any) -> None:
        """For rank 0."""
        self._said += 1
        self._store.set(f"call/{self._said}", "")
        torch.distributed.broadcast_object_list([call, args, kw], src=0)

    def hear(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """For the others: the next call, however long that takes."""
        self._said += 1
        while True:
            try:
                self._store.wait([f"call/{self._said}"], timedelta(seconds=_LOOK_S))
                break
            except RuntimeError as error:
                if not isinstance(error, torch.distributed.DistStoreError) and "timeout" not in str(error).lower():
                    raise  # rank 0 is gone; else nothing was said yet
        heard: list[Any] = [None, None, None]
        torch.distributed.broadcast_object_list(heard, src=0)
        return heard[0], heard[1], heard[2]


def join(seat: Seat, parallel: ParallelConfig) -> Line:
    """Take this process's place among the ranks. gloo, and NCCL beside it where there are GPUs.

    Raises ``UsageError`` when there is no GPU for this rank, ``FarmError`` (``ranks``) when the others do not come."""
    if HAVE_CUDA:
        if seat.local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"rank {seat.rank} has no GPU of its own: this node shows {torch.cuda.device_count()}; give as many "
                "ranks a node as it has GPUs"
            )
        torch.cuda.set_device(seat.local_rank)
    timeout = timedelta(seconds=parallel.timeout_s)
    try:
        store = _store(seat, timeout)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if HAVE_CUDA else "gloo",
            store=torch.distributed.PrefixStore("ranks", store),
            rank=seat.rank,
            world_size=seat.ranks,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise FarmError(f"rank {seat.rank} could not join the {seat.ranks} ranks: {error}", kind="ranks") from error
    return Line(torch.distributed.PrefixStore("line", store))


def _store(seat: Seat, timeout: timedelta) -> Store:
    place = os.environ.get(RENDEZVOUS)
    if place:
        return torch.distributed.FileStore(place, seat.ranks)
    store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timeout))
    return store


class RankedLearner:
    """A learner on all ranks, for rank 0. The same calls as :class:`~trainer.megatron.learner.Learner`."""

    def __init__(
        self,
        line: Line,
        folder: Path,
        *,
        clip_grad: float = 1.0,
        seed: int = 0,
        random_weights: bool = False,
        parallel: ParallelConfig,
    ) -> None:
        self._line = line
        how: dict[str, Any] = {
            "clip_grad": clip_grad, "seed": seed, "random_weights": random_weights, "parallel": parallel,
        }  # fmt: skip
        self._timeout_s = parallel.timeout_s
        line.say("build", folder, **how)
        self._learner = Learner(folder, **how)

    def check_ids(self, largest_id: int, longest: int) -> None:
        self._learner.check_ids(largest_id, longest)

    def step(self, batches: Sequence[MicroBatch], loss: Loss, *, lr: float) -> StepResult:
        with self._together():
            self._line.say("step", batches, loss, lr=lr)
            return self._learner.step(batches, loss, lr=lr)

    def write(self, folder: Path, *, source: Path) -> None:
        with self._together():
            self._line.say("gather")
            self._learner.write(folder, source=source)

    def published(self) -> dict[str, Tensor]:
        with self._together():
            self._line.say("gather")
            return self._learner.published()

    def outgoing(self, *, max_bytes: int, dtype: str | None = None) -> Generator[Outgoing, None, None]:
        """As a learner's. Whoever stops half-way leaves nobody waiting: the rest is gathered and dropped."""
        with self._together():
            self._line.say("gather")
            buckets = self._learner.outgoing(max_bytes=max_bytes, dtype=dtype)
            try:
                for bucket in buckets:  # noqa: UP028 - "yield from" would end ``buckets`` when this one is ended
                    yield bucket
            finally:
                for _ in buckets:
                    pass

    def save(self, folder: Path, step: int, *, loop: Mapping[str, Any], keep: int, disk: Disk = REAL_DISK) -> None:
        name = temporary_name(f"step-{step:06d}")
        with self._together():
            self._line.say("save", folder, step, loop={}, keep=keep, name=name)
            self._learner.save(folder, step, loop=loop, keep=keep, name=name, disk=disk)

    def resume(self, folder: Path) -> tuple[int, dict[str, Any]] | None:
        sharded.remove_strays(folder)
        with self._together():
            self._line.say("resume", folder)
            return self._learner.resume(folder)

    def close(self) -> None:
        """Send the others home."""
        self._line.say("close")
        stop_megatron()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Around a call that all ranks make. Raises ``FarmError`` (``ranks``) when one of them is gone or silent."""
        # A save runs in a thread of its own, and CUDA's current device is a thread's.
        device = torch.cuda.device(self._learner.device) if HAVE_CUDA else contextlib.nullcontext()
        try:
            with device:
                yield
        except RuntimeError as error:
            if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
                raise
            what = str(error).strip().splitlines()[0][:300]
            raise FarmError(
                f"another rank is gone, or was silent for {self._timeout_s:g} s ({what}); start again to resume from "
                "the last checkpoint",
                kind="ranks",
            ) from error


def require_fit(config: TrainerConfig, folder: Path) -> None:
    """Raises ``UsageError`` when a training step needs more memory than this machine's GPUs have. Nothing on CPUs."""
    if not HAVE_CUDA:
        return
    hf = read_hf_config(folder)
    memory = float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    fit = check(config, hf, memory=memory)
    if not fit.fits:
        raise UsageError(
            f"a step needs {fit.need.total / GIB:.0f} GiB on a GPU that has {memory / GIB:.0f} GiB (see trainer "
            f"check); set {' or '.join(remedies(config, hf, memory=memory))}"
        )


def serve(line: Line) -> None:
    """What ranks other than 0 do, until they are sent home."""
    learner: Learner | None = None
    while True:
        call, args, kw = line.hear()
        if call == "close":
            stop_megatron()
            return
        if call == "build":
            learner = Learner(*args, **kw)
        else:
            getattr(learner, call)(*args, **kw)
