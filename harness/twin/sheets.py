"""Data sheets: the shapes of models and the figures of GPUs. Nothing here was measured or reported by the reference.

Model shapes are the ``config.json`` of the published checkpoints; GPU figures are the vendors' data sheets, dense
(without sparsity). Memory sizes on data sheets are powers of two (a stack of HBM3E holds 36 GiB).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farm.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP, or a mixture of such (``experts`` 0: dense).

    ``intermediate`` is the width of the MLP, of one expert in a mixture; ``bytes_per_weight`` and ``bytes_per_kv`` are
    2 for bfloat16."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context_length: int
    experts: int = 0
    experts_per_token: int = 0
    tied_embeddings: bool = False
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of all layers. Qwen3-30B-A3B in bfloat16: 48 x 2 x 4 x 128 x 2 B = 98,304 B."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def mlp_weights(self) -> int:
        """Of one MLP (one expert) of one layer: gate, up, down."""
        return 3 * self.hidden * self.intermediate

    @property
    def shared_weights(self) -> int:
        """What every token uses: attention, router, dense MLP, embedding and output layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + (self.hidden * self.experts if self.experts else self.mlp_weights)
        return self.layers * block + self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def expert_weights(self) -> int:
        """Of all experts of all layers."""
        return self.layers * self.experts * self.mlp_weights

    @property
    def weights(self) -> int:
        return self.shared_weights + self.expert_weights

    @property
    def active_weights(self) -> int:
        """What one token multiplies with (the embedding look-up, which multiplies nothing, included if tied)."""
        looked_up = 0 if self.tied_embeddings else self.vocabulary * self.hidden
        routed = self.layers * self.experts_per_token * self.mlp_weights
        return self.shared_weights - looked_up + routed

    @property
    def weight_bytes(self) -> float:
        return self.weights * self.bytes_per_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator. ``flops_per_s``: dense bfloat16."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    flops_per_s: float


MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-30b-a3b", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, intermediate=768,
            vocabulary=151_936, context_length=262_144, experts=128, experts_per_token=8,
        ),
        ModelShape(
            name="qwen3-235b-a22b", layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, intermediate=1536,
            vocabulary=151_936, context_length=262_144, experts=128, experts_per_token=8,
        ),
        ModelShape(
            name="qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25_600,
            vocabulary=151_936, context_length=40_960,
        ),
        ModelShape(
            name="qwen3-8b", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12_288,
            vocabulary=151_936, context_length=40_960,
        ),
    )
}  # fmt: skip

GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="mi355x", hbm_bytes=288 * GIB, hbm_bytes_per_s=8.0e12, flops_per_s=2.5e15),
        Gpu(name="mi300x", hbm_bytes=192 * GIB, hbm_bytes_per_s=5.3e12, flops_per_s=1.307e15),
        Gpu(name="b200", hbm_bytes=180 * GIB, hbm_bytes_per_s=8.0e12, flops_per_s=2.25e15),
        Gpu(name="h200", hbm_bytes=141 * 1e9, hbm_bytes_per_s=4.8e12, flops_per_s=0.989e15),
        Gpu(name="h100", hbm_bytes=80 * GIB, hbm_bytes_per_s=3.35e12, flops_per_s=0.989e15),
        Gpu(name="a100", hbm_bytes=80 * GIB, hbm_bytes_per_s=2.0e12, flops_per_s=0.312e15),
    )
}


def model(name: str) -> ModelShape:
    """Raises UsageError on an unknown name."""
    if name not in MODELS:
        raise UsageError(
            f"model {name!r} has no data sheet; known: {', '.join(MODELS)}; add it to harness/twin/sheets.py"
        )
    return MODELS[name]


def gpu(name: str) -> Gpu:
    """Raises UsageError on an unknown name."""
    if name not in GPUS:
        raise UsageError(f"GPU {name!r} has no data sheet; known: {', '.join(GPUS)}; add it to harness/twin/sheets.py")
    return GPUS[name]
