"""From data sheets to speeds: KV capacity, decode and prefill time of one engine on one GPU.

A decode step reads the weights it needs (in a mixture: the experts that at least one of the batch is routed to) and all
KV of the batch, or computes, whichever takes longer, and has a fixed cost beside it. Prefill computes, but reads all
weights at least once. ``achieved`` shares say how much of the data sheet's figure a real kernel gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from farm.errors import UsageError
from harness.twin.sheets import Gpu, ModelShape

MAX_BATCH = 1024
CHUNK_TOKENS = 8192
"""SGLang's default size of a prefill chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Shares of the data sheet's figures that are reached, and what a step costs beside them."""

    bandwidth: float
    prefill_flops: float
    step_overhead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Time of one decode step: ``step_s[batch] + kv_token_s * KV tokens of the batch``; of one prefill: per chunk
    ``prefill_chunk_s``, plus per new token ``prefill_token_s`` and per pair of a new token and one before it
    ``prefill_pair_s``, but at least ``prefill_floor_s``. ``step_s`` starts at batch 0."""

    step_s: tuple[float, ...]
    kv_token_s: float
    prefill_chunk_s: float
    prefill_token_s: float
    prefill_pair_s: float
    prefill_floor_s: float

    def prefill_s(self, new: float, before: float) -> float:
        """``new`` tokens after ``before`` that are cached."""
        compute_s = new * (self.prefill_token_s + self.prefill_pair_s * (before + new / 2))
        chunks = -(-new // CHUNK_TOKENS)
        floor_s = chunks * self.prefill_floor_s
        return chunks * self.prefill_chunk_s + (compute_s if compute_s > floor_s else floor_s)


def capacity_tokens(shape: ModelShape, gpu: Gpu, *, memory_fraction: float, reserved_bytes: float) -> int:
    """KV tokens that one engine holds: ``memory_fraction`` of what is free before the model is loaded, less the model.

    ``reserved_bytes`` are the runtime's own. Raises UsageError when the model does not fit."""
    left = (gpu.hbm_bytes - reserved_bytes) * memory_fraction - shape.weight_bytes
    tokens = int(left / shape.kv_bytes_per_token)
    if tokens < 1:
        raise UsageError(
            f"{shape.name} needs {shape.weight_bytes / 1e9:.0f} GB for its weights, more than {memory_fraction:.0%} of "
            f"one {gpu.name} ({gpu.hbm_bytes / 1e9:.0f} GB); take a larger GPU or a smaller model"
        )
    return tokens


def routed_share(shape: ModelShape, batch: int) -> float:
    """Share of the experts that ``batch`` tokens are routed to, each to ``experts_per_token`` at random."""
    if not shape.experts:
        return 0.0
    return 1.0 - (1.0 - shape.experts_per_token / shape.experts) ** batch


def engine_speed(shape: ModelShape, gpu: Gpu, achieved: Achieved, *, max_batch: int = MAX_BATCH) -> EngineSpeed:
    bytes_per_s = gpu.hbm_bytes_per_s * achieved.bandwidth
    flops_per_s = gpu.flops_per_s * achieved.prefill_flops
    token_s = 2.0 * shape.active_weights / flops_per_s
    shared, routed = shape.shared_weights * shape.bytes_per_weight, shape.expert_weights * shape.bytes_per_weight

    def step_s(batch: int) -> float:
        read_s = (shared + routed * routed_share(shape, batch)) / bytes_per_s
        return achieved.step_overhead_s + max(read_s, batch * token_s)

    return EngineSpeed(
        step_s=(0.0, *(step_s(batch) for batch in range(1, max_batch + 1))),
        kv_token_s=shape.kv_bytes_per_token / bytes_per_s,
        prefill_chunk_s=achieved.step_overhead_s,
        prefill_token_s=token_s,
        prefill_pair_s=4.0 * shape.layers * shape.heads * shape.head_dim / flops_per_s,  # QK and PV, 2 FLOP each
        prefill_floor_s=shape.weight_bytes / bytes_per_s,
    )
