"""Qwen3, Qwen3-MoE and Llama decoders in float32, over a batch that mixes prefill chunks and single decode tokens.

The tokens of a step are flat: ``[T]`` ids, each with its row of the KV store and its position. Linear layers see all T
at once, which is where batching pays. Attention has two shapes: all decode tokens together against the first rows of
the store (one batched product, padded to the longest), and each prefill chunk alone against its own row.

Weights are rearranged once, when they are loaded: query, key and value projections are fused, so are gate and up; the
weights of a norm are folded into the projection behind it, the softmax scale into the query norm; and the two halves of
a query or key head that rope turns against each other are interleaved, so that rope is one complex product (scores do
not change, since queries and keys are permuted alike).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from farm.engine.embedded.config import ModelConfig, ModelFolderError
from farm.engine.embedded.tensors import read_tensors

_CAUSAL = 512  # most prompt tokens whose attention is computed at once
_SCORE_ELEMENTS = 1 << 24  # a prefill chunk's score matrix is kept below this many floats


@dataclass(frozen=True, slots=True)
class Chunk:
    """``length`` prompt tokens of ``row`` beginning at ``position``; they are tokens [offset, offset+length) of the
    step."""

    row: int
    position: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's tokens. The first ``len(decode_rows)`` of the T tokens are decode tokens, in the order of
    ``decode_rows``.

    ``mask`` [R, 1, L] is added to the decode scores of rows 0..R-1 (0 where a row holds a token, -inf where not);
    ``wanted`` are the indices of the tokens whose logits are asked for. When these are the decode tokens followed by
    the last tokens of some chunks, ``ends`` are those last tokens as chunks of length 1, with offsets in ``wanted``;
    nothing else is then computed of the last layer but keys and values. Otherwise ``ends`` is None.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    decode_rows: torch.Tensor
    decode_in_order: bool  # decode_rows is 0..R-1
    mask: torch.Tensor | None
    chunks: Sequence[Chunk]
    wanted: torch.Tensor
    ends: Sequence[Chunk] | None


class KVStore:
    """Keys [layers, rows, kv_heads, head_dim, capacity] (transposed: scores are then unit-stride) and values
    [layers, rows, kv_heads, capacity, head_dim].

    NumPy allocates it, since its zeros cost nothing until a row fills up (torch would write them all)."""

    def __init__(self, config: ModelConfig, *, rows: int, capacity: int) -> None:
        shape = (config.layers, rows, config.kv_heads)
        self.keys = torch.from_numpy(np.zeros((*shape, config.head_dim, capacity), np.float32))
        self.values = torch.from_numpy(np.zeros((*shape, capacity, config.head_dim), np.float32))

    @staticmethod
    def size_bytes(config: ModelConfig, *, rows: int, capacity: int) -> int:
        """Memory of a store whose rows are all full."""
        return 2 * 4 * config.layers * rows * config.kv_heads * config.head_dim * capacity

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a row to another."""
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def swap(self, a: int, b: int, a_length: int, b_length: int) -> None:
        """Exchange two rows holding that many tokens."""
        if b_length == 0:
            self.copy(a, b, a_length)
        elif a_length == 0:
            self.copy(b, a, b_length)
        else:
            keys = self.keys[:, a, :, :, :a_length].clone()
            values = self.values[:, a, :, :a_length].clone()
            self.copy(b, a, b_length)
            self.keys[:, b, :, :, :a_length] = keys
            self.values[:, b, :, :a_length] = values


@dataclass(frozen=True, slots=True)
class _Dense:
    gate_up: torch.Tensor  # [hidden, 2 * intermediate]
    down: torch.Tensor  # [intermediate, hidden]


@dataclass(frozen=True, slots=True)
class _Sparse:
    router: torch.Tensor  # [hidden, experts]
    gate_up: torch.Tensor  # [experts, hidden, 2 * intermediate]
    down: torch.Tensor  # [experts, intermediate, hidden]


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: torch.Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim], behind the input norm
    qk_norm: torch.Tensor  # [heads + kv_heads, head_dim]; of a model without, the softmax scale and ones
    out: torch.Tensor  # [heads * head_dim, hidden]
    mlp: _Dense | _Sparse  # behind the post-attention norm


