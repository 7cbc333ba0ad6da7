"""From counts and blocks to readings, and the loop that buys them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.gate import figures
from harness.gate.decide import Answer
from harness.gate.design import DESIGN, PASS_AT_1, STEP_MEDIAN, THROUGHPUT, Source
from harness.gate.evidence import (
    Block,
    Counts,
    Missing,
    Reading,
    attempt_fractions,
    pass_reading,
    pooled,
    ratio_reading,
)
from harness.gate.looks import BaseError, BenchError, Side, look_until_decided
from harness.gate.simulate import AT_MARGIN_RATE, AT_MARGIN_TIME, BAD_RATE, BAD_TIME, UNCHANGED, simulate

TASKS = [f"t{n}" for n in range(20)]
WEIGHTS = dict.fromkeys(TASKS, 1.0)


def counts(passed: int, graded: int = 4, failures: int = 0) -> Counts:
    return Counts(graded=dict.fromkeys(TASKS, graded), passed=dict.fromkeys(TASKS, passed), failures=failures)


def read(base: Counts, new: Counts, limit: float = 0.05) -> Reading | Missing:
    return pass_reading(base, new, WEIGHTS, max_failures=limit)


def test_loss_of_pass_rate_and_its_error_for_these_tasks() -> None:
    found = read(counts(2), counts(1))
    assert isinstance(found, Reading)
    assert (found.base, found.new, found.harm) == pytest.approx((0.5, 0.25, 0.25))
    assert found.error == pytest.approx(math.sqrt((0.25 / 3 + 0.1875 / 3) / 20))


def test_weights_count() -> None:
    half = Counts(graded=dict.fromkeys(TASKS, 4), passed={t: 4 * (t == "t0") for t in TASKS}, failures=0)
    heavy = {t: 19.0 if t == "t0" else 1.0 for t in TASKS}
    found = pass_reading(half, half, heavy, max_failures=0.05)
    assert isinstance(found, Reading)
    assert found.base == pytest.approx(0.5)


def test_failures_are_no_wrong_answers_but_too_many_are_no_measurement() -> None:
    assert isinstance(read(counts(2), counts(2, failures=4)), Reading)  # 4 of 84
    found = read(counts(2), counts(2, failures=5))  # 5 of 85
    assert isinstance(found, Missing)
    assert "5 of 85" in found.reason


def test_a_task_without_a_grade_is_missing() -> None:
    new = counts(2)
    new = replace(new, graded={**new.graded, "t3": 0})
    found = read(counts(2), new)
    assert isinstance(found, Missing)
    assert "t3" in found.reason
    assert isinstance(read(counts(2), Counts(graded={}, passed={}, failures=0)), Missing)


def test_single_attempts_have_no_error_of_their_own() -> None:
    found = read(counts(2), counts(1, graded=1))
    assert isinstance(found, Reading)
    assert math.isnan(found.error)  # which fails closed
    mixed = replace(counts(2), graded={**counts(2).graded, "t0": 1}, passed={**counts(2).passed, "t0": 1})
    found = read(counts(2), mixed)
    assert isinstance(found, Reading)
    assert found.error == pytest.approx(math.sqrt((19 * 0.25 / 3 + 1 / 3 + 20 * 0.25 / 3) / 400))


def test_runs_pool() -> None:
    both = pooled([counts(1), counts(3, failures=2)])
    assert (both.passed["t0"], both.graded["t0"], both.failures) == (4, 8, 2)


def test_information_grows_less_than_attempts_do() -> None:
    assert attempt_fractions((4, 8, 16), 16) == pytest.approx((0.4, 2 / 3, 1.0))


def pairs(*values: tuple[float, float], name: str = STEP_MEDIAN.name) -> list[tuple[Block, Block]]:
    return [({name: base}, {name: new}) for base, new in values]


def test_ratios_are_harm_in_the_right_direction() -> None:
    slower = ratio_reading(STEP_MEDIAN, pairs((10, 12), (10, 12.1)))
    assert isinstance(slower, Reading)
    assert math.exp(slower.harm) == pytest.approx(1.205, abs=0.001)
    less = ratio_reading(THROUGHPUT, pairs((1000, 800), (1000, 820), name=THROUGHPUT.name))
    assert isinstance(less, Reading)
    assert less.harm > 0


def test_a_machine_that_drifts_costs_both_sides_the_same() -> None:
    """A B B A with 5 % more at each block: the pairs cancel."""
    at = [1.05**n for n in range(4)]
    found = ratio_reading(STEP_MEDIAN, pairs((at[0], at[1]), (at[3], at[2])))
    assert isinstance(found, Reading)
    assert found.harm == pytest.approx(0.0)


@pytest.mark.parametrize("values", [[(10.0, 12.0)], [(10.0, math.nan), (1.0, 1.0)], [(0.0, 1.0), (1.0, 1.0)]])
def test_blocks_that_say_nothing(values: list[tuple[float, float]]) -> None:
    assert isinstance(ratio_reading(STEP_MEDIAN, pairs(*values)), Missing)
    assert isinstance(ratio_reading(STEP_MEDIAN, [({}, {}), ({}, {})]), Missing)


def test_a_training_without_steps_has_no_figures() -> None:
    assert figures.block([], []) == {}
    found = figures.block([{"ended_at_s": t} for t in (10.0, 13.0, 18.0, 20.0)], [])
    assert found[STEP_MEDIAN.name] == 3.0
    assert THROUGHPUT.name not in found  # nothing landed, so it is missing, and not zero


class FakeBench:
    """Every measurement is the same; time passes by one second for each unit."""

    def __init__(
        self,
        *,
        passed: int = 2,
        ratio: float = 1.0,
        broken: Source | None = None,
        broken_side: Side = Side.CANDIDATE,
        broken_times: float = math.inf,
    ) -> None:
        self.passed, self.ratio, self.broken = passed, ratio, broken
        self.broken_side, self.broken_times = broken_side, broken_times
        self.sides: list[Side] = []
        self.seconds = 0.0

    def rollouts(self, attempts: int, look: int) -> Counts:
        self.seconds += attempts
        if self.broken is Source.ROLLOUTS:
            raise BenchError("farm ended with 1")
        return counts(self.passed * attempts // 4, attempts)

    def block(self, side: Side, number: int) -> Block:
        self.seconds += 1
        if self.broken is Source.BLOCKS and side is self.broken_side and self.broken_times > 0:
            self.broken_times -= 1
            raise BenchError("trainer ended with 1")
        assert number == len(self.sides)
        self.sides.append(side)
        slow = self.ratio if side is Side.CANDIDATE else 1.0
        slow *= 1 + 0.001 * (number % 3)
        return {m.name: 1 / slow if m.higher_is_better else slow for m in DESIGN.metrics}


def outcome(bench: FakeBench, budget_s: float = math.inf) -> tuple[Answer, dict[Source, int], str]:
    found = look_until_decided(
        bench, design=DESIGN, base=counts(8, 16), weights=WEIGHTS, budget_s=budget_s, clock=lambda: bench.seconds
    )
    return found.verdict.answer, dict(found.looks), found.stopped


def test_blocks_are_interleaved() -> None:
    bench = FakeBench()
    outcome(bench)
    a, b = Side.BASE, Side.CANDIDATE
    assert bench.sides[:8] == [a, b, b, a, a, b, b, a]


def test_what_is_decided_is_not_bought_again() -> None:
    answer, looks, stopped = outcome(FakeBench(passed=4))  # better than the base
    assert (answer, looks, stopped) == (Answer.PASS, {Source.ROLLOUTS: 1, Source.BLOCKS: 1}, "decided")
    answer, looks, _ = outcome(FakeBench(passed=2))  # 20 tasks at 50 %: too noisy for a margin of five points
    assert (answer, looks) == (Answer.INCONCLUSIVE, {Source.ROLLOUTS: 3, Source.BLOCKS: 1})


def test_a_bad_policy_is_found_before_any_time_is_taken() -> None:
    bench = FakeBench(passed=0)
    answer, looks, _ = outcome(bench)
    assert (answer, looks[Source.BLOCKS], bench.sides) == (Answer.REGRESSION, 0, [])


def test_at_the_margin_it_buys_to_the_end_and_stays_inconclusive() -> None:
    answer, looks, stopped = outcome(FakeBench(ratio=1.10))
    assert (answer, looks[Source.BLOCKS], stopped) == (Answer.INCONCLUSIVE, 3, "every look has been taken")


def test_the_budget_ends_it_before_a_look_that_would_not_fit() -> None:
    bench = FakeBench(ratio=1.10)
    answer, looks, stopped = outcome(bench, budget_s=25.0)
    assert (answer, looks[Source.BLOCKS], stopped) == (Answer.INCONCLUSIVE, 1, "the budget is used up")
    assert bench.seconds <= 25.0


def test_no_budget_still_takes_the_first_looks() -> None:
    _, looks, _ = outcome(FakeBench(ratio=1.10), budget_s=0.0)
    assert looks == {Source.ROLLOUTS: 1, Source.BLOCKS: 1}


@pytest.mark.parametrize("source", list(Source))
def test_a_broken_bench_fails_closed(source: Source) -> None:
    found = look_until_decided(FakeBench(broken=source), design=DESIGN, base=counts(8, 16), weights=WEIGHTS)
    assert found.verdict.answer is Answer.REGRESSION
    name = PASS_AT_1.name if source is Source.ROLLOUTS else STEP_MEDIAN.name
    assert "ended with 1" in found.verdict.findings[name].reason


def test_a_block_that_fails_once_is_measured_again() -> None:
    found = look_until_decided(
        FakeBench(passed=4, broken=Source.BLOCKS, broken_times=1), design=DESIGN, base=counts(8, 16), weights=WEIGHTS
    )
    assert found.verdict.answer is Answer.PASS


def test_a_base_that_fails_says_nothing_of_the_candidate() -> None:
    bench = FakeBench(passed=4, broken=Source.BLOCKS, broken_side=Side.BASE)
    with pytest.raises(BaseError, match="ended with 1"):
        look_until_decided(bench, design=DESIGN, base=counts(8, 16), weights=WEIGHTS)


@pytest.fixture(scope="module")
def simulated() -> dict[str, float]:
    """Share of regressions in each scenario. 100 repeats: at 5 % the standard error is 2.2 points, at 90 % 3."""
    scenarios = (UNCHANGED, AT_MARGIN_RATE, AT_MARGIN_TIME, BAD_RATE, BAD_TIME)
    return {s.name: simulate(s, repeats=100).regression for s in scenarios}


def test_false_alarms_are_at_most_five_percent(simulated: dict[str, float]) -> None:
    assert simulated[UNCHANGED.name] <= 0.05
    # Even with all that the margin allows, where a false alarm is likeliest; three standard errors on top.
    assert simulated[AT_MARGIN_RATE.name] <= 0.05 + 0.066
    assert simulated[AT_MARGIN_TIME.name] <= 0.05 + 0.066


def test_planted_regressions_are_found(simulated: dict[str, float]) -> None:
    assert simulated[BAD_RATE.name] >= 0.80
    assert simulated[BAD_TIME.name] >= 0.80
