"""The two losses, as sums over loss tokens (the learner divides by their number in the whole batch)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trainer.batch import MicroBatch

_MAX_LOG_RATIO = 20.0


def nll(logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
    """Supervised: negative log-likelihood."""
    del batch
    return -logprobs.sum(), {}


def grpo(clip_low: float, clip_high: float) -> Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, float]]]:
    """Clipped policy gradient on recorded log-probabilities. The result can be sent to other ranks (pickled).

    Per token: ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` with ``ratio = exp(new - recorded)``.
    Normalised by the number of loss tokens of the batch (token mean): every sampled token weighs the same, so a long
    episode is neither favoured nor spared; there is no KL term. The log-ratio is cut at +-20, which no policy update
    reaches: a corrupt recorded value then costs its own token, not the step.

    Metric sums: ``clipped`` (tokens whose gradient the clip cut off), ``kl`` (``exp(-d) - 1 + d`` with ``d = new -
    recorded``, the low-variance estimate of KL(recorded || new)), ``surprise`` (``-new``: an estimate of the entropy).
    """

    return partial(_clipped, clip_low=clip_low, clip_high=clip_high)


def _clipped(
    logprobs: Tensor, batch: MicroBatch, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, float]]:
    recorded = torch.from_numpy(batch.old_logprobs).to(logprobs.device)
    advantages = torch.from_numpy(batch.advantages).to(logprobs.device)
    delta = (logprobs - recorded).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = delta.exp()
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    with torch.no_grad():
        sums = {
            "clipped": float((clipped < free).sum()),
            "kl": float(((-delta).exp() - 1.0 + delta).sum()),
            "surprise": float(-logprobs.sum()),
        }
    return -torch.minimum(free, clipped).sum(), sums
