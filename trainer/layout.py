"""PURE: how one model lies on many ranks, and whether it can.

Invariant: every weight of the model is on at least one rank, and ranks that hold the same part of it form the groups
over which gradients are summed. Ranks are numbered as Megatron numbers them (order ``tp-ep-dp-pp``): the tensor
coordinate changes fastest, the pipeline stage slowest. Experts are never cut by the tensor dimension: their groups run
over all ranks of a stage (expert tensor size 1), which keeps the small matrices of a fine-grained mixture whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farm.errors import UsageError
from trainer.shapes import is_moe, is_tied


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``tensor``, ``pipeline``, ``expert``: over how many ranks a matrix, the layers, the experts of a layer go."""

    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def data(self) -> int:
        """Ranks that hold the same part of everything but experts."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.ranks // (self.expert * self.pipeline)

    @property
    def sequence_parallel(self) -> bool:
        """Between the cut matrices, activations are cut along the sequence: less memory at the same traffic, and a
        mixture of experts insists on it."""
        return self.tensor > 1

    def stage_of(self, layer: int, layers: int) -> int:
        """The pipeline stage that holds ``layer`` of ``layers``."""
        return layer // (layers // self.pipeline)


def check_ranks(layout: Layout, *, where: str = "parallel") -> None:
    """Raises ``UsageError`` when no model can lie so."""
    one_stage = layout.ranks // max(1, layout.pipeline)
    _divides(where, "pipeline", layout.pipeline, layout.ranks, "the number of ranks")
    _divides(where, "tensor", layout.tensor, one_stage, "the ranks of one pipeline stage")
    _divides(where, "expert", layout.expert, one_stage, "the ranks of one pipeline stage")


def check_layout(layout: Layout, hf: Mapping[str, Any], *, where: str = "parallel") -> None:
    """Raises ``UsageError`` when the model of ``hf`` can't lie so."""
    check_ranks(layout, where=where)
    model = hf["model_type"]
    if layout.expert > 1 and not is_moe(hf):
        raise UsageError(f"{where}.expert is {layout.expert}, but {model} has no experts; set it to 1")
    if layout.expert > 1:
        _divides(where, "expert", layout.expert, int(hf["num_experts"]), "num_experts")
    for key in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        _divides(where, "tensor", layout.tensor, int(hf[key]), key)
    if not is_moe(hf):
        _divides(where, "tensor", layout.tensor, int(hf["intermediate_size"]), "intermediate_size")
    if is_moe(hf) and layout.tensor > 1 and layout.expert == 1:
        # Megatron sums experts' gradients over other ranks only where experts are divided.
        raise UsageError(
            f"{where}.expert is 1 and {where}.tensor {layout.tensor}, and then the tensor ranks' copies of an expert "
            "would drift apart; set expert to 2 or more, or tensor to 1"
        )
    _divides(where, "pipeline", layout.pipeline, int(hf["num_hidden_layers"]), "num_hidden_layers")
    if layout.pipeline > 1 and is_tied(hf):
        raise UsageError(
            f"{where}.pipeline is {layout.pipeline}, but this model's output layer is its embedding, which would be on "
            "the first and on the last stage; set it to 1 and raise tensor or recompute instead"
        )


def _divides(where: str, key: str, size: int, whole: int, what: str) -> None:
    if size < 1 or whole % size:
        allowed = ", ".join(str(n) for n in range(1, min(whole, 1024) + 1) if whole % n == 0)
        raise UsageError(f"{where}.{key} is {size}, which does not divide {what} ({whole}); allowed: {allowed}")
