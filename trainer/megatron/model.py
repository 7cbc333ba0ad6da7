"""A Megatron ``GPTModel`` from a Hugging Face Qwen3 or Qwen3-MoE ``config.json``."""

from __future__ import annotations

import importlib.util
import logging
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from farm.errors import UsageError
from trainer.config import ONE_RANK, ParallelConfig
from trainer.layout import check_layout
from trainer.megatron.attention import SdpaAttention
from trainer.megatron.cpu import adapt_to_ranks, quiet
from trainer.megatron.fused import RmsNorm, SwiGlu, install_fused_rope
from trainer.shapes import is_moe


def start_megatron(parallel: ParallelConfig = ONE_RANK) -> None:
    """Process groups, gloo on CPUs; safe to call again. With many ranks the process must have joined them before
    (:func:`trainer.megatron.ranks.join`). Thread count 1: small operators lose by more."""
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(1, int(parallel.timeout_s / 60)),
        )


def stop_megatron() -> None:
    """Undo :func:`start_megatron`; safe to call again."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def rope_theta(hf: dict[str, Any]) -> float:
    """transformers 5 keeps it in ``rope_parameters``, 4 at the top. Scaled variants are refused."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UsageError(f"config.json: rope type {kind!r} is not supported; allowed: 'default'")
    return float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0)))


def transformer_config(hf: dict[str, Any], parallel: ParallelConfig = ONE_RANK) -> TransformerConfig:
    """Megatron's configuration of the same network. Raises ``UsageError`` for what can't be represented."""
    check_layout(parallel.layout, hf)
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
            "moe_grouped_gemm": parallel.implementation == "transformer_engine",
            "moe_permute_fusion": parallel.implementation == "transformer_engine",
        }
    if parallel.recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif parallel.recompute == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": ["moe" if is_moe(hf) else "mlp"]}
    dtype = torch.bfloat16 if parallel.precision == "bfloat16" else torch.float32
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
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.layout.sequence_parallel,
        moe_token_dispatcher_type="allgather" if parallel.ranks == 1 else "alltoall",
        variable_seq_lengths=parallel.pipeline > 1,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **options,
    )


class PolicyModel(GPTModel):
    """``GPTModel`` whose loss is computed only where it counts.

    With ``labels`` [B, T] and a boolean ``loss_mask`` [B, T] the forward returns the negative log-probability of each
    masked label, [N] in row-major order of the mask. The hidden states are gathered before the output layer, so that
    the many context tokens of an episode cost no logits. Only the last pipeline stage does so.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        if self.post_process and self.config.sequence_parallel:
            # The output layer gets whole sequences, chosen rows of them, on every tensor rank.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def _postprocess(
        self,
        hidden_states: Tensor,
        *args: Any,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **kw: Any,
    ) -> Tensor:
        if labels is None or loss_mask is None or not self.post_process:
            return super()._postprocess(hidden_states, *args, labels=labels, loss_mask=loss_mask, **kw)
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
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
    _use_norms(layer)
    mlp = layer.mlp.submodules
    if hasattr(mlp, "experts"):
        mlp.experts.submodules.activation_func = SwiGlu
    else:
        mlp.activation_func = SwiGlu


def _use_norms(layer: Any) -> None:
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RmsNorm


def _spec(config: TransformerConfig, parallel: ParallelConfig) -> Any:
    """What the model's layers are made of, on this rank's pipeline stage."""
    if parallel.implementation == "transformer_engine":
        if not torch.cuda.is_available() or not _have_transformer_engine():
            raise UsageError(
                "parallel.implementation is 'transformer_engine', which needs a GPU and the package transformer-engine "
                "(pip install transformer-engine[pytorch]); install it, or set implementation to 'local'"
            )
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=True
        )
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    if not torch.cuda.is_available():
        _use_fused(layer.submodules)
    if not config.sequence_parallel:
        return layer
    _use_norms(layer.submodules)
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RmsNorm)


def _have_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def build_model(
    hf: dict[str, Any], *, seed: int = 0, parallel: ParallelConfig = ONE_RANK, random_weights: bool = True
) -> PolicyModel:
    """This rank's part of a model with random weights that depend on ``seed`` only. Needs :func:`start_megatron`.

    Without ``random_weights`` a GPU's memory is left as it is, for weights that are about to be loaded."""
    torch.manual_seed(seed)
    if not torch.cuda.is_available():
        install_fused_rope()
    if parallel != ONE_RANK:
        adapt_to_ranks()
    config = transformer_config(hf, parallel)
    config.perform_initialization = random_weights or config.use_cpu_initialization
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)
    spec = _spec(config, parallel)
    # Megatron's own spec for a dense layer makes its own layer complain, once for each layer.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    with quiet():
        return PolicyModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=int(hf["vocab_size"]),
            max_sequence_length=int(hf["max_position_embeddings"]),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=rope_theta(hf),
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        )


def packing(bounds: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    """Where the sequences of a packed micro-batch begin and end."""
    at = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(bounds))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=at, cu_seqlens_kv=at, max_seqlen_q=longest, max_seqlen_kv=longest
    )
