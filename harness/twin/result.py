"""What a simulation leaves behind, and the figures that are read off it."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from farm.dispatch import Counts
from farm.types import EndReason
from harness.twin.engine import EngineTotals
from harness.twin.learner import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """One graded trajectory. ``seconds``: of the attempt that landed; ``engine_wait_s``: its longest generation."""

    at_s: float
    seconds: float
    tokens: int
    sampled: int
    turns: int
    end_reason: EndReason
    reward: float
    engine_wait_s: float


@dataclass(slots=True, kw_only=True)
class Result:
    """``rows``: how many rows the log has of each episode (one). At each look of the driver, from the warm-up on:
    ``in_flight`` attempts, and the highest KV use of an engine (``uses``, shares), as a scrape of its metrics sees it;
    both with their time."""

    name: str
    warm_up_s: float = 0.0
    ended_at_s: float = 0.0
    landings: list[Landing] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    starts_s: list[float] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    engines: list[EngineTotals] = field(default_factory=list)
    in_flight: list[tuple[float, int]] = field(default_factory=list)
    uses: list[tuple[float, float]] = field(default_factory=list)
    live: list[tuple[int, float]] = field(default_factory=list)
    counts: Counts | None = None

    def per_hour(self) -> float:
        """Graded trajectories per hour, after the warm-up."""
        span_s = self.ended_at_s - self.warm_up_s
        return 3600.0 * len(self._warm()) / span_s if span_s > 0 else 0.0

    def trajectory_s(self) -> float:
        """Mean time of a trajectory that landed after the warm-up."""
        return _mean([landing.seconds for landing in self._warm()])

    def tokens_mean(self) -> float:
        return _mean([landing.tokens for landing in self._warm()])

    def step_s(self) -> float:
        """Median step time (wait and training) of the steps that ended after the warm-up; NaN without one."""
        found = [step.step_s for step in self.steps if step.ended_at_s >= self.warm_up_s]
        return statistics.median(found) if found else float("nan")

    def peak_use(self) -> float:
        """The highest share of the KV capacity in use at any moment."""
        return max((engine.peak_use for engine in self.engines), default=0.0)

    def peak_seen(self) -> float:
        """The highest share of the KV capacity that any look at any engine saw."""
        return max((use for _, use in self.uses), default=0.0)

    def mean_use(self) -> float:
        """Mean share of the KV capacity in use, over engines and time."""
        span_s = (self.ended_at_s - self.warm_up_s) * len(self.engines)
        return sum(engine.use_s for engine in self.engines) / span_s if span_s > 0 else 0.0

    def peak_queued(self) -> int:
        return max((engine.peak_queued for engine in self.engines), default=0)

    def start_s(self) -> float:
        """Median start of a sandbox."""
        return statistics.median(self.starts_s) if self.starts_s else float("nan")

    def digest(self) -> str:
        """Of everything in it: equal scenarios give equal digests."""
        value = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()

    def _warm(self) -> list[Landing]:
        return [landing for landing in self.landings if landing.at_s >= self.warm_up_s]


def _plain(record: Any) -> dict[str, Any]:
    return asdict(record)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")
