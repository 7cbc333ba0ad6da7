"""One policy being trained: Megatron's model, data-parallel wrapper, schedule and optimizer behind three calls.

One rank on the CPU. Everything goes through Megatron's schedule and process groups, so more ranks change
:func:`trainer.megatron.model.start_megatron`, where batches are moved to, and the checkpoint; none of that is here yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from farm.errors import FarmError, UsageError
from trainer.batch import MicroBatch
from trainer.megatron import convert
from trainer.megatron.cpu import cuda_literals, plain_torch, quiet
from trainer.megatron.model import build_model, read_hf_config, start_megatron

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
    ``random_weights``. Raises ``UsageError`` for a malformed folder."""

    def __init__(self, folder: Path, *, clip_grad: float = 1.0, seed: int = 0, random_weights: bool = False) -> None:
        self.hf = read_hf_config(folder)
        start_megatron()
        self.model = build_model(self.hf, seed=seed)
        if not random_weights:
            convert.load_hf(self.model, folder, self.hf)
        config = self.model.config
        config.calculate_per_token_loss = True  # gradients are divided by the number of loss tokens of the whole batch
        config.finalize_model_grads_func = finalize_model_grads
        self._ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model)
        with quiet(), cuda_literals():
            self._optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=0.0,  # set for each step
                    min_lr=0.0,
                    weight_decay=0.0,
                    adam_beta2=0.95,  # at 0.999 the early, large gradients rule for a thousand steps
                    clip_grad=clip_grad,
                    use_distributed_optimizer=False,
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
        """One optimizer step on the token mean of ``loss`` over ``batches`` (at least one loss token in all).

        Raises ``FarmError`` (``diverged``) for a gradient that is not finite; the weights in memory are lost then."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums: dict[str, float] = {}

        def forward(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(data)
            with plain_torch():
                logprobs = _logprobs(model, batch)

            def reduce(output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
                with plain_torch():
                    total, parts = loss(output, batch)
                    for key, value in {**parts, "loss": total.item()}.items():
                        sums[key] = sums.get(key, 0.0) + value
                    return total, torch.tensor(batch.tokens, dtype=torch.int), {}

            return logprobs, reduce

        with quiet(), cuda_literals():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(batches),
                model=self._ddp,
                num_microbatches=len(batches),
                seq_length=max(b.ids.shape[1] for b in batches),
                micro_batch_size=max(b.ids.shape[0] for b in batches),
                forward_only=False,
            )
            _ok, grad_norm, _zeros = self._optimizer.step()
        if not math.isfinite(grad_norm):
            raise FarmError(
                f"the gradient is not finite (norm {grad_norm}); nothing of this step was saved", kind="diverged"
            )
        return StepResult(tokens=sum(b.tokens for b in batches), grad_norm=float(grad_norm), sums=sums)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities [N] of the loss tokens under the present weights, without gradient."""
        with quiet(), torch.no_grad():
            return _logprobs(self.model, batch)

    def write(self, folder: Path, *, source: Path) -> None:
        """Write the present weights as a Hugging Face folder (see :func:`trainer.megatron.convert.write_hf`)."""
        convert.write_hf(folder, self._weights(), self.hf, source=source)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors share memory with the learner: save before stepping on."""
        return {"model": self._weights(), "optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        convert.load_into(self.model, state["model"])
        with torch.no_grad():
            self._optimizer.load_state_dict(dict(state["optimizer"]))
        torch.set_rng_state(state["rng"])

    def _weights(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.model.state_dict().items() if not k.endswith("_extra_state")}


def _logprobs(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    ids = torch.from_numpy(batch.ids)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    nll: Tensor = model(
        ids, positions, None, labels=torch.from_numpy(batch.labels), loss_mask=torch.from_numpy(batch.mask)
    )
    return -nll
