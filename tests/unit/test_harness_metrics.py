"""Measures over trajectories: a failure is never a reward, and both denominators come out."""

from __future__ import annotations

import numpy as np

from farm.types import (
    Boundary,
    EndReason,
    Evidence,
    Failed,
    FailedAttempt,
    Graded,
    Outcome,
    SamplingParams,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)
from harness import metrics

LOST = Failed(boundary=Boundary.SANDBOX_LOST, kind="lost", message="gone")


def graded(passed: bool) -> Graded:
    evidence = Evidence(statuses={"t": "PASSED"}, resolved=passed, patch_applied=True, exit_code=0, log_tail="")
    return Graded(reward=float(passed), evidence=evidence)


def trajectory(task: str, outcome: Outcome, *, index: int = 0, tokens: int = 4, weight: float = 1.0) -> Trajectory:
    turn = Turn(
        segment=0,
        context_ids=(1,),
        output_ids=(2,) * tokens,
        output_logprobs=(-1.0,) * tokens,
        spans=(VersionSpan(step=0, start=0, end=tokens),),
        finish_reason="stop",
        action="submit",
        observation="",
        exit_code=None,
        cached_tokens=0,
        retractions=0,
    )
    failed = FailedAttempt(
        attempt=1, boundary=Boundary.ENGINE, kind="timeout", message="", worker="w", started_at_s=0.0, ended_at_s=1.0
    )
    return Trajectory(
        episode_id=f"{task}-{index}",
        group_id=task,
        group_size=4,
        index=index,
        instance_id=task,
        task_digest="d",
        dataset="micro/benchmark",
        repo="r",
        strata={},
        weight=weight,
        seed=0,
        purpose="eval",
        sampling=SamplingParams(),
        attempt=1,
        worker="w",
        engine_url="u",
        outcome=outcome,
        end_reason=EndReason.SUBMITTED if isinstance(outcome, Graded) else EndReason.FAILED,
        turns=(turn,),
        patch="",
        timeline=(),
        usage=Usage(),
        prior=(failed,) if index == 1 else (),
        started_at_s=0.0,
        ended_at_s=float(tokens),
    )


def test_both_denominators() -> None:
    rates = metrics.task_rates(
        [
            trajectory("a", graded(True)),
            trajectory("a", graded(False), index=1),
            trajectory("a", LOST, index=2),
            trajectory("b", LOST, weight=3.0),
        ]
    )
    assert rates.ids == ("a",)
    assert rates.excluded.tolist() == [0.5]
    assert (rates.all_ids, rates.all_weights.tolist()) == (("a", "b"), [1.0, 3.0])
    assert rates.as_zero.tolist() == [1 / 3, 0.0]
    assert (rates.graded, rates.passed, rates.failures, rates.ungraded) == (2, 1, 2, ("b",))


def test_with_one_attempt_each_a_failure_is_a_zero_and_not_left_out() -> None:
    rates = metrics.task_rates([trajectory("a", graded(True)), trajectory("b", LOST)])
    assert (rates.excluded.mean(), rates.as_zero.mean()) == (1.0, 0.5)


def test_pairing_is_by_task_and_only_over_common_tasks() -> None:
    new = metrics.task_rates([trajectory("a", graded(True)), trajectory("b", graded(True))])
    old = metrics.task_rates([trajectory("b", graded(False)), trajectory("c", graded(True))])
    first, second, weights = metrics.paired(new, old)
    assert (first.tolist(), second.tolist(), weights.tolist()) == ([1.0], [0.0], [1.0])


def test_spread_leaves_failures_and_single_attempts_out() -> None:
    spread = metrics.group_spread(
        [
            trajectory("a", graded(True), tokens=4),
            trajectory("a", graded(False), index=1, tokens=9),
            trajectory("a", LOST, index=2, tokens=99),
            trajectory("b", graded(True)),
        ]
    )
    np.testing.assert_allclose(spread["tokens"], [2.0])
    np.testing.assert_allclose(spread["seconds"], [9 / 4])


def test_end_reasons_are_counted() -> None:
    assert metrics.end_reasons([trajectory("a", graded(True)), trajectory("a", LOST)]) == {"failed": 1, "submitted": 1}
