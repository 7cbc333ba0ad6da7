"""One policy being trained: Megatron's model, data-parallel wrapper, schedule and optimizer behind a few calls.

On one rank each call stands for itself. On many (:class:`trainer.megatron.ranks.RankedLearner`), every rank holds one
of these and all make the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from farm.durable import REAL_DISK, Disk
from farm.errors import FarmError, UsageError
from trainer.batch import MicroBatch, aligned, share
from trainer.config import ONE_RANK, ParallelConfig
from trainer.hf_config import read_hf_config
from trainer.megatron import checkpoint, convert, sharded
from trainer.megatron.buckets import Outgoing, outgoing
from trainer.megatron.cpu import HAVE_CUDA, cuda_literals, plain_torch, quiet
from trainer.megatron.model import build_model, packing, start_megatron
from trainer.megatron.sharding import whole_weights

Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, float]]]
"""(log-probabilities [N] of the loss tokens, their micro-batch) -> (summed loss, sums for the metrics)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """``sums``: the loss function's metric sums over the batch, and ``loss``; ``tokens``: loss tokens they are over."""

    tokens: int
    grad_norm: float
    sums: Mapping[str, float]


class Learner:
    """``folder`` is a Hugging Face model folder: its ``config.json`` says what to build, its weights are loaded unless
    ``random_weights``. Raises ``UsageError`` for a malformed folder, or one that can't lie on the ranks as asked."""

    def __init__(
        self,
        folder: Path,
        *,
        clip_grad: float = 1.0,
        seed: int = 0,
        random_weights: bool = False,
        parallel: ParallelConfig = ONE_RANK,
    ) -> None:
        self.hf = read_hf_config(folder)
        self.parallel = parallel
        start_megatron(parallel)
        self.model = build_model(self.hf, seed=seed, parallel=parallel, random_weights=random_weights)
        self.device = torch.device("cuda", torch.cuda.current_device()) if HAVE_CUDA else torch.device("cpu")
        self.model.to(self.device)
        if not random_weights:
            tensor = (mpu.get_tensor_model_parallel_rank(), parallel.tensor)
            convert.load_hf(self.model, folder, self.hf, tensor=tensor)
        config = self.model.config
        config.calculate_per_token_loss = True  # gradients are divided by the number of loss tokens of the whole batch
        config.finalize_model_grads_func = finalize_model_grads
        wrapped = Float16Module(config, self.model) if config.bf16 else self.model
        distributed = parallel.distributed_optimizer
        self._ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
            wrapped,
        )
        with quiet(), cuda_literals():
            self._optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=0.0,  # set for each step
                    min_lr=0.0,
                    weight_decay=0.0,
                    adam_beta2=0.95,  # at 0.999 the early, large gradients rule for a thousand steps
                    clip_grad=clip_grad,
                    bf16=config.bf16,
                    params_dtype=config.params_dtype,
                    use_distributed_optimizer=distributed,
                ),
                [self._ddp],
            )

    def check_ids(self, largest_id: int, longest: int) -> None:
        """Raises ``UsageError`` when data with these extremes can't be fed to the model."""
        if largest_id >= self.hf["vocab_size"]:
            raise UsageError(
                f"the data holds token id {largest_id}, the model's vocabulary has {self.hf['vocab_size']}: "
                "it was made with another tokenizer"
            )
        if longest > self.hf["max_position_embeddings"]:
            raise UsageError(
                f"the data holds a sequence of {longest} ids, the model's max_position_embeddings is "
                f"{self.hf['max_position_embeddings']}"
            )

    def step(self, batches: Sequence[MicroBatch], loss: Loss, *, lr: float) -> StepResult:
        """One optimizer step on the token mean of ``loss`` over ``batches`` (at least one loss token in all), of which
        this rank does its share.

        Raises ``FarmError`` (``diverged``) for a gradient that is not finite; the weights in memory are lost then."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._ddp.zero_grad_buffer()
        with quiet():
            self._optimizer.zero_grad()
        sums: dict[str, float] = {}
        mine = batches
        if self.parallel.ranks > 1:
            mine = share(batches, mpu.get_data_parallel_rank(), self.parallel.layout.data)
            mine = [aligned(batch, self.parallel.tensor) for batch in mine]

        def forward(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(data)
            with plain_torch():
                logprobs = self._forward(model, batch)

            def reduce(output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
                with plain_torch():
                    total, parts = loss(output, batch)
                    for key, value in {**parts, "loss": total.item()}.items():
                        sums[key] = sums.get(key, 0.0) + value
                    return total, torch.tensor(batch.tokens, dtype=torch.int, device=self.device), {}

            return logprobs, reduce

        with quiet(), cuda_literals():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(mine),
                model=self._ddp,
                num_microbatches=len(mine),
                seq_length=max(b.ids.shape[1] for b in mine),
                micro_batch_size=max(b.ids.shape[0] for b in mine),
                forward_only=False,
            )
            _ok, grad_norm, _zeros = self._optimizer.step()
        if not math.isfinite(grad_norm):
            raise FarmError(
                f"the gradient is not finite (norm {grad_norm}); nothing of this step was saved", kind="diverged"
            )
        return StepResult(tokens=sum(b.tokens for b in batches), grad_norm=float(grad_norm), sums=self._summed(sums))

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities [N] of the loss tokens under the present weights, without gradient. Without pipelining."""
        with quiet(), torch.no_grad():
            return self._forward(self.model, aligned(batch, self.parallel.tensor))

    def write(self, folder: Path, *, source: Path) -> None:
        """Write the present weights as a Hugging Face folder (see :func:`trainer.megatron.convert.write_hf`)."""
        convert.write_hf(folder, whole_weights(self.model, self.hf), self.hf, source=source)

    def outgoing(self, *, max_bytes: int, dtype: str | None = None) -> Generator[Outgoing, None, None]:
        """The present weights in buckets for engines (see :mod:`trainer.megatron.buckets`)."""
        return outgoing(whole_weights(self.model, self.hf), self.hf, max_bytes=max_bytes, dtype=dtype)

    def published(self) -> dict[str, Tensor]:
        """The present weights as :meth:`write` writes them, all at once, on the CPU."""
        return {name: x.cpu() for name, x in convert.hf_weights(whole_weights(self.model, self.hf), self.hf)}

    def gather(self) -> None:
        """Help another rank that goes through the whole weights."""
        for _ in whole_weights(self.model, self.hf):
            pass

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(
        self, folder: Path, step: int, *, loop: Mapping[str, Any], keep: int, name: str = "", disk: Disk = REAL_DISK
    ) -> None:
        """Write the checkpoint of ``step``: one file on one rank, else one folder (``name``: a temporary name that all
        ranks were told) with a file of each rank. See :func:`trainer.megatron.checkpoint.save`."""
        if self.parallel.ranks == 1:
            checkpoint.save(folder, step, learner=self.state(), loop=loop, keep=keep, disk=disk)
        else:
            sharded.save(self, self._optimizer, folder, step, loop=loop, keep=keep, name=name, disk=disk)

    def resume(self, folder: Path) -> tuple[int, dict[str, Any]] | None:
        """Load the newest checkpoint in ``folder``, of this layout or another; its (step, loop), None without one.

        Raises ``UsageError`` for one that can't be read or loaded here."""
        found = sharded.steps(folder)
        files = checkpoint.steps(folder)
        if found and (not files or found[-1] > files[-1]):
            return sharded.load(self, self._optimizer, folder, found[-1])
        if self.parallel.ranks > 1 and files:
            raise UsageError(
                f"{folder}: its checkpoint is that of one rank, and parallel.ranks is {self.parallel.ranks}; go on "
                "with one rank, or start a new run from an exported policy"
            )
        saved = checkpoint.load(folder)
        if saved is None:
            return None
        step, learner, loop = saved
        self.load_state(learner)
        return step, loop

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, of one rank. Tensors share memory with the learner: save before
        stepping on."""
        weights = {k: v for k, v in self.model.state_dict().items() if not k.endswith("_extra_state")}
        return {"model": weights, "optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        convert.load_into(self.model, state["model"])
        with torch.no_grad():
            self._optimizer.load_state_dict(dict(state["optimizer"]))
        torch.set_rng_state(state["rng"])

    def close(self) -> None:
        """Nothing to end on one rank."""

    # ------------------------------------------------------------------------------------------ inside

    def _forward(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        """Log-probabilities [N] on the last pipeline stage, hidden states on the others."""
        ids = torch.from_numpy(batch.ids).to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        packed = None if batch.bounds is None else packing(batch.bounds, self.device)
        out: Tensor = model(
            ids,
            positions,
            None,
            labels=torch.from_numpy(batch.labels).to(self.device),
            loss_mask=torch.from_numpy(batch.mask).to(self.device),
            packed_seq_params=packed,
        )
        return -out if self.model.post_process else out

    def _summed(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """The metric sums over all data ranks, the same on every rank (added in rank order)."""
        if self.parallel.ranks == 1:
            return sums
        speaks = self.model.post_process and mpu.get_tensor_model_parallel_rank() == 0
        heard: list[Any] = [None] * self.parallel.ranks
        torch.distributed.all_gather_object(heard, dict(sums) if speaks else {})
        total: dict[str, float] = {}
        for part in heard:
            for key, value in part.items():
                total[key] = total.get(key, 0.0) + value
        return total
