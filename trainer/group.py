"""PURE: rows of the trajectory log, in log order, to training batches.

Invariants, over any interleaving of landings (property-tested):

* The batches are a function of the log's order and the configuration alone: when rows are read, and where a trainer
  was stopped and resumed, changes nothing. So a batch is cut at the very row that completes it.
* A row is trained on at most once, and only rows with a reward are. Failed and dropped attempts enter neither the mean
  nor the standard deviation of their group (Rule 3).
* A group takes one place in one batch: as soon as ``min_attempts`` of its attempts are graded (``mode = "sync"``: once
  all have landed), or when all have landed and too few are graded (*closed*: nothing is trained, but the farm's lead
  over the trainer is counted in groups, so it must be consumed).
* Graded attempts that land later (*stragglers*) go into the next batch, with the advantage from all graded attempts of
  their group by then. Attempts of a group without variance wait: should a straggler bring variance, they train with it.
* A row whose oldest token is more than ``max_staleness`` policy steps behind is dropped, with that reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farm.types import Cursor, Graded, Trajectory, content_digest
from trainer.advantage import group_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What decides a batch. ``max_staleness`` is in policy steps; ``wait_for_all`` is the synchronous mode."""

    groups_per_step: int
    min_attempts: int
    max_staleness: int
    wait_for_all: bool = False

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.min_attempts < 1 or self.max_staleness < 0:
            raise ValueError(f"not a possible set of rules: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row to train on: where it stands in the log, how far its oldest token lags, its advantage."""

    at: Cursor
    episode_id: str
    advantage: float
    staleness: int
    straggler: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRow:
    """A graded row that is not trained on: ``stale`` or ``too_few_graded``."""

    episode_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One training step: ``step`` is the policy it starts from. Samples are in log order; there may be none.

    ``graded`` and ``failed`` count the rows that landed since the batch before, ``rewards`` and ``resolved`` (how many
    passed) are of the graded."""

    step: int
    samples: tuple[Sample, ...]
    groups: int
    zero_variance_groups: int
    closed_groups: int
    dropped: tuple[DroppedRow, ...]
    graded: int
    resolved: int
    failed: int
    rewards: tuple[float, ...]
    consumed_groups: int  # including this batch


@dataclass(slots=True, kw_only=True)
class _Row:
    at: Cursor
    episode_id: str
    reward: float
    oldest_step: int | None
    done: bool = False  # trained on or dropped


@dataclass(slots=True, kw_only=True)
class _Group:
    size: int
    landed: int = 0
    consumed: bool = False
    rows: list[_Row] = field(default_factory=list)


class Batcher:
    """Push every row of the log in order; a batch comes out of the push that completes it."""

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules
        self.step = 0
        self.consumed_groups = 0
        self._groups: dict[str, _Group] = {}
        self._queue: list[str] = []
        self._rewards: list[float] = []
        self._resolved = 0
        self._failed = 0

    def push(self, at: Cursor, trajectory: Trajectory) -> Batch | None:
        """``at`` is the row's own position. Rows that are not for training (``purpose``) change nothing."""
        if trajectory.purpose != "rl":
            return None
        group = self._groups.setdefault(trajectory.group_id, _Group(size=trajectory.group_size))
        group.landed += 1
        outcome = trajectory.outcome
        if isinstance(outcome, Graded) and math.isfinite(outcome.reward):
            group.rows.append(
                _Row(
                    at=at,
                    episode_id=trajectory.episode_id,
                    reward=outcome.reward,
                    oldest_step=trajectory.oldest_step,
                )
            )
            self._rewards.append(outcome.reward)
            self._resolved += outcome.evidence.resolved
        else:
            self._failed += 1
        if not group.consumed and trajectory.group_id not in self._queue and self._settled(group):
            self._queue.append(trajectory.group_id)
        return self._cut() if len(self._queue) == self.rules.groups_per_step else None

    def pending(self) -> list[Cursor]:
        """Positions of the rows that a later batch may train on, in log order."""
        return sorted(r.at for g in self._groups.values() for r in g.rows if not r.done)

    def _settled(self, group: _Group) -> bool:
        all_landed = group.landed >= group.size
        return all_landed or (not self.rules.wait_for_all and len(group.rows) >= self.rules.min_attempts)

    def _cut(self) -> Batch:
        chosen, self._queue = self._queue, []
        fresh = set(chosen)
        samples: list[Sample] = []
        dropped: list[DroppedRow] = []
        closed = flat = 0
        for group_id, group in self._groups.items():
            if group_id not in fresh and not group.consumed:
                continue
            group.consumed = True
            if len(group.rows) < self.rules.min_attempts:
                closed += group_id in fresh
                dropped += [DroppedRow(episode_id=r.episode_id, reason="too_few_graded") for r in group.rows]
                continue
            advantages = group_advantages([r.reward for r in group.rows])
            if advantages is None:
                flat += group_id in fresh
                continue
            for row, advantage in zip(group.rows, advantages, strict=True):
                if row.done:
                    continue
                row.done = True
                staleness = 0 if row.oldest_step is None else self.step - row.oldest_step
                if staleness > self.rules.max_staleness:
                    dropped.append(DroppedRow(episode_id=row.episode_id, reason="stale"))
                    continue
                samples.append(
                    Sample(
                        at=row.at,
                        episode_id=row.episode_id,
                        advantage=advantage,
                        staleness=staleness,
                        straggler=group_id not in fresh,
                    )
                )
        self._groups = {k: g for k, g in self._groups.items() if not (g.consumed and g.landed >= g.size)}
        self.consumed_groups += len(chosen)
        batch = Batch(
            step=self.step,
            samples=tuple(sorted(samples, key=lambda s: s.at)),
            groups=len(chosen),
            zero_variance_groups=flat,
            closed_groups=closed,
            dropped=tuple(dropped),
            graded=len(self._rewards),
            resolved=self._resolved,
            failed=self._failed,
            rewards=tuple(self._rewards),
            consumed_groups=self.consumed_groups,
        )
        self.step += 1
        self._rewards, self._resolved, self._failed = [], 0, 0
        return batch

    # ------------------------------------------------------------------------------------------ resume

    def state(self) -> dict[str, Any]:
        """Plain JSON data from which :meth:`restore` makes an equal batcher; rows are named by position."""
        return {
            "step": self.step,
            "consumed_groups": self.consumed_groups,
            "queue": list(self._queue),
            "rewards": list(self._rewards),
            "resolved": self._resolved,
            "failed": self._failed,
            "groups": [
                {
                    "id": group_id,
                    "size": group.size,
                    "landed": group.landed,
                    "consumed": group.consumed,
                    "rows": [[r.at.shard, r.at.row, r.episode_id, r.reward, r.oldest_step, r.done] for r in group.rows],
                }
                for group_id, group in self._groups.items()
            ],
        }

    @classmethod
    def restore(cls, rules: BatchRules, state: Mapping[str, Any]) -> Batcher:
        batcher = cls(rules)
        batcher.step = state["step"]
        batcher.consumed_groups = state["consumed_groups"]
        batcher._queue = list(state["queue"])
        batcher._rewards = list(state["rewards"])
        batcher._resolved = state["resolved"]
        batcher._failed = state["failed"]
        for entry in state["groups"]:
            batcher._groups[entry["id"]] = _Group(
                size=entry["size"], landed=entry["landed"], consumed=entry["consumed"], rows=_rows(entry["rows"])
            )
        return batcher


def batch_digest(samples: Sequence[Sample]) -> str:
    """Which rows a step trained on, and how: two steps with the same digest trained on the same batch."""
    return content_digest([[s.episode_id, s.advantage, s.staleness] for s in samples])


def _rows(entries: Sequence[Sequence[Any]]) -> list[_Row]:
    return [
        _Row(at=Cursor(shard=shard, row=row), episode_id=episode, reward=reward, oldest_step=oldest, done=done)
        for shard, row, episode, reward, oldest, done in entries
    ]