class Weights:
    """All parameters of one policy version, fused. Immutable: a swap replaces the object. ``tensors`` are what it was
    made of, under their Hugging Face names: an update that brings only some of them needs the others."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.config = config
        c = config
        self.embed = self._take("model.embed_tokens.weight", c.vocab, c.hidden)
        head = self.embed if c.tied else self._take("lm_head.weight", c.vocab, c.hidden)
        self.head = _behind(self._take("model.norm.weight", c.hidden), head)  # [hidden, vocab]
        self.layers = [self._layer(n) for n in range(c.layers)]

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFolderError(f"tensor {name} is missing from the safetensors")
        if tuple(tensor.shape) != shape:
            raise ModelFolderError(f"tensor {name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        return tensor.to(torch.float32)

    def _layer(self, n: int) -> _Layer:
        c = self.config
        p = f"model.layers.{n}."
        kv = c.kv_heads * c.head_dim
        q_norm = self._head_norm(p + "self_attn.q_norm.weight") * c.head_dim**-0.5
        k_norm = self._head_norm(p + "self_attn.k_norm.weight")
        projections = [
            _interleaved(self._take(p + "self_attn.q_proj.weight", c.heads * c.head_dim, c.hidden), c.heads),
            _interleaved(self._take(p + "self_attn.k_proj.weight", kv, c.hidden), c.kv_heads),
            self._take(p + "self_attn.v_proj.weight", kv, c.hidden),
        ]
        mlp_norm = self._take(p + "post_attention_layernorm.weight", c.hidden)
        return _Layer(
            qkv=_behind(self._take(p + "input_layernorm.weight", c.hidden), torch.cat(projections)),
            qk_norm=torch.cat((q_norm.expand(c.heads, -1), k_norm.expand(c.kv_heads, -1))),
            out=self._take(p + "self_attn.o_proj.weight", c.hidden, c.heads * c.head_dim).t().contiguous(),
            mlp=(
                self._sparse(p + "mlp.", mlp_norm)
                if c.is_sparse(n)
                else self._dense(p + "mlp.", mlp_norm, c.intermediate)
            ),
        )

    def _head_norm(self, name: str) -> torch.Tensor:
        width = self.config.head_dim
        return _interleaved(self._take(name, width), 1) if self.config.head_norms else torch.ones(width)

    def _dense(self, p: str, norm: torch.Tensor, width: int) -> _Dense:
        hidden = self.config.hidden
        gate = self._take(p + "gate_proj.weight", width, hidden)
        up = self._take(p + "up_proj.weight", width, hidden)
        down = self._take(p + "down_proj.weight", hidden, width)
        return _Dense(_behind(norm, torch.cat((gate, up))), down.t().contiguous())

    def _sparse(self, p: str, norm: torch.Tensor) -> _Sparse:
        c = self.config
        router = _behind(norm, self._take(p + "gate.weight", c.experts, c.hidden))
        experts = [self._dense(f"{p}experts.{e}.", norm, c.expert_intermediate) for e in range(c.experts)]
        return _Sparse(router, torch.stack([e.gate_up for e in experts]), torch.stack([e.down for e in experts]))


def _behind(norm: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """A projection [out, in] whose input is scaled by ``norm`` [in], as one matrix [in, out]."""
    return (projection * norm).t().contiguous()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of every head from (first half, second half) to pairs that rope rotates together."""
    rows = weight.shape[0] // heads
    return weight.view(heads, 2, rows // 2, -1).transpose(1, 2).reshape(weight.shape)


def load_weights(config: ModelConfig, folder: Path) -> Weights:
    """Read and fuse the folder's weights for ``config``. Raises :class:`ModelFolderError`."""
    with torch.inference_mode():
        return Weights(config, read_tensors(folder))


def with_tensors(weights: Weights, changed: Mapping[str, torch.Tensor]) -> Weights:
    """``weights`` with some of its tensors changed. Raises :class:`ModelFolderError` for one that it does not have, or
    of another shape."""
    unknown = sorted(changed.keys() - weights.tensors.keys())
    if unknown:
        raise ModelFolderError(f"the model has no tensor {unknown[0]}")
    with torch.inference_mode():
        return Weights(weights.config, {**weights.tensors, **changed})


class Decoder:
    """Runs steps. ``weights`` may be replaced between steps; the rope tables stay."""

    def __init__(self, weights: Weights, *, capacity: int) -> None:
        self.weights = weights
        c = weights.config
        frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
        angles = torch.outer(torch.arange(capacity, dtype=torch.float32), frequencies)
        self._turns = torch.polar(torch.ones_like(angles), angles)  # [capacity, head_dim / 2], complex
        self._eps = torch.tensor(c.rms_eps)
        self._causal = torch.full((_CAUSAL, _CAUSAL), float("-inf")).triu_(1)

    def step(self, batch: StepInput, store: KVStore) -> torch.Tensor:
        """Compute the step's keys and values into ``store`` and return logits [len(wanted), vocab]."""
        weights = self.weights
        c = weights.config
        turns = self._turns[batch.positions].unsqueeze_(1)
        queries_end, keys_end = c.heads, c.heads + c.kv_heads
        total = batch.ids.shape[0]
        chunks = batch.chunks
        hidden = weights.embed[batch.ids]
        for n, layer in enumerate(weights.layers):
            qkv = torch.mm(self._normed(hidden), layer.qkv).view(total, -1, c.head_dim)
            qk = qkv[:, :keys_end]
            qk = self._normed(qk).mul_(layer.qk_norm) if c.head_norms else qk * layer.qk_norm
            pairs = torch.view_as_complex(qk.view(total, keys_end, -1, 2))
            qk = torch.view_as_real(pairs * turns).view(total, keys_end, c.head_dim)
            keys, values = store.keys[n], store.values[n]
            keys.permute(0, 3, 1, 2).index_put_((batch.rows, batch.positions), qk[:, queries_end:])
            values.permute(0, 2, 1, 3).index_put_((batch.rows, batch.positions), qkv[:, keys_end:])
            queries = qk[:, :queries_end]
            if batch.ends is not None and n == c.layers - 1:
                hidden, queries, chunks = hidden[batch.wanted], queries[batch.wanted], batch.ends
            attended = self._attention(batch, chunks, queries, keys, values)
            hidden = torch.addmm(hidden, attended, layer.out)
            normed = self._normed(hidden)
            if isinstance(layer.mlp, _Dense):
                hidden = torch.addmm(hidden, _swiglu(torch.mm(normed, layer.mlp.gate_up)), layer.mlp.down)
            else:
                hidden = hidden + self._experts(normed, layer.mlp)
        if batch.ends is None:
            hidden = hidden[batch.wanted]
        return torch.mm(self._normed(hidden), weights.head)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension, without weights; cheaper than ``F.rms_norm``, which is slow on CPU."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()

    def _attention(
        self,
        batch: StepInput,
        chunks: Sequence[Chunk],
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """queries [T, heads, head_dim] -> attended [T, heads * head_dim]."""
        c = self.weights.config
        parts: list[torch.Tensor] = []
        if batch.mask is not None:
            parts.append(self._decode_attention(batch, queries, keys, values))
        for chunk in chunks:
            piece = queries[chunk.offset : chunk.offset + chunk.length]
            parts.append(self._chunk_attention(chunk, piece, keys[chunk.row], values[chunk.row]))
        if not parts:
            return queries.reshape(0, c.heads * c.head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_attention(
        self, batch: StepInput, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        c = self.weights.config
        assert batch.mask is not None
        region, _, longest = batch.mask.shape
        group = c.heads // c.kv_heads
        count = batch.decode_rows.shape[0]
        queries = queries[:count]
        if not batch.decode_in_order:
            spread = queries.new_zeros(region, c.heads, c.head_dim)
            spread[batch.decode_rows] = queries
            queries = spread
        flat = region * c.kv_heads
        mask = batch.mask.unsqueeze(1).expand(region, c.kv_heads, 1, longest).reshape(flat, 1, longest)
        k = keys[:region].view(flat, c.head_dim, -1)[:, :, :longest]
        v = values[:region].view(flat, -1, c.head_dim)[:, :longest]
        scores = torch.baddbmm(mask, queries.reshape(flat, group, c.head_dim), k)
        attended = torch.bmm(torch.softmax(scores, -1), v).view(region, -1)
        return attended if batch.decode_in_order else attended[batch.decode_rows]

    def _chunk_attention(
        self, chunk: Chunk, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        c = self.weights.config
        group = c.heads // c.kv_heads
        block = max(16, min(_CAUSAL, _SCORE_ELEMENTS // (c.heads * (chunk.position + chunk.length))))
        parts = []
        for start in range(0, chunk.length, block):
            q = queries[start : start + block]
            count = q.shape[0]
            before = chunk.position + start
            end = before + count
            q = q.view(count, c.kv_heads, group, c.head_dim).permute(1, 2, 0, 3)
            scores = torch.bmm(q.reshape(c.kv_heads, group * count, c.head_dim), keys[:, :, :end])
            scores.view(c.kv_heads, group, count, end)[..., before:].add_(self._causal[:count, :count])
            attended = torch.bmm(torch.softmax(scores, -1), values[:, :end])
            attended = attended.view(c.kv_heads, group, count, c.head_dim).permute(2, 0, 1, 3)
            parts.append(attended.reshape(count, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _experts(self, hidden: torch.Tensor, mlp: _Sparse) -> torch.Tensor:
        c = self.weights.config
        routed = torch.softmax(torch.mm(hidden, mlp.router), -1)
        weight, chosen = torch.topk(routed, c.experts_per_token, -1)
        if c.norm_topk:
            weight = weight / weight.sum(-1, keepdim=True)
        result = torch.zeros_like(hidden)
        for expert in torch.unique(chosen).tolist():
            token, rank = torch.where(chosen == expert)
            computed = torch.mm(_swiglu(torch.mm(hidden[token], mlp.gate_up[expert])), mlp.down[expert])
            result.index_add_(0, token, computed * weight[token, rank].unsqueeze(1))
        return result


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
