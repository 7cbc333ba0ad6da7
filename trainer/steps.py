"""Rows of the trajectory log in, optimizer steps out: what a live trainer and a replay share.

The weights after step *n* are a function of the policy at step 0, the configuration and the log's order. All that goes
into that function is here; nothing here reads a clock or writes a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.protocols import TrajectoryLog
from farm.types import Cursor, Trajectory
from trainer.batch import TokenSequence, micro_batches, sequences
from trainer.config import TrainerConfig
from trainer.group import Batch, Batcher, BatchRules, batch_digest
from trainer.megatron import losses
from trainer.megatron.learner import Learner
from trainer.megatron.ranks import Line, RankedLearner, require_fit
from trainer.tail import fetch


class Steps:
    """``source`` is the Hugging Face folder of the policy at step 0; ``line`` leads to the other ranks, where there are
    any. Raises ``UsageError`` for a malformed folder, and for a model that the ranks can't hold."""

    def __init__(self, source: Path, config: TrainerConfig, rules: BatchRules, *, line: Line | None = None) -> None:
        self.learner = self._make_learner(source, config, line)
        self._config = config
        self._rules = rules
        self._batcher = Batcher(rules)
        self._held: dict[Cursor, Trajectory] = {}  # rows that a batch to come may train on

    @staticmethod
    def _make_learner(source: Path, config: TrainerConfig, line: Line | None) -> Learner | RankedLearner:
        parallel = config.parallel
        if line is None:
            if parallel.ranks > 1:
                raise UsageError(f"parallel.ranks is {parallel.ranks}, and this is one process; start with --ranks")
            return Learner(source, clip_grad=config.clip_grad, seed=config.seed, parallel=parallel)
        require_fit(config, source)
        return RankedLearner(line, source, clip_grad=config.clip_grad, seed=config.seed, parallel=parallel)

    @property
    def consumed_groups(self) -> int:
        """Groups used up so far."""
        return self._batcher.consumed_groups

    def push(self, at: Cursor, trajectory: Trajectory) -> Batch | None:
        """The next row of the log and its position. Whoever gets a batch must :meth:`train` on it before the next."""
        batch = self._batcher.push(at, trajectory)
        self._held[at] = trajectory
        return batch

    def train(self, batch: Batch) -> dict[str, Any]:
        """The optimizer step (none when no sample has a gradient), and what there is to say of it."""
        data: list[TokenSequence] = []
        dropped = [{"episode": d.episode_id, "reason": d.reason} for d in batch.dropped]
        for sample in batch.samples:
            try:
                data += sequences(self._held[sample.at], advantage=sample.advantage)
            except ValueError:
                dropped.append({"episode": sample.episode_id, "reason": "bad_logprobs"})
        pending = set(self._batcher.pending())
        self._held = {at: row for at, row in self._held.items() if at in pending}
        batches = micro_batches(data, max_tokens=self._config.micro_batch_tokens, packed=self._config.parallel.packing)
        lr = self._config.learning_rate(batch.step)
        line: dict[str, Any] = {
            "step": batch.step + 1,
            "lr": lr,
            "batch_digest": batch_digest(batch.samples),
            "groups": batch.groups,
            "consumed_groups": batch.consumed_groups,
            "zero_variance_groups": batch.zero_variance_groups,
            "closed_groups": batch.closed_groups,
            "episodes": batch.graded,
            "failed_episodes": batch.failed,
            "trained_episodes": len(batch.samples),
            "straggler_episodes": sum(s.straggler for s in batch.samples),
            "dropped": dropped,
            "reward_mean": _mean(batch.rewards),
            "pass_rate": batch.resolved / batch.graded if batch.graded else None,
            "staleness_mean": _mean([s.staleness for s in batch.samples]),
            "staleness_max": max((s.staleness for s in batch.samples), default=None),
            "tokens": sum(len(s.ids) for s in data),
            "loss_tokens": sum(b.tokens for b in batches),
        }
        if not batches:
            return line | dict.fromkeys(("loss", "clip_fraction", "approx_kl", "entropy", "grad_norm"))
        self.learner.check_ids(max(int(s.ids.max()) for s in data), max(len(s.ids) for s in data))
        result = self.learner.step(batches, losses.grpo(self._config.clip_low, self._config.clip_high), lr=lr)
        return line | {
            "loss": result.sums["loss"] / result.tokens,
            "clip_fraction": result.sums["clipped"] / result.tokens,
            "approx_kl": result.sums["kl"] / result.tokens,
            "entropy": result.sums["surprise"] / result.tokens,
            "grad_norm": result.grad_norm,
        }

    def batcher_state(self) -> dict[str, Any]:
        """Plain JSON data for :meth:`restore`."""
        return self._batcher.state()

    def resume(self, folder: Path, log: TrajectoryLog) -> tuple[int, dict[str, Any]] | None:
        """Go on from the newest checkpoint in ``folder``, whose (step, loop) it returns; None without one. Rows that
        are still waiting are read from ``log`` again."""
        found = self.learner.resume(folder)
        if found is not None:
            self._batcher = Batcher.restore(self._rules, found[1]["batcher"])
            self._held = fetch(log, self._batcher.pending())
        return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
