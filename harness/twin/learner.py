"""The trainer of a simulation: the sealed rows through the trainer's own batcher, each step in the model's time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from farm.types import Cursor, PolicyVersion, Trajectory
from harness.twin.clock import Clock, Cpu
from harness.twin.fleet import policy
from harness.twin.trainer import TrainerSpeed
from trainer.group import Batch, Batcher, BatchRules


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One trained step, with the trainer's own two figures: it waited for ``wait_s``, then trained for ``train_s``."""

    step: int
    ended_at_s: float
    wait_s: float
    train_s: float
    episodes: int
    trained: int
    tokens: int
    staleness_max: int

    @property
    def step_s(self) -> float:
        return self.wait_s + self.train_s


class Learner:
    def __init__(
        self,
        clock: Clock,
        cpu: Cpu | None,
        speed: TrainerSpeed,
        rules: BatchRules,
        *,
        publish: Callable[[PolicyVersion], None],
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._speed = speed
        self._batcher = Batcher(rules)
        self._publish = publish
        self._rows: deque[tuple[Trajectory, int]] = deque()
        self._lengths: dict[Cursor, int] = {}
        self._read = 0
        self._busy = False
        self._waiting_since_s = 0.0
        self.steps: list[StepRecord] = []

    def sealed(self, rows: list[tuple[Trajectory, int]]) -> None:
        """``rows``: a trajectory and how many tokens it has."""
        self._rows.extend(rows)
        self._pump()

    def _pump(self) -> None:
        while self._rows and not self._busy:
            trajectory, tokens = self._rows.popleft()
            at = Cursor(shard=0, row=self._read)
            self._read += 1
            self._lengths[at] = tokens
            batch = self._batcher.push(at, trajectory)
            if batch is not None:
                self._train(batch)

    def _train(self, batch: Batch) -> None:
        self._busy = True
        lengths = [self._lengths[sample.at] for sample in batch.samples]
        pending = set(self._batcher.pending())
        self._lengths = {at: tokens for at, tokens in self._lengths.items() if at in pending}
        now_s = self._clock.now_s
        job = (batch, now_s, now_s - self._waiting_since_s, sum(lengths))
        work_s = self._speed.step_s(lengths)
        if self._cpu is None:
            self._clock.at(now_s + work_s, self._trained, job)
        else:
            self._cpu.run_job(work_s, self._trained, job)

    def _trained(self, job: tuple[Batch, float, float, int]) -> None:
        batch, started_at_s, wait_s, tokens = job
        now_s = self._clock.now_s
        self.steps.append(
            StepRecord(
                step=batch.step + 1,
                ended_at_s=now_s,
                wait_s=wait_s,
                train_s=now_s - started_at_s,
                episodes=batch.graded,
                trained=len(batch.samples),
                tokens=tokens,
                staleness_max=max((s.staleness for s in batch.samples), default=0),
            )
        )
        self._clock.at(now_s + self._speed.save_s, self._saved, batch)

    def _saved(self, batch: Batch) -> None:
        now_s = self._clock.now_s
        self._publish(policy(batch.step + 1, published_at_s=now_s, consumed_groups=batch.consumed_groups))
        self._busy = False
        self._waiting_since_s = now_s
        self._pump()
