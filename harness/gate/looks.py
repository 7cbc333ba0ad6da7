"""Measure, judge, and buy more until there is an answer, nothing left to buy, or no budget.

When to stop follows from the verdict so far and from time alone; the looks were fixed before (``design``), so the error
rates of ``decide`` hold however it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from harness.gate.decide import Answer, Criterion, Verdict, judge
from harness.gate.design import Design, Source
from harness.gate.evidence import (
    Block,
    Counts,
    Missing,
    Reading,
    attempt_fractions,
    cycle_fractions,
    pass_reading,
    pooled,
    ratio_reading,
)


class Side(StrEnum):
    BASE = "base"
    CANDIDATE = "candidate"


class BenchError(Exception):
    """Something could not be measured; the message says what."""


class BaseError(Exception):
    """The base, which is trusted, could not be measured: that says nothing of the candidate."""


class Bench(Protocol):
    """Where measurements come from. Both methods raise BenchError when nothing can be measured."""

    def rollouts(self, attempts: int, look: int) -> Counts:
        """``attempts`` fresh attempts of the candidate at every task, with a seed of their own for each ``look``."""
        ...

    def block(self, side: Side, number: int) -> Block:
        """One short training with that side's code; ``number`` counts the blocks of the whole run from 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``looks`` at each source; ``counts``: the candidate's; ``pairs``: (base, candidate) blocks; ``stopped``: why no
    more was bought."""

    verdict: Verdict
    looks: Mapping[Source, int]
    counts: Counts
    pairs: tuple[tuple[Block, Block], ...]
    stopped: str


def plan(design: Design, base_attempts: float) -> dict[str, Criterion]:
    """The test of each gated metric. ``base_attempts``: per task, in the baseline."""
    fractions = {
        Source.ROLLOUTS: attempt_fractions(design.attempts, base_attempts),
        Source.BLOCKS: cycle_fractions(design.cycles),
    }
    return {
        m.name: Criterion(margin=m.harm_margin, fractions=fractions[m.source], weight=m.weight) for m in design.metrics
    }


def look_until_decided(
    bench: Bench,
    *,
    design: Design,
    base: Counts,
    weights: Mapping[str, float],
    budget_s: float = math.inf,
    clock: Callable[[], float] = lambda: 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run the gate. ``weights``: of the tasks; ``clock``: seconds. The first look at each source is taken whatever the
    budget; a later one only if, at the pace so far, it ends within it. Raises BaseError."""
    tests = plan(design, sum(base.graded.values()) / len(weights))
    state = _State(bench=bench, design=design, base=base, weights=weights, say=say)
    verdict = judge(tests, state.readings, alpha=design.alpha)
    started_s = clock()
    pace_s: dict[Source, float] = {}  # seconds per unit bought
    stopped = "every look has been taken"
    while verdict.answer is Answer.INCONCLUSIVE:
        due = [source for source in Source if state.is_open(source, verdict) and state.units(source)]
        fitting = [s for s in due if clock() - started_s + pace_s.get(s, 0.0) * state.units(s) <= budget_s]
        allowed = [source for source in due if state.looks[source] == 0 or source in fitting]
        if not allowed:
            stopped = "the budget is used up" if due else stopped
            break
        source = allowed[0]  # rollouts before blocks: they cost less, and a regression ends it
        units, before_s = state.units(source), clock()
        state.buy(source)
        pace_s[source] = (clock() - before_s) / units
        verdict = judge(tests, state.readings, alpha=design.alpha)
    if verdict.answer is not Answer.INCONCLUSIVE:
        stopped = "decided"
    return Outcome(
        verdict=verdict, looks=dict(state.looks), counts=state.counts, pairs=tuple(state.pairs), stopped=stopped
    )


@dataclass(slots=True, kw_only=True)
class _State:
    """What has been bought so far."""

    bench: Bench
    design: Design
    base: Counts
    weights: Mapping[str, float]
    say: Callable[[str], None]
    counts: Counts = field(default_factory=lambda: pooled(()))
    pairs: list[tuple[Block, Block]] = field(default_factory=list)
    looks: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    readings: dict[str, list[Reading | Missing]] = field(default_factory=dict)

    def is_open(self, source: Source, verdict: Verdict) -> bool:
        names = [m.name for m in self.design.metrics if m.source is source]
        return any(verdict.findings[name].answer is Answer.INCONCLUSIVE for name in names)

    def units(self, source: Source) -> int:
        """How many attempts per task, or cycles, the next look costs; 0 when there is none."""
        looks = self.design.attempts if source is Source.ROLLOUTS else self.design.cycles
        taken = self.looks[source]
        if taken == len(looks):
            return 0
        return looks[taken] - (looks[taken - 1] if taken else 0)

    def buy(self, source: Source) -> None:
        """Take the next look at ``source`` and read all of its metrics."""
        units = self.units(source)
        try:
            if source is Source.ROLLOUTS:
                self.say(f"pass@1, look {self.looks[source] + 1}: {units} more attempts at each task")
                self.counts = pooled([self.counts, self.bench.rollouts(units, self.looks[source])])
            else:
                self.say(f"durations, look {self.looks[source] + 1}: {units} more cycles of A B B A")
                for _ in range(units):
                    self._cycle()
        except BenchError as error:
            self._read(source, Missing(reason=str(error)))
        else:
            self._read(source, None)
        self.looks[source] += 1

    def _cycle(self) -> None:
        first = 2 * len(self.pairs)
        a, b, c, d = (
            self._block(side, first + place)
            for place, side in enumerate((Side.BASE, Side.CANDIDATE, Side.CANDIDATE, Side.BASE))
        )
        self.pairs += [(a, b), (d, c)]

    def _block(self, side: Side, number: int) -> Block:
        """Measured anew once: a hiccup of the machine in one of forty blocks is no regression."""
        try:
            return self.bench.block(side, number)
        except BenchError as error:
            self.say(f"  {error}; once more")
        try:
            return self.bench.block(side, number)
        except BenchError as error:
            if side is Side.BASE:
                raise BaseError(str(error)) from error
            raise

    def _read(self, source: Source, missing: Missing | None) -> None:
        for metric in self.design.metrics:
            if metric.source is not source:
                continue
            reading: Reading | Missing
            if missing is not None:
                reading = missing
            elif source is Source.ROLLOUTS:
                reading = pass_reading(self.base, self.counts, self.weights, max_failures=self.design.max_failures)
            else:
                reading = ratio_reading(metric, self.pairs)
            self.readings.setdefault(metric.name, []).append(reading)
