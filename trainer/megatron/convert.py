"""Hugging Face Qwen3 / Qwen3-MoE weights <-> Megatron ``GPTModel`` weights, exactly, on one rank.

Only names and layouts change: Megatron keeps query, key and value of a layer in one matrix, grouped by key-value
head, and gate and up projections in another. No arithmetic, so a round trip is bit-equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farm.errors import UsageError
from trainer.megatron.model import is_moe
from trainer.publish import copy_hf

WEIGHTS = "model.safetensors"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _names(hf: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(Megatron, Hugging Face) names of the weights that are the same in both."""
    names = [
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
    ]
    if not hf.get("tie_word_embeddings", False):
        names.append(("output_layer.weight", "lm_head.weight"))
    for i in range(int(hf["num_hidden_layers"])):
        mcore, ours = f"decoder.layers.{i}.", f"model.layers.{i}."
        names += [
            (f"{mcore}input_layernorm.weight", f"{ours}input_layernorm.weight"),
            (f"{mcore}pre_mlp_layernorm.weight", f"{ours}post_attention_layernorm.weight"),
            (f"{mcore}self_attention.linear_proj.weight", f"{ours}self_attn.o_proj.weight"),
            (f"{mcore}self_attention.q_layernorm.weight", f"{ours}self_attn.q_norm.weight"),
            (f"{mcore}self_attention.k_layernorm.weight", f"{ours}self_attn.k_norm.weight"),
        ]
        if is_moe(hf):
            names.append((f"{mcore}mlp.router.weight", f"{ours}mlp.gate.weight"))
        names += [(f"{a}linear_fc2.weight", f"{b}down_proj.weight") for a, b in _mlps(hf, i)]
    return names


def _mlps(hf: Mapping[str, Any], layer: int) -> list[tuple[str, str]]:
    """(Megatron, Hugging Face) prefixes of the feed-forward blocks of a layer: one, or one for each expert."""
    mcore, ours = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    if not is_moe(hf):
        return [(mcore, ours)]
    return [(f"{mcore}experts.local_experts.{e}.", f"{ours}experts.{e}.") for e in range(int(hf["num_experts"]))]


def _heads(hf: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads per key-value head, key-value heads, head width."""
    groups = int(hf["num_key_value_heads"])
    return int(hf["num_attention_heads"]) // groups, groups, int(hf["head_dim"])


def to_hf(state: Mapping[str, Tensor], hf: Mapping[str, Any]) -> dict[str, Tensor]:
    """Megatron ``state`` under Hugging Face names. Tensors may share memory with ``state``."""
    out = {theirs: state[ours].detach() for ours, theirs in _names(hf)}
    per_group, groups, width = _heads(hf)
    for i in range(int(hf["num_hidden_layers"])):
        qkv = state[f"decoder.layers.{i}.self_attention.linear_qkv.weight"].detach()
        parts = qkv.view(groups, per_group + 2, width, -1).split([per_group, 1, 1], dim=1)
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            out[f"model.layers.{i}.self_attn.{name}.weight"] = part.reshape(-1, qkv.shape[-1])
        for ours, theirs in _mlps(hf, i):
            gate, up = state[f"{ours}linear_fc1.weight"].detach().chunk(2, dim=0)
            out[f"{theirs}gate_proj.weight"], out[f"{theirs}up_proj.weight"] = gate, up
    return out


def from_hf(weights: Mapping[str, Tensor], hf: Mapping[str, Any]) -> dict[str, Tensor]:
    """Hugging Face ``weights`` under Megatron's names, float32. ``KeyError`` names a missing weight."""
    out = {ours: weights[theirs].float() for ours, theirs in _names(hf)}
    per_group, groups, width = _heads(hf)
    for i in range(int(hf["num_hidden_layers"])):
        q, k, v = (weights[f"model.layers.{i}.self_attn.{n}_proj.weight"].float() for n in "qkv")
        parts = [x.view(groups, n, width, x.shape[-1]) for x, n in ((q, per_group), (k, 1), (v, 1))]
        out[f"decoder.layers.{i}.self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).reshape(-1, q.shape[-1])
        for ours, theirs in _mlps(hf, i):
            both = [weights[f"{theirs}{n}_proj.weight"].float() for n in ("gate", "up")]
            out[f"{ours}linear_fc1.weight"] = torch.cat(both, dim=0)
    return out


def load_into(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy Megatron-named ``weights`` into ``model``. Raises ``UsageError`` when names or shapes do not fit."""
    # ``_extra_state`` entries are Transformer Engine's place for quantisation scales; there are none here.
    own = {k for k in model.state_dict() if not k.endswith("_extra_state")}
    if own != set(weights):
        raise UsageError(f"weights do not fit the model: {sorted(own ^ set(weights))[:4]} are missing or unknown")
    try:
        model.load_state_dict(dict(weights), strict=False)
    except RuntimeError as error:
        raise UsageError(f"weights do not fit the model: {error}") from None


def read_hf_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder (one safetensors file, or several with an index)."""
    index = folder / f"{WEIGHTS}.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [WEIGHTS]
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                weights.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (not a dict)
        except FileNotFoundError:
            raise UsageError(f"{folder} is not a model folder: it has no {name}") from None
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{folder / name} can't be read as safetensors: {error}") from None
    return weights


def load_hf(model: torch.nn.Module, folder: Path, hf: Mapping[str, Any]) -> None:
    """Copy the weights of a Hugging Face folder into a Megatron ``model``. Raises ``UsageError``."""
    try:
        weights = from_hf(read_hf_weights(folder), hf)
    except KeyError as error:
        raise UsageError(f"{folder} does not hold the weight {error} that its config.json calls for") from None
    load_into(model, weights)


def write_hf(folder: Path, state: Mapping[str, Tensor], hf: Mapping[str, Any], *, source: Path) -> None:
    """Write a complete Hugging Face folder: weights of ``state``, every other file (configuration, tokenizer) copied
    from ``source``. ``folder`` must exist; making it durable is the caller's part."""
    dtype = _DTYPES[str(hf.get("dtype") or hf.get("torch_dtype") or "float32")]
    tensors = {name: value.to(dtype).contiguous() for name, value in to_hf(state, hf).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    copy_hf(source, folder, weights=False)
