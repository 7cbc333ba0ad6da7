"""``config.json`` of a Hugging Face model folder, read and checked without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from trainer.shapes import is_moe

MODEL_TYPES = ("qwen3", "qwen3_moe")
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
_REQUIRED_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a Hugging Face model folder, checked. Raises ``UsageError``."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES:
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise UsageError(f"{path}: model_type is {found!r}; allowed: {', '.join(MODEL_TYPES)}")
    if "num_local_experts" in config:  # transformers 5's name
        config["num_experts"] = config["num_local_experts"]
    for key in _REQUIRED + (_REQUIRED_MOE if is_moe(config) else ()):
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{path}: {key} is {value!r}; allowed: a whole number above 0")
    return config
