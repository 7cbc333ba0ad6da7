"""The gate's decisions: published boundaries, three answers, settled metrics, and everything missing fails closed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from scipy.special import ndtri

from harness.gate.boundaries import levels, spent
from harness.gate.decide import EXIT_CODE, Answer, Criterion, judge
from harness.gate.evidence import Missing, Reading

FRACTIONS = (0.25, 0.5, 1.0)
ALPHA = 0.05


def reading(harm: float, error: float = 0.01, df: int = 99) -> Reading:
    return Reading(harm=harm, error=error, df=df, base=0.3, new=0.3 - harm)


def one(*readings: Reading | Missing, margin: float = 0.05) -> Answer:
    return judge({"m": Criterion(margin=margin, fractions=FRACTIONS)}, {"m": readings}, alpha=ALPHA).answer


def test_boundaries_match_the_published_ones() -> None:
    """Lan-DeMets, Pocock-like, five equal looks, two-sided 5 % (one-sided 2.5 %): the standard tables."""
    found = [-float(ndtri(p)) for p in levels(0.025, (0.2, 0.4, 0.6, 0.8, 1.0))]
    assert found == pytest.approx([2.4380, 2.4268, 2.4101, 2.3966, 2.3859], abs=1e-4)


def test_one_look_spends_everything() -> None:
    assert levels(0.05, (1.0,)) == pytest.approx((0.05,))
    assert (spent(0.05, 0.0), spent(0.05, 1.0)) == pytest.approx((0.0, 0.05))


def test_less_alpha_asks_for_more_evidence_at_every_look() -> None:
    for strict, loose in pairwise([levels(alpha, FRACTIONS) for alpha in (0.005, 0.01, 0.02, 0.05)]):
        assert all(a < b for a, b in zip(strict, loose, strict=True))


@pytest.mark.parametrize("fractions", [(), (0.0, 1.0), (0.5, 0.5), (0.5, 1.5), (1.0, 0.5)])
def test_fractions_that_are_none(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        levels(0.05, fractions)


def test_three_answers_and_their_exit_codes() -> None:
    assert one(reading(0.0)) is Answer.PASS
    assert one(reading(0.10)) is Answer.REGRESSION
    assert one(reading(0.05)) is Answer.INCONCLUSIVE
    assert {a.value: code for a, code in EXIT_CODE.items()} == {"pass": 0, "regression": 1, "inconclusive": 3}


def test_an_improvement_passes() -> None:
    assert one(reading(-0.2)) is Answer.PASS


def test_more_looks_decide_what_one_could_not() -> None:
    unsure = reading(0.02, error=0.03)
    assert one(unsure) is Answer.INCONCLUSIVE
    assert one(unsure, unsure, reading(0.0, error=0.01)) is Answer.PASS
    assert one(unsure, unsure, reading(0.11, error=0.01)) is Answer.REGRESSION


def test_few_degrees_of_freedom_ask_for_more() -> None:
    assert one(reading(0.02, error=0.01, df=99)) is Answer.PASS
    assert one(reading(0.02, error=0.01, df=2)) is Answer.INCONCLUSIVE


def test_no_noise_is_decided_by_the_side_of_the_margin() -> None:
    assert one(reading(0.0, error=0.0)) is Answer.PASS
    assert one(reading(0.06, error=0.0)) is Answer.REGRESSION
    assert one(reading(0.05, error=0.0)) is Answer.INCONCLUSIVE


@pytest.mark.parametrize(
    "bad",
    [
        Missing(reason="gone"),
        reading(math.nan),
        reading(math.inf),
        reading(0.0, error=math.nan),
        reading(0.0, error=math.inf),
        reading(0.0, error=-1.0),
        reading(0.0, df=0),
    ],
)
def test_what_is_missing_or_not_finite_fails_closed(bad: Reading | Missing) -> None:
    assert one(bad) is Answer.REGRESSION
    assert one(reading(0.05), bad) is Answer.REGRESSION  # also at a later look
    assert one(reading(0.0), bad) is Answer.PASS  # what has passed is settled


def test_what_was_never_read_does_not_pass() -> None:
    tests = {"a": Criterion(margin=0.05, fractions=FRACTIONS), "b": Criterion(margin=0.05, fractions=FRACTIONS)}
    verdict = judge(tests, {"a": [reading(0.0)]}, alpha=ALPHA)
    assert verdict.answer is Answer.INCONCLUSIVE
    assert verdict.findings["b"].reason == "not measured yet"


def test_a_metric_that_passed_is_settled() -> None:
    """Later readings come because others are open; looking at them again would be another chance to be wrong."""
    tests = {name: Criterion(margin=0.05, fractions=FRACTIONS) for name in "ab"}
    verdict = judge(tests, {"a": [reading(0.0), reading(0.2)], "b": [reading(0.05), reading(0.05)]}, alpha=ALPHA)
    assert verdict.findings["a"].answer is Answer.PASS
    assert verdict.findings["a"].look == 1


def test_holm_asks_more_of_many_metrics_and_less_after_a_rejection() -> None:
    """0.0733 is beyond 5 % over ten, not beyond 5 %: alone it is a regression, among ten it is not."""
    slight = reading(0.05 + 0.01 * 2.33)
    assert one(slight) is Answer.REGRESSION
    tests = {str(n): Criterion(margin=0.05, fractions=FRACTIONS) for n in range(10)}
    fine = {str(n): [reading(0.05)] for n in range(2, 10)}
    assert judge(tests, {**fine, "0": [slight], "1": [reading(0.05)]}, alpha=ALPHA).answer is Answer.INCONCLUSIVE
    # With the other nine rejected, all of alpha is left for it.
    bad = {str(n): [reading(0.5)] for n in range(1, 10)}
    findings = judge(tests, {**bad, "0": [slight]}, alpha=ALPHA).findings
    assert {finding.answer for finding in findings.values()} == {Answer.REGRESSION}


def test_weights_share_out_alpha() -> None:
    slight = reading(0.05 + 0.01 * 2.45)
    for weight, answer in ((1.0, Answer.INCONCLUSIVE), (40.0, Answer.REGRESSION)):
        tests = {str(n): Criterion(margin=0.05, fractions=FRACTIONS) for n in range(10)}
        tests["0"] = Criterion(margin=0.05, fractions=FRACTIONS, weight=weight)
        rest = {str(n): [reading(0.05)] for n in range(1, 10)}
        assert judge(tests, {**rest, "0": [slight]}, alpha=ALPHA).answer is answer


def test_the_bounds_shown_are_the_ones_decided_by() -> None:
    test = {"m": Criterion(margin=0.05, fractions=FRACTIONS)}
    for harm in (0.0, 0.02, 0.03, 0.05, 0.07, 0.08, 0.2):
        finding = judge(test, {"m": [reading(harm)]}, alpha=ALPHA).findings["m"]
        assert (finding.high <= 0.05) == (finding.answer is Answer.PASS)
        assert (finding.low >= 0.05) == (finding.answer is Answer.REGRESSION)
