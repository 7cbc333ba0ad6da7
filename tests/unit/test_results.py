"""Pass rates of a rollout in both denominators."""

from __future__ import annotations

from dataclasses import replace

from farm.dispatch import FinitePlan, PlanSpec
from farm.results import summarize
from farm.types import (
    Attempt,
    Boundary,
    Dropped,
    Evidence,
    Failed,
    Graded,
    InlineFiles,
    Limits,
    SamplingParams,
    Task,
    Trajectory,
)
from farm.worker import bare_trajectory


def rows() -> list[Trajectory]:
    task = Task(
        instance_id="t",
        dataset="d",
        repo="r",
        base_commit="c",
        problem_statement="p",
        patch="",
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        eval_script="",
        log_parser="x",
        workspace=InlineFiles(files={}),
    )
    spec = PlanSpec(group_size=4, seed=0, purpose="eval", sampling=SamplingParams(), limits=Limits())
    evidence = Evidence(statuses={}, resolved=True, patch_applied=True, exit_code=0, log_tail="")
    outcomes = [
        Graded(reward=1.0, evidence=evidence),
        Graded(reward=0.0, evidence=replace(evidence, resolved=False)),
        Failed(boundary=Boundary.ENGINE, kind="timeout", message=""),
        Dropped(reason="stale"),
    ]
    found = []
    for episode, outcome in zip(FinitePlan([task], spec).group(0), outcomes, strict=True):
        attempt = Attempt(episode=episode, number=1, engine_url="", min_version=0, queued_at_s=0.0)
        ended = Failed(boundary=Boundary.FARM, kind="x", message="")
        row = bare_trajectory(attempt, ended, worker="w", started_at_s=10.0, ended_at_s=46.0)
        found.append(replace(row, outcome=outcome))
    return found


def test_both_denominators() -> None:
    results = summarize(rows())
    assert (results.attempts, results.graded, results.resolved, results.failed, results.dropped) == (4, 2, 1, 1, 1)
    assert results.pass_all == 0.25
    assert results.pass_graded == 0.5
    assert results.failures == {"engine/timeout": 1}
    assert results.episodes_per_hour == 400.0


def test_nothing_at_all() -> None:
    results = summarize([])
    assert (results.pass_all, results.pass_graded, results.episodes_per_hour, results.seconds) == (None, None, None, 0)
