"""PURE: what a training step needs of each GPU's memory, by parts, before anything is started.

Invariant: every part is an upper estimate that is linear in what it is made of, and the sum is what must fit. Sources:

* weights, gradients, optimizer: bytes per parameter of Megatron-core's mixed-precision Adam (its documentation of the
  distributed optimizer): 2 (bfloat16 weight) + 4 (float32 gradient) + 12 (float32 weight and two moments), the last
  divided over the data-parallel ranks with the distributed optimizer. In float32: 4 + 4 + 8.
* activations: the tensors that the backward pass of one layer reads, counted as in Korthikanti et al., "Reducing
  Activation Recomputation in Large Transformer Models" (2022), with a fused attention kernel (no score matrix),
  grouped queries and a gated MLP; tensor and sequence parallelism divide all of them.
* experts: every token is processed by ``num_experts_per_tok`` of them, wherever they are, so with balanced routing a
  rank computes as many token copies as it sends away. Routing is never balanced: ``EXPERT_IMBALANCE``.
* logits: only positions with a loss get them (:class:`trainer.megatron.model.PolicyModel`); here all do, at the worst.
* the rest: ``RESERVED_BYTES``.

``EXPERT_IMBALANCE`` and ``RESERVED_BYTES`` are assumptions, not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from farm.errors import UsageError
from trainer.layout import Layout
from trainer.shapes import count, heads, is_expert, is_moe, layer_shapes, megatron_shapes

GIB = 1 << 30

GPU_BYTES: Mapping[str, float] = {
    "mi355x": 288 * GIB,
    "mi300x": 192 * GIB,
    "b200": 180 * GIB,
    "h200": 141e9,
    "h100": 80 * GIB,
    "a100": 80 * GIB,
}
"""Memory of one GPU by its data sheet."""

EXPERT_IMBALANCE = 1.5
"""Token copies of the busiest rank over the mean (assumption)."""

RESERVED_BYTES = 6 * GIB
"""GPU context, NCCL's buffers and what the allocator can't use for fragmentation (assumption)."""

Recompute = Literal["none", "selective", "full"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes on the rank that needs most, by part. ``activations`` of all micro-batches in flight; ``publish``: one
    layer's whole weights, gathered when a policy is published, at a time without activations."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    publish: float
    reserved: float = RESERVED_BYTES

    @property
    def total(self) -> float:
        standing = self.weights + self.gradients + self.optimizer + self.reserved
        return standing + max(self.activations + self.logits, self.publish)


def gpu_bytes(name: str) -> float:
    """Raises ``UsageError`` on an unknown name."""
    if name not in GPU_BYTES:
        raise UsageError(f"GPU {name!r} has no data sheet; known: {', '.join(GPU_BYTES)}; or give its memory, as 96GiB")
    return GPU_BYTES[name]


def estimate(
    hf: Mapping[str, Any],
    layout: Layout,
    *,
    tokens: int,
    precision: Precision,
    distributed_optimizer: bool,
    recompute: Recompute,
) -> Need:
    """``tokens``: of one micro-batch, padding included. The layout must have passed ``check_layout``."""
    width = 2 if precision == "bfloat16" else 4
    shared, experts = _rank_parameters(hf, layout)
    owned = shared + experts
    if distributed_optimizer:
        owned = shared / layout.data + experts / layout.expert_data
    layer = _layer_activation_bytes(hf, layout, tokens=tokens, width=width, recompute="none")
    kept = _layer_activation_bytes(hf, layout, tokens=tokens, width=width, recompute=recompute)
    layers = int(hf["num_hidden_layers"]) // layout.pipeline
    in_flight = layout.pipeline  # micro-batches whose activations the first stage holds under 1F1B
    whole_layer = sum(count(shape) for shape in layer_shapes(hf, 0).values())
    return Need(
        weights=(shared + experts) * width,
        gradients=(shared + experts) * 4,
        optimizer=owned * (12 if precision == "bfloat16" else 8),
        # While a layer goes backward, all that it recomputes is there too.
        activations=kept * layers * in_flight + (layer - kept),
        logits=_logit_bytes(hf, layout, tokens=tokens, width=width),
        publish=whole_layer * width,
    )


def _rank_parameters(hf: Mapping[str, Any], layout: Layout) -> tuple[float, float]:
    """(parameters outside experts, parameters of experts) on the stage that holds most."""
    stages = [[0.0, 0.0] for _ in range(layout.pipeline)]
    layers = int(hf["num_hidden_layers"])
    for name, shape in megatron_shapes(hf).items():
        stage = 0 if name.startswith("embedding") else layout.pipeline - 1
        if name.startswith("decoder.layers."):
            stage = layout.stage_of(int(name.split(".")[2]), layers)
        if is_expert(name):
            stages[stage][1] += count(shape) / layout.expert
        else:
            cut = len(shape) > 1 and not name.endswith("router.weight")
            stages[stage][0] += count(shape) / (layout.tensor if cut else 1)
    shared, experts = max(stages, key=sum)
    return shared, experts


def _layer_activation_bytes(
    hf: Mapping[str, Any], layout: Layout, *, tokens: int, width: int, recompute: Recompute
) -> float:
    """Kept of one layer for its backward pass, on one rank, of one micro-batch.

    Per token, in elements: the input of each of the two norms and what comes out of it (4 hidden); queries before and
    behind their norm and rope, and the attention's output (3 x query width); keys twice, values once (3 x key width);
    gate, up and their product (3 x inner). An expert's token copy has its own input and output besides.
    ``selective``: the MLP (all experts) is computed again from its input. ``full``: only the layer's input stays."""
    hidden = int(hf["hidden_size"])
    per_group, groups, head = heads(hf)
    query, key = per_group * groups * head, groups * head
    attention = 4.0 * hidden + 3 * query + 3 * key
    if is_moe(hf):
        copies = int(hf["num_experts_per_tok"]) * EXPERT_IMBALANCE
        mlp = copies * (2 * hidden + 3 * int(hf["moe_intermediate_size"])) + 4 * int(hf["num_experts"]) / width
    else:
        mlp = 3.0 * int(hf["intermediate_size"])
    per_token = {"none": attention + mlp, "selective": attention, "full": float(hidden)}[recompute]
    return per_token * width * tokens / layout.tensor


def _logit_bytes(hf: Mapping[str, Any], layout: Layout, *, tokens: int, width: int) -> float:
    """Of the last stage: the logits, their softmax in float32 (kept for the backward pass) and their gradient."""
    return tokens * int(hf["vocab_size"]) / layout.tensor * (2 * width + 4)
