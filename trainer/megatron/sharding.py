"""Where each weight of the whole model is on many ranks, and the whole weight from its parts.

Every rank knows its own parameters under local names (its layers and experts counted from 0, Transformer Engine's
names where its layers are used). The *canonical* name of a parameter is the one in :mod:`trainer.shapes`: the local
spec's name with the layer's and expert's number in the whole model. All that crosses ranks, conversion, checkpoints and
weight pushes, goes by canonical names. Cutting and joining only copies: a round trip is bit-equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from trainer.shapes import Shape, expert_prefix, is_expert, is_moe, layer_prefix, megatron_shapes

_EXPERT = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.)local_experts\.(\d+)(\..*)")
_GROUPED = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.)(linear_fc[12])\.weight(\d+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Cut(StrEnum):
    """How tensor parallelism cuts a weight: not at all, by rows, by columns, or the rows of both halves (gate, up)."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    HALVES = "halves"


def cut_of(name: str) -> Cut:
    """By canonical name. Rows of query, key and value are ordered by key-value head, so a cut by rows keeps heads."""
    if is_expert(name):
        return Cut.WHOLE
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")):
        return Cut.ROWS
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return Cut.COLUMNS
    return Cut.HALVES if name.endswith("linear_fc1.weight") else Cut.WHOLE


def part_of(whole: Tensor, cut: Cut, rank: int, size: int) -> Tensor:
    """The part of tensor rank ``rank`` of ``size``."""
    if size == 1 or cut is Cut.WHOLE:
        return whole
    if cut is Cut.HALVES:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=1 if cut is Cut.COLUMNS else 0)[rank]


def whole_of(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The inverse of :func:`part_of`, from the parts of all tensor ranks in order."""
    if len(parts) == 1 or cut is Cut.WHOLE:
        return parts[0]
    if cut is Cut.HALVES:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[side] for side in (0, 1) for half in halves])
    return torch.cat(list(parts), dim=1 if cut is Cut.COLUMNS else 0)


def part_shape(shape: Shape, cut: Cut, size: int) -> Shape:
    if size == 1 or cut is Cut.WHOLE:
        return shape
    if cut is Cut.COLUMNS:
        return (shape[0], shape[1] // size)
    return (shape[0] // size, *shape[1:])


def canonical(local: str, *, first_layer: int = 0, first_expert: int = 0) -> str:
    """The canonical name of a rank's own parameter name."""
    grouped = _GROUPED.fullmatch(local)
    if grouped:
        local = f"{grouped[1]}local_experts.{grouped[3]}.{grouped[2]}.weight"
    expert = _EXPERT.fullmatch(local)
    if expert:
        local = f"{expert[1]}local_experts.{int(expert[2]) + first_expert}{expert[3]}"
    layer = _LAYER.fullmatch(local)
    if not layer:
        return local
    return f"{layer_prefix(int(layer[1]) + first_layer)}{_FUSED_NORMS.get(layer[2], layer[2])}"


def local_parameters(model: torch.nn.Module, hf: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
    """Canonical name -> parameter, of those on this rank."""
    layers = int(hf["num_hidden_layers"]) // mpu.get_pipeline_model_parallel_world_size()
    first_layer = mpu.get_pipeline_model_parallel_rank() * layers
    first_expert = 0
    if is_moe(hf):
        experts = int(hf["num_experts"]) // mpu.get_expert_model_parallel_world_size()
        first_expert = mpu.get_expert_model_parallel_rank() * experts
    return {
        canonical(name, first_layer=first_layer, first_expert=first_expert): parameter
        for name, parameter in model.named_parameters()
    }


def whole_weights(model: torch.nn.Module, hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, whole weight) of the whole model, in the order of ``megatron_shapes``.

    A collective: all ranks must go through it to the end, and each gets every weight. At most one layer's experts are
    held at once; a weight that nobody else holds is not copied."""
    own = local_parameters(model, hf)
    stages = mpu.get_pipeline_model_parallel_world_size()
    experts_on_ranks = mpu.get_expert_model_parallel_world_size() if is_moe(hf) else 1
    layers = int(hf["num_hidden_layers"]) // stages
    dtype = next(iter(own.values())).dtype
    device = next(iter(own.values())).device
    shapes = megatron_shapes(hf)
    for name, shape in shapes.items():
        stage = 0 if name.startswith("embedding.") else stages - 1
        layer = _LAYER.fullmatch(name)
        if layer:
            stage = int(layer[1]) // layers
        mine = stage == mpu.get_pipeline_model_parallel_rank()
        if is_expert(name) and experts_on_ranks > 1:
            if layer is not None and ".local_experts.0.linear_fc1." in name:
                yield from _experts(own, hf, int(layer[1]), stage=stage, mine=mine, shapes=shapes, like=(dtype, device))
            continue
        whole = _joined(own[name].detach(), cut_of(name)) if mine else torch.empty(shape, dtype=dtype, device=device)
        yield name, _from_stage(whole, stage)


def _joined(part: Tensor, cut: Cut) -> Tensor:
    size = mpu.get_tensor_model_parallel_world_size()
    if size == 1 or cut is Cut.WHOLE:
        return part
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(size)]
    torch.distributed.all_gather(parts, part, group=mpu.get_tensor_model_parallel_group())
    return whole_of(parts, cut)


def _from_stage(tensor: Tensor, stage: int) -> Tensor:
    """``tensor`` of pipeline stage ``stage``; the other stages give an empty one of its shape."""
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        tensor = tensor.contiguous()
        torch.distributed.broadcast(tensor, group=mpu.get_pipeline_model_parallel_group(), group_src=stage)
    return tensor


def _experts(
    own: Mapping[str, Tensor],
    hf: Mapping[str, Any],
    layer: int,
    *,
    stage: int,
    mine: bool,
    shapes: Mapping[str, Shape],
    like: tuple[torch.dtype, torch.device],
) -> Iterator[tuple[str, Tensor]]:
    """All experts of a layer: two collectives instead of two for each expert."""
    size, rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
    experts = int(hf["num_experts"])
    local = experts // size
    found = []
    for kind in ("linear_fc1", "linear_fc2"):
        names = [f"{expert_prefix(layer, e)}{kind}.weight" for e in range(experts)]
        stacked = torch.empty((experts, *shapes[names[0]]), dtype=like[0], device=like[1])
        if mine:
            ours = torch.stack([own[n].detach() for n in names[rank * local : (rank + 1) * local]])
            parts = list(stacked.chunk(size))
            torch.distributed.all_gather(parts, ours, group=mpu.get_expert_model_parallel_group())
        found.append(zip(names, _from_stage(stacked, stage), strict=True))
    for first, second in zip(*found, strict=True):
        yield first
        yield second
