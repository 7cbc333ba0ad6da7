"""Choose the next token of every row of a step at once.

A draw depends only on (seed, position) and the row's own distribution: one uniform number per row through the inverse
CDF, so a request samples the same tokens in any batch, after a retraction, and on any machine up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from farm.engine.embedded.wire import GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters per row, all [S]. ``top_k`` is the vocabulary's size or more where it does not cut."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seed: NDArray[np.uint64]
    position: NDArray[np.int32]


def uniforms(seed: NDArray[np.uint64], position: NDArray[np.int32]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position): SplitMix64's output function over their mix."""
    x = seed + position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Logits [S, vocab] -> chosen ids [S] and their log-probabilities [S] under the untempered, uncut softmax."""
    logprobs = torch.log_softmax(logits, -1)
    greedy = rows.temperature < GREEDY_BELOW
    chosen = torch.argmax(logits, -1) if greedy.all() else _draw(logits, logprobs, rows, greedy)
    picked = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1)
    return chosen.numpy(), picked.numpy()


def _draw(logits: torch.Tensor, logprobs: torch.Tensor, rows: SamplingRows, greedy: NDArray[np.bool_]) -> torch.Tensor:
    temperature = np.where(greedy, np.float32(1), rows.temperature)
    if (temperature == 1).all():
        probs = logprobs.exp()
    else:
        probs = torch.softmax(logits / torch.from_numpy(temperature).unsqueeze(1), -1)
    order = None
    if (rows.top_p < 1).any() or (rows.top_k < logits.shape[1]).any():
        probs, order = torch.sort(probs, -1, descending=True)
        before = torch.cumsum(probs, -1) - probs
        keep = before < torch.from_numpy(rows.top_p).unsqueeze(1)
        keep &= torch.arange(logits.shape[1]) < torch.from_numpy(rows.top_k).unsqueeze(1)
        keep[:, 0] = True
        probs = probs * keep
    ladder = torch.cumsum(probs, -1, dtype=torch.float64)
    target = torch.from_numpy(uniforms(rows.seed, rows.position)).unsqueeze(1) * ladder[:, -1:]
    chosen = torch.searchsorted(ladder, target, right=True)
    if order is not None:
        chosen = order.gather(1, chosen)
    chosen = chosen.squeeze(1)
    if greedy.any():
        chosen = torch.where(torch.from_numpy(greedy), torch.argmax(logits, -1), chosen)
    return chosen
