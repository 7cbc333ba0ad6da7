"""Read ``config.json`` of a Hugging Face Qwen3, Qwen3-MoE or Llama folder. Torch is not needed for it, so a wrong
folder is told at once.

Transformers is not imported: it would double the server's start-up time. Whatever this server could not compute exactly
(another architecture, scaled rope, sliding windows, biases) is refused here, by name, before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")


class ModelFolderError(Exception):
    """The folder can't be served; the message is one line that names the file and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Qwen3, Qwen3-MoE or Llama decoder. ``experts`` is 0 for a dense model; ``head_norms``: whether
    queries and keys are normed head by head (Llama's are not)."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rms_eps: float
    rope_theta: float
    tied: bool
    max_positions: int
    eos: tuple[int, ...]
    head_norms: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    norm_topk: bool = False
    dense_layers: frozenset[int] = frozenset()

    def is_sparse(self, layer: int) -> bool:
        """Whether ``layer`` routes its tokens to experts."""
        return self.experts > 0 and layer not in self.dense_layers


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises :class:`ModelFolderError`."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing: expected a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object")
    return value


def _eos(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json together, as SGLang takes them."""
    generation = folder / "generation_config.json"
    sources = [raw, read_json(generation)] if generation.exists() else [raw]
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return tuple(sorted(ids))


def _rope_theta(raw: Mapping[str, Any], path: Path) -> float:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelFolderError(f"{path}: rope type {kind!r} is not supported, only 'default'")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))


def read_config(folder: Path) -> ModelConfig:
    """The configuration in ``folder``. Raises :class:`ModelFolderError`."""
    path = folder / "config.json"
    raw = read_json(path)
    architecture = (raw.get("architectures") or ["none named"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelFolderError(f"{path}: architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    if any(raw.get(name) for name in ("use_sliding_window", "attention_bias", "mlp_bias", "rope_interleaved")):
        raise ModelFolderError(f"{path}: sliding windows, biases and interleaved rope are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelFolderError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    try:
        layers = int(raw["num_hidden_layers"])
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        sparse = architecture == "Qwen3MoeForCausalLM"
        experts = int(raw.get("num_experts", raw.get("num_local_experts", 0))) if sparse else 0
        every = int(raw.get("decoder_sparse_step", 1))
        dense = {n for n in range(layers) if (n + 1) % every} | set(raw.get("mlp_only_layers") or ())
        return ModelConfig(
            architecture=architecture,
            vocab=int(raw["vocab_size"]),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=int(raw["num_key_value_heads"]),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            intermediate=int(raw["intermediate_size"]),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw, path),
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_positions=int(raw["max_position_embeddings"]),
            eos=_eos(raw, folder),
            head_norms=architecture != "LlamaForCausalLM",
            experts=experts,
            experts_per_token=int(raw["num_experts_per_tok"]) if sparse else 0,
            expert_intermediate=int(raw["moe_intermediate_size"]) if sparse else 0,
            norm_topk=bool(raw.get("norm_topk_prob", False)),
            dense_layers=frozenset(dense),
        )
    except KeyError as error:
        raise ModelFolderError(f"{path}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"{path}: {error}") from None
