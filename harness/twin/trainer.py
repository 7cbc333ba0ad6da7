"""Model of the trainer: how long a step takes, from the micro-batches that ``trainer.batch`` makes of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.twin.sheets import Gpu, ModelShape
from trainer.batch import split

FORWARD_AND_BACKWARD = 3.0
"""FLOPs of forward and backward, in forwards: the backward pass costs two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpeed:
    """Time of one step: ``fixed_s``, plus ``token_s`` for each (padded) token and ``pair_s`` for each pair of a token
    and one before it in its row. ``micro_batch_tokens`` bounds rows x longest, as in ``trainer.batch``."""

    token_s: float
    pair_s: float
    fixed_s: float
    micro_batch_tokens: int
    save_s: float = 0.0  # checkpoint and publication, after the step

    def step_s(self, lengths: Sequence[int]) -> float:
        """``lengths`` [N]: tokens of each sequence that is trained on. No sequence: no optimizer step."""
        if not lengths:
            return 0.0
        total_s = self.fixed_s
        for part in split(lengths, max_tokens=self.micro_batch_tokens):
            longest = lengths[part[-1]]
            total_s += len(part) * longest * (self.token_s + self.pair_s * longest / 2)
        return total_s


def trainer_speed(
    shape: ModelShape,
    gpu: Gpu,
    *,
    gpus: int,
    utilisation: float,
    fixed_s: float,
    micro_batch_tokens: int,
    save_s: float,
    recompute: bool = True,
) -> TrainerSpeed:
    """Model FLOPs over what ``gpus`` reach. ``recompute``: activations are computed again in the backward pass, one
    more forward."""
    flops_per_s = gpus * gpu.flops_per_s * utilisation
    passes = FORWARD_AND_BACKWARD + (1.0 if recompute else 0.0)
    return TrainerSpeed(
        token_s=passes * 2.0 * shape.active_weights / flops_per_s,
        pair_s=passes * 4.0 * shape.layers * shape.heads * shape.head_dim / flops_per_s,
        fixed_s=fixed_s,
        micro_batch_tokens=micro_batch_tokens,
        save_s=save_s,
    )
