"""Core attention as torch's fused kernel: causal, grouped queries, right-padded batches or packed sequences."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F


class SdpaAttention(torch.nn.Module):
    """Takes the place of Megatron's ``DotProductAttention``, whose mask is made on CUDA and whose score matrix is
    materialised. Sequences are padded on the right, so the causal mask alone keeps padding out of every real token.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, **_: Any) -> None:
        super().__init__()
        del layer_number
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"only causal attention is supported, not {attn_mask_type}")
        self.grouped = config.num_query_groups != config.num_attention_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """``query`` [T, B, H, D], ``key`` and ``value`` [T, B, G, D] -> [T, B, H*D]; packed: without B."""
        if attention_mask is not None:
            raise ValueError("a mask other than the causal one is not supported")
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        """Each sequence by itself: [T, H, D], [T, G, D] and the sequences' bounds in T -> [T, H*D]."""
        parts = []
        for start, end in pairwise(bounds):
            q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
            parts.append(out.squeeze(0).transpose(0, 1).reshape(end - start, -1))
        return torch.cat(parts)
