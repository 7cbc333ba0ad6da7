"""PURE: the weights of a Qwen3 or Qwen3-MoE network, by its Hugging Face ``config.json``: names, shapes, numbers.

Invariant: the shapes here are those of the model that :mod:`trainer.megatron.model` builds and of the published
checkpoints, so their product is the published number of parameters (tests hold both against it).

Megatron names are those of its local layer spec, with the layer's and the expert's number in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm.errors import UsageError

Shape = tuple[int, ...]

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "rms_norm_eps": 1e-6, "dtype": "bfloat16"}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 262_144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "rope_theta": 1e7, "tie_word_embeddings": False,
    },
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 40_960, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 40_960, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "max_position_embeddings": 40_960, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What ``config.json`` of the published checkpoints says, for checks before their weights are on the machine."""


def known_model(name: str) -> dict[str, Any]:
    """The configuration of a published model. Raises ``UsageError`` on an unknown name."""
    if name not in MODELS:
        raise UsageError(f"model {name!r} is unknown; known: {', '.join(MODELS)}; or give a Hugging Face model folder")
    return dict(MODELS[name])


def is_moe(hf: Mapping[str, Any]) -> bool:
    return bool(hf["model_type"] == "qwen3_moe")


def is_tied(hf: Mapping[str, Any]) -> bool:
    """Whether the output layer is the embedding."""
    return bool(hf.get("tie_word_embeddings", False))


def heads(hf: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads per key-value head, key-value heads, head width."""
    groups = int(hf["num_key_value_heads"])
    return int(hf["num_attention_heads"]) // groups, groups, int(hf["head_dim"])


def layer_prefix(layer: int) -> str:
    return f"decoder.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    return f"{layer_prefix(layer)}mlp.experts.local_experts.{expert}."


def megatron_shapes(hf: Mapping[str, Any]) -> dict[str, Shape]:
    """Megatron name -> shape of every weight of the whole model, in the model's order."""
    hidden = int(hf["hidden_size"])
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (int(hf["vocab_size"]), hidden)}
    for layer in range(int(hf["num_hidden_layers"])):
        shapes |= layer_shapes(hf, layer)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    if not is_tied(hf):
        shapes["output_layer.weight"] = (int(hf["vocab_size"]), hidden)
    return shapes


def layer_shapes(hf: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    """The part of :func:`megatron_shapes` that belongs to one layer."""
    hidden = int(hf["hidden_size"])
    per_group, groups, width = heads(hf)
    at = layer_prefix(layer)
    shapes: dict[str, Shape] = {
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}self_attention.linear_qkv.weight": ((per_group + 2) * groups * width, hidden),
        f"{at}self_attention.q_layernorm.weight": (width,),
        f"{at}self_attention.k_layernorm.weight": (width,),
        f"{at}self_attention.linear_proj.weight": (hidden, per_group * groups * width),
        f"{at}pre_mlp_layernorm.weight": (hidden,),
    }
    if not is_moe(hf):
        inner = int(hf["intermediate_size"])
        shapes[f"{at}mlp.linear_fc1.weight"] = (2 * inner, hidden)
        shapes[f"{at}mlp.linear_fc2.weight"] = (hidden, inner)
        return shapes
    inner, experts = int(hf["moe_intermediate_size"]), int(hf["num_experts"])
    shapes[f"{at}mlp.router.weight"] = (experts, hidden)
    for expert in range(experts):
        shapes[f"{expert_prefix(layer, expert)}linear_fc1.weight"] = (2 * inner, hidden)
        shapes[f"{expert_prefix(layer, expert)}linear_fc2.weight"] = (hidden, inner)
    return shapes


def is_expert(name: str) -> bool:
    """Whether a Megatron name is that of an expert's weight."""
    return ".experts." in name


def count(shape: Shape) -> int:
    """Elements of a tensor."""
    total = 1
    for size in shape:
        total *= size
    return total


def parameters(hf: Mapping[str, Any]) -> int:
    """All parameters. Qwen3-30B-A3B: 30,532,122,624 (published: 30.5 B)."""
    return sum(count(shape) for shape in megatron_shapes(hf).values())


def active_parameters(hf: Mapping[str, Any]) -> int:
    """Parameters that one token meets: all, with ``num_experts_per_tok`` experts of each layer.

    Qwen3-30B-A3B: 3,353,032,704 (published: 3.3 B)."""
    total = parameters(hf)
    if not is_moe(hf):
        return total
    expert = 3 * int(hf["moe_intermediate_size"]) * int(hf["hidden_size"])
    idle = int(hf["num_experts"]) - int(hf["num_experts_per_tok"])
    return total - int(hf["num_hidden_layers"]) * idle * expert


# ---------------------------------------------------------------------------------------- Hugging Face names

_PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def hf_parts(name: str, hf: Mapping[str, Any]) -> list[tuple[str, Shape]]:
    """The Hugging Face weights (name, shape) that the Megatron weight ``name`` holds: query, key and value of a layer
    are one matrix there, so are gate and up."""
    if name in _PLAIN:
        return [(_PLAIN[name], _outer_shape(name, hf))]
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    shape = _shape_in_layer(rest, hf)
    ours = f"model.layers.{number}."
    if rest in _IN_LAYER:
        return [(ours + _IN_LAYER[rest], shape)]
    if rest == "self_attention.linear_qkv.weight":
        per_group, groups, width = heads(hf)
        rows = {"q": per_group * groups * width, "k": groups * width, "v": groups * width}
        return [(f"{ours}self_attn.{part}_proj.weight", (n, shape[1])) for part, n in rows.items()]
    block = rest.removeprefix("mlp.").replace("experts.local_experts.", "experts.")
    if block.endswith("linear_fc1.weight"):
        at = ours + "mlp." + block.removesuffix("linear_fc1.weight")
        return [(f"{at}{part}_proj.weight", (shape[0] // 2, shape[1])) for part in ("gate", "up")]
    return [(ours + "mlp." + block.replace("linear_fc2", "down_proj"), shape)]


def _shape_in_layer(rest: str, hf: Mapping[str, Any]) -> Shape:
    """The shape of one weight of a layer, by its name within the layer; all layers and experts are alike."""
    if ".local_experts." in rest:
        rest = "mlp.experts.local_experts.0." + rest.rsplit(".", 2)[1] + ".weight"
    return _layer_zero(hf)[rest]


def _layer_zero(hf: Mapping[str, Any]) -> dict[str, Shape]:
    one_expert = {**hf, "num_experts": 1} if is_moe(hf) else hf
    shapes = {name.removeprefix(layer_prefix(0)): shape for name, shape in layer_shapes(one_expert, 0).items()}
    if is_moe(hf):
        shapes["mlp.router.weight"] = (int(hf["num_experts"]), int(hf["hidden_size"]))
    return shapes


def _outer_shape(name: str, hf: Mapping[str, Any]) -> Shape:
    hidden = int(hf["hidden_size"])
    return (hidden,) if name == "decoder.final_layernorm.weight" else (int(hf["vocab_size"]), hidden)


def hf_shapes(hf: Mapping[str, Any]) -> dict[str, Shape]:
    """Hugging Face name -> shape of every weight, in the order in which Megatron holds them."""
    return {part: shape for name in megatron_shapes(hf) for part, shape in hf_parts(name, hf)}
