"""The element-wise hot spots of a small model on CPU, as one autograd node each.

Each replaces a chain of torch calls that copies by a few full-width passes, through a hook that Megatron has for
fused kernels. Together they are worth a third of a training step at 1 M parameters. Not used where CUDA exists.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F


def _half_turn(dim: int) -> Tensor:
    """[D, D]: ``x @ turn`` is (-second half, first half)."""
    half = dim // 2
    turn = torch.zeros(dim, dim)
    index = torch.arange(half)
    turn[index + half, index] = -1.0
    turn[index, index + half] = 1.0
    return turn


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, turn)
        return (x * cos).addcmul_(torch.matmul(x, turn), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, turn = ctx.saved_tensors
        (grad,) = grads
        return torch.matmul(grad * sin, turn.t()).add_(grad * cos), None, None, None


def fused_rope(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """Megatron's hook for a fused rotary embedding: ``t`` [T, B, H, D], ``freqs`` [T, 1, 1, D] -> like ``t``."""
    if interleaved or freqs.shape[-1] != t.shape[-1]:
        raise ValueError("only full-width, half-split rotary embeddings are supported")
    shape = (t.shape[0], 1, t.shape[2], t.shape[3])  # heads spelt out: long inner loops
    cos, sin = (x.to(t.dtype).expand(shape).contiguous() for x in (freqs.cos(), freqs.sin()))
    return _Rope.apply(t, cos, sin, _half_turn(t.shape[-1]).to(t.dtype))


def fused_rope_packed(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, **_: int) -> Tensor:
    """The same hook for packed sequences: ``t`` [T, H, D], their bounds in T, ``freqs`` [longest, 1, 1, D]."""
    if cp_size > 1:
        raise ValueError("context parallelism is not supported")
    lengths = cu_seqlens.diff()
    positions = torch.arange(t.shape[0]) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return fused_rope(t.unsqueeze(1), freqs[positions]).squeeze(1)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        (grad,) = grads
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return out


class SwiGlu(torch.nn.Module):
    """Megatron's hook for an activation module: [..., 2F] (gate, up) -> [..., F]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        del config

    def forward(self, gate_up: Tensor) -> Tensor:
        return _SwiGlu.apply(gate_up)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normed = x * scale
        product = grad * normed
        d_weight = product.reshape(-1, x.shape[-1]).sum(0)
        mean = torch.matmul(product, weight).div_(x.shape[-1]).unsqueeze(-1)
        return (grad * weight).addcmul_(normed, mean, value=-1.0).mul_(scale), d_weight, None


class RmsNorm(torch.nn.Module):
    """Takes the place of Megatron's ``WrappedTorchNorm``, whose backward torch composes of twice as many passes, and
    which refuses sequence parallelism (its weight's gradient is then a part of the sum over tensor ranks)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:  # torch's own sums in float32
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RmsNorm.apply(x, self.weight, self.eps)


def install_fused_rope() -> None:
    """Fill Megatron's hooks, so that ``apply_rope_fusion=True`` is accepted and uses :func:`fused_rope`."""
    rope_utils.fused_apply_rotary_pos_emb = fused_rope
    rope_utils.fused_apply_rotary_pos_emb_thd = fused_rope_packed
