"""A Megatron ``GPTModel`` from a Hugging Face Qwen3 or Qwen3-MoE ``config.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from farm.errors import UsageError
from trainer.megatron.attention import SdpaAttention
from trainer.megatron.cpu import quiet
from trainer.megatron.fused import RmsNorm, SwiGlu, install_fused_rope

MODEL_TYPES = ("qwen3", "qwen3_moe")
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
_REQUIRED_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def start_megatron() -> None:
    """One process, one rank, gloo; safe to call again. Thread count 1: small operators lose by more."""
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def stop_megatron() -> None:
    """Undo :func:`start_megatron`; safe to call again."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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


def rope_theta(hf: dict[str, Any]) -> float:
    """transformers 5 keeps it in ``rope_parameters``, 4 at the top. Scaled variants are refused."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UsageError(f"config.json: rope type {kind!r} is not supported; allowed: 'default'")
    return float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0)))


def is_moe(hf: Mapping[str, Any]) -> bool:
    return bool(hf["model_type"] == "qwen3_moe")


def transformer_config(hf: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration of the same network. Raises ``UsageError`` for what can't be represented."""
    if hf.get("attention_bias"):
        raise UsageError("config.json: attention_bias is true; Qwen3 models have none, it is not supported")
    if hf.get("use_sliding_window"):
        raise UsageError("config.json: use_sliding_window is true; it is not supported")
    options: dict[str, Any] = {}
    if is_moe(hf):
        if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
            raise UsageError("config.json: only models whose every layer is a mixture of experts are supported")
        options = {
            "num_moe_experts": int(hf["num_experts"]),
            "moe_router_topk": int(hf["num_experts_per_tok"]),
            "moe_ffn_hidden_size": int(hf["moe_intermediate_size"]),
            # Softmax over the chosen experts equals the renormalised softmax over all of them.
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
        }
    return TransformerConfig(
        num_layers=int(hf["num_hidden_layers"]),
        hidden_size=int(hf["hidden_size"]),
        ffn_hidden_size=int(hf["intermediate_size"]),
        num_attention_heads=int(hf["num_attention_heads"]),
        num_query_groups=int(hf["num_key_value_heads"]),
        kv_channels=int(hf["head_dim"]),
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=float(hf.get("rms_norm_eps", 1e-6)),
        init_method_std=float(hf.get("initializer_range", 0.02)),
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
        apply_rope_fusion=not torch.cuda.is_available(),
        use_te_activation_func=not torch.cuda.is_available(),  # the hook for an activation module, TE's or not
        **options,
    )


class PolicyModel(GPTModel):
    """``GPTModel`` whose loss is computed only where it counts.

    With ``labels`` [B, T] and a boolean ``loss_mask`` [B, T] the forward returns the negative log-probability of each
    masked label, [N] in row-major order of the mask. The hidden states are gathered before the output layer, so that
    the many context tokens of an episode cost no logits.
    """

    def _postprocess(
        self,
        hidden_states: Tensor,
        *args: Any,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **kw: Any,
    ) -> Tensor:
        if labels is None or loss_mask is None:
            return super()._postprocess(hidden_states, *args, labels=labels, loss_mask=loss_mask, **kw)
        rows = loss_mask.reshape(-1).nonzero().squeeze(1)  # into [B*T]
        batch = labels.shape[0]
        length = labels.shape[1]
        at = (rows % length) * batch + rows // length  # the same positions in Megatron's [T, B] order
        chosen = hidden_states.reshape(-1, hidden_states.shape[-1]).index_select(0, at).unsqueeze(1)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(chosen, weight=weight)
        return self.compute_language_model_loss(labels.reshape(-1)[rows].unsqueeze(0), logits).squeeze(0)


def _use_fused(layer: Any) -> None:
    """Put the modules of :mod:`trainer.megatron.fused` into a layer's spec."""
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RmsNorm
    mlp = layer.mlp.submodules
    if hasattr(mlp, "experts"):
        mlp.experts.submodules.activation_func = SwiGlu
    else:
        mlp.activation_func = SwiGlu


def build_model(hf: dict[str, Any], *, seed: int = 0) -> PolicyModel:
    """A model with random weights that depend on ``seed`` only. Needs :func:`start_megatron`."""
    torch.manual_seed(seed)
    if not torch.cuda.is_available():
        install_fused_rope()
    config = transformer_config(hf)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    if not torch.cuda.is_available():
        _use_fused(spec.submodules)
    # Megatron's own spec for a dense layer makes its own layer complain, once for each layer.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    with quiet():
        return PolicyModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=int(hf["vocab_size"]),
            max_sequence_length=int(hf["max_position_embeddings"]),
            position_embedding_type="rope",
            rotary_base=rope_theta(hf),
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        )
