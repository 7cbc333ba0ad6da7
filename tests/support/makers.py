"""The records that many tests need, made with the few values that matter to them. On pytest's path (pyproject.toml)."""

from __future__ import annotations

from farm.types import (
    Boundary,
    EndReason,
    Evidence,
    FailedAttempt,
    Graded,
    InlineFiles,
    Outcome,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)


def make_task(name: str) -> Task:
    return Task(
        instance_id=name,
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


def failure(attempt: int, boundary: Boundary = Boundary.ENGINE, *, kind: str = "x", at_s: float = 0.0) -> FailedAttempt:
    return FailedAttempt(
        attempt=attempt, boundary=boundary, kind=kind, message="", worker="w", started_at_s=at_s, ended_at_s=at_s
    )


def graded(reward: float) -> Graded:
    evidence = Evidence(statuses={}, resolved=reward >= 1, patch_applied=True, exit_code=0, log_tail="")
    return Graded(reward=reward, evidence=evidence)


def row(
    group: str, index: int, outcome: Outcome | float, *, size: int = 4, step: int = 0, purpose: str = "rl"
) -> Trajectory:
    """A landed episode of one sampled token; a number as ``outcome`` is its reward."""
    turn = Turn(
        segment=0, context_ids=(1,), output_ids=(2,), output_logprobs=(-1.0,),
        spans=(VersionSpan(step=step, start=0, end=1),), finish_reason="stop", action="", observation="", exit_code=0,
        cached_tokens=0, retractions=0,
    )  # fmt: skip
    return Trajectory(
        episode_id=f"{group}-{index}", group_id=group, group_size=size, index=index, instance_id="i", task_digest="",
        dataset="", repo="", strata={}, weight=1.0, seed=0, purpose=purpose, sampling=SamplingParams(), attempt=1,
        worker="", engine_url="", outcome=graded(outcome) if isinstance(outcome, float) else outcome,
        end_reason=EndReason.SUBMITTED, turns=(turn,), patch="", timeline=(), usage=Usage(),
    )  # fmt: skip
