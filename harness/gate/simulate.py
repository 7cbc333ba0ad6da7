"""How often the gate is wrong, by simulation of its own decision code: ``python -m harness.gate.simulate``.

The world that is simulated: 100 tasks whose pass rates follow a beta distribution (mean 27.5 %, within-task correlation
0.5), a baseline of 16 attempts each; synchronous steps whose times scatter by 10 % (docs/gate.md: what was measured),
blocks that differ by another 3 %, one block in fifty that a neighbour on the machine makes 30 % slower, and a machine
that slows down by 10 % over the whole run. Time passes as it does in the full reproduction, so that the budget ends
what it would end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.gate.decide import Answer
from harness.gate.design import (
    BUDGET_MINUTES,
    DESIGN,
    SANDBOX,
    STEP_MEDIAN,
    STEP_P95,
    THROUGHPUT,
    TOKENS,
    Design,
    Source,
)
from harness.gate.evidence import Block, Counts
from harness.gate.looks import Outcome, Side, look_until_decided
from harness.stats import Floats

TASKS, RATE, CORRELATION, BASE_ATTEMPTS = 100, 0.275, 0.5, 16
STEP_S, STEP_SPREAD, EPISODES = 10.6, 0.10, 128
BLOCK_START_S, ATTEMPT_S = 20.0, 0.1  # what a block takes beside its steps; one attempt at one task
BLOCK_SPREAD, NEIGHBOUR, NEIGHBOUR_SHARE, DRIFT = 0.03, 1.3, 0.02, 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is planted: ``drop`` of pass@1 (as a share), ``slow``: factor on every step's time."""

    name: str
    drop: float = 0.0
    slow: float = 1.0


UNCHANGED = Scenario(name="nothing changed")
AT_MARGIN_RATE = Scenario(name="at the margin: 5 points lost", drop=0.05)
AT_MARGIN_TIME = Scenario(name="at the margin: steps 10 % slower", slow=1.10)
BAD_RATE = Scenario(name="10 points of pass@1 lost", drop=0.10)
BAD_TIME = Scenario(name="steps 20 % slower", slow=1.20)
SCENARIOS = (UNCHANGED, AT_MARGIN_RATE, AT_MARGIN_TIME, BAD_RATE, BAD_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """Shares of the repeats that ended so, and the mean number of attempts per task and of cycles that were bought."""

    repeats: int
    passed: float
    regression: float
    inconclusive: float
    attempts: float
    cycles: float


def simulate(
    scenario: Scenario, *, repeats: int, seed: int = 0, design: Design = DESIGN, budget_s: float = 60 * BUDGET_MINUTES
) -> Frequencies:
    """Run the gate ``repeats`` times on made-up measurements."""
    ends = [_once(scenario, np.random.default_rng([seed, number]), design, budget_s) for number in range(repeats)]

    def share(answer: Answer) -> float:
        return sum(end.verdict.answer is answer for end in ends) / repeats

    def mean(source: Source, looks: tuple[int, ...]) -> float:
        return float(np.mean([(0, *looks)[end.looks[source]] for end in ends]))

    return Frequencies(
        repeats=repeats,
        passed=share(Answer.PASS),
        regression=share(Answer.REGRESSION),
        inconclusive=share(Answer.INCONCLUSIVE),
        attempts=mean(Source.ROLLOUTS, design.attempts),
        cycles=mean(Source.BLOCKS, design.cycles),
    )


def _once(scenario: Scenario, rng: np.random.Generator, design: Design, budget_s: float) -> Outcome:
    scale = 1 / CORRELATION - 1
    rates = rng.beta(RATE * scale, (1 - RATE) * scale, size=TASKS)
    base = _attempts(rates, BASE_ATTEMPTS, rng)
    bench = SimulatedBench(scenario, rates, design, rng)
    return look_until_decided(
        bench,
        design=design,
        base=base,
        weights=dict.fromkeys(base.graded, 1.0),
        budget_s=budget_s,
        clock=lambda: bench.now_s,
    )


class SimulatedBench:
    """Makes the measurements up."""

    def __init__(self, scenario: Scenario, rates: Floats, design: Design, rng: np.random.Generator) -> None:
        # Every task loses the same share of its rate, and the score of these tasks exactly ``drop``.
        self._rates = rates * (1 - scenario.drop / rates.mean())
        self._slow = scenario.slow
        self._steps = design.steps - 1
        self._blocks = 4 * design.cycles[-1]
        self._rng = rng
        self.now_s = 0.0

    def rollouts(self, attempts: int, look: int) -> Counts:
        self.now_s += attempts * len(self._rates) * ATTEMPT_S
        return _attempts(self._rates, attempts, self._rng)

    def block(self, side: Side, number: int) -> Block:
        rng = self._rng
        machine = np.exp(rng.normal(0, BLOCK_SPREAD)) * (1 + DRIFT * number / self._blocks)
        machine *= NEIGHBOUR if rng.random() < NEIGHBOUR_SHARE else 1.0
        noise = rng.normal(0, STEP_SPREAD, size=self._steps)
        steps = STEP_S * machine * (self._slow if side is Side.CANDIDATE else 1.0) * np.exp(noise)
        per_s = EPISODES * len(steps) / steps.sum()
        self.now_s += BLOCK_START_S + float(steps.sum()) * (1 + 1 / len(steps))  # the first step is left out
        return {
            STEP_MEDIAN.name: float(np.median(steps)),
            STEP_P95.name: float(np.quantile(steps, 0.95)),
            THROUGHPUT.name: 3600 * per_s,
            TOKENS.name: 80 * per_s * float(np.exp(rng.normal(0, 0.02))),
            SANDBOX.name: 0.05 * machine * float(np.exp(rng.normal(0, 0.05))),
        }


def _attempts(rates: Floats, attempts: int, rng: np.random.Generator) -> Counts:
    passed = {f"task-{number}": int(n) for number, n in enumerate(rng.binomial(attempts, rates))}
    return Counts(graded=dict.fromkeys(passed, attempts), passed=passed, failures=0)


def main() -> None:
    """Print the table."""
    import argparse

    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description="How often the gate is wrong, by simulation.")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = Table("planted", "pass", "regression", "inconclusive", "attempts", "cycles", box=None)
    for scenario in SCENARIOS:
        found = simulate(scenario, repeats=options.repeats, seed=options.seed)
        shares = (f"{100 * share:.1f} %" for share in (found.passed, found.regression, found.inconclusive))
        table.add_row(scenario.name, *shares, f"{found.attempts:.1f}", f"{found.cycles:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
