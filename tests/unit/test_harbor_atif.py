"""Landed episodes as ATIF: exact tokens, one entry per turn, and a failure stays a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import failure, graded, row
from pydantic import ValidationError

from farm.config import FarmConfig, to_json
from farm.errors import UsageError
from farm.harbor.atif import (
    AtifTrajectory,
    Decode,
    Observation,
    ObservationResult,
    Step,
    Who,
    export_run,
    prompts,
    rollout_details,
    to_atif,
)
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import Boundary, Dropped, EndReason, Event, Failed, Trajectory, Turn, VersionSpan

WHO = Who(agent="bash", model="shipped")


def turn(
    segment: int, context: tuple[int, ...], output: tuple[int, ...], *, action: str = "ls", exit_code: int | None = 0
) -> Turn:
    return Turn(
        segment=segment, context_ids=context, output_ids=output, output_logprobs=tuple(-0.5 for _ in output),
        spans=(VersionSpan(step=3, start=0, end=len(output)),), finish_reason="stop", action=action,
        observation="out\n", exit_code=exit_code, cached_tokens=1, retractions=0,
    )  # fmt: skip


TURNS = (
    turn(0, (1, 2), (3, 4)),
    turn(0, (5,), (6,), exit_code=2),
    turn(1, (7, 8), (9,)),
    turn(1, (), (10, 11), action="submit", exit_code=None),
)
TIMELINE = tuple(Event(name="generate", start_at_s=float(n), end_at_s=n + 0.5) for n in range(4))
LANDED = replace(row("g", 0, 0.5), turns=TURNS, timeline=TIMELINE, prior=(failure(1),), patch="diff", started_at_s=1.0)


def words(ids: Any) -> str:
    return " ".join(f"t{number}" for number in ids)


def test_every_turn_has_the_tokens_that_the_engine_saw_and_gave() -> None:
    steps = to_atif(LANDED, WHO, words).steps
    assert [step.source for step in steps] == ["user", "agent", "agent", "agent", "agent"]
    metrics = [step.metrics for step in steps[1:]]
    assert all(one is not None for one in metrics)
    seen = [(one.prompt_token_ids, one.completion_token_ids) for one in metrics if one is not None]
    assert seen == [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([7, 8], [9]), ([7, 8, 9], [10, 11])]
    assert [one.logprobs for one in metrics if one is not None] == [[-0.5, -0.5], [-0.5], [-0.5], [-0.5, -0.5]]
    assert metrics[0] is not None
    assert metrics[0].extra == {"policy_spans": [{"step": 3, "start": 0, "end": 2}], "retractions": 0}
    assert (steps[0].message, steps[1].message, steps[1].model_name) == ("t1 t2", "t3 t4", "step-000003")
    assert steps[2].timestamp == "1970-01-01T00:00:01+00:00"


def test_commands_are_tool_calls_with_their_observations() -> None:
    steps = to_atif(LANDED, WHO, None).steps
    call, observed = steps[2].tool_calls, steps[2].observation
    assert call is not None
    assert observed is not None
    assert (call[0].function_name, call[0].arguments) == ("bash", {"command": "ls"})
    assert observed.results[0].source_call_id == call[0].tool_call_id
    assert (observed.results[0].content, observed.results[0].extra) == ("out\n", {"exit_code": 2})
    last = steps[-1]
    assert last.tool_calls is not None
    assert (last.tool_calls[0].function_name, last.observation) == ("submit", None)
    unsubmitted = to_atif(replace(LANDED, end_reason=EndReason.MALFORMED), WHO, None)
    assert unsubmitted.steps[-1].tool_calls is None
    assert unsubmitted.steps[-1].message == "submit"  # what the log has as text
    assert "tokenizer was not at hand" in (unsubmitted.notes or "")


def test_details_are_of_one_length_and_one_per_segment() -> None:
    details = rollout_details(LANDED)
    assert [detail.prompt_token_ids for detail in details] == [[[1, 2], [1, 2, 3, 4, 5]], [[7, 8], [7, 8, 9]]]
    assert [detail.completion_token_ids for detail in details] == [[[3, 4], [6]], [[9], [10, 11]]]
    assert [len(detail.logprobs) for detail in details] == [2, 2]


TURN = st.builds(
    turn,
    st.integers(0, 1),
    st.lists(st.integers(0, 99), max_size=4).map(tuple),
    st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple),
)


@given(st.lists(TURN, max_size=6).map(lambda turns: sorted(turns, key=lambda turn: turn.segment)))
def test_each_prompt_goes_on_where_its_segment_stands(turns: list[Turn]) -> None:
    before: dict[int, list[int]] = {}
    for prompt, one in prompts(turns):
        stood = before.get(one.segment, [])
        assert prompt == [*stood, *one.context_ids]
        before[one.segment] = [*prompt, *one.output_ids]
    details = rollout_details(replace(LANDED, turns=tuple(turns)))
    assert sum(len(ids) for d in details for ids in d.completion_token_ids) == sum(len(t.output_ids) for t in turns)


@pytest.mark.parametrize(
    ("outcome", "facts"),
    [
        (graded(0.5), {"kind": "graded", "reward": 0.5, "resolved": False, "patch_applied": True, "tests": {}}),
        (
            Failed(boundary=Boundary.ENGINE, kind="gone", message="it went"),
            {"kind": "failed", "boundary": "engine", "failure": "gone", "message": "it went", "retryable": True},
        ),
        (Dropped(reason="stale"), {"kind": "dropped", "reason": "stale"}),
    ],
)
@pytest.mark.parametrize("turns", [TURNS, ()])
def test_only_a_grade_has_a_reward(outcome: Any, facts: dict[str, Any], turns: tuple[Turn, ...]) -> None:
    made = to_atif(replace(LANDED, outcome=outcome, turns=turns), WHO, words)
    assert made.extra["rollout_farm"]["outcome"] == facts
    text = made.model_dump_json(exclude_none=True)
    assert AtifTrajectory.model_validate_json(text).model_dump_json(exclude_none=True) == text
    if not turns:
        assert made.steps[0].source == "system"
        assert made.steps[0].message.startswith("Nothing was sampled")
        assert isinstance(outcome, Failed) == ("engine/gone: it went" in made.steps[0].message)


def test_what_the_format_forbids_is_not_made() -> None:
    with pytest.raises(ValidationError, match="only steps of the agent"):
        Step(step_id=1, source="user", message="", model_name="m")
    results = [ObservationResult(source_call_id="x", content="")]
    with pytest.raises(ValidationError, match="'x' is no tool call"):
        Step(step_id=1, source="agent", message="", observation=Observation(results=results))
    made = to_atif(LANDED, WHO, words)
    with pytest.raises(ValidationError, match="without gaps"):
        AtifTrajectory.model_validate({**made.model_dump(), "steps": made.model_dump()["steps"][1:]})


def landed(run: RunFolder, *rows: Trajectory) -> None:
    log = DirectoryLog(run.trajectories)
    for one in rows:
        log.append(one)
    log.seal()


def test_a_run_is_exported_and_nothing_is_written_over(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", to_json(FarmConfig()))
    DirectoryLog(run.trajectories)
    with pytest.raises(UsageError, match="no episode is sealed yet"):
        export_run(run.path, tmp_path / "none")
    lost = Failed(boundary=Boundary.SANDBOX_LOST, kind="lost", message="m")
    landed(run, LANDED, replace(row("g", 1, lost), instance_id="o/r", end_reason=EndReason.FAILED))
    done = export_run(run.path, tmp_path / "out")
    assert (done.written, done.graded, done.failed, done.dropped) == (2, 1, 1, 0)
    lines = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    assert [(line["outcome"], line["reward"]) for line in lines] == [("graded", 0.5), ("failed", None)]
    for line in lines:
        folder = tmp_path / "out" / line["folder"]
        made = AtifTrajectory.model_validate_json((folder / "trajectory.json").read_text())
        assert made.session_id == line["episode_id"]
        details = json.loads((folder / "rollout_details.json").read_text())["rollout_details"]
        assert len(details) == (2 if line["outcome"] == "graded" else 1)
    with pytest.raises(UsageError, match="exists already"):
        export_run(run.path, tmp_path / "out")
    assert export_run(run.path, tmp_path / "one", limit=1).written == 1


def test_decoding_is_only_for_people() -> None:
    shout: Decode = lambda ids: words(ids).upper()  # noqa: E731
    quiet, loud = to_atif(LANDED, WHO, words), to_atif(LANDED, WHO, shout)
    assert [step.metrics for step in quiet.steps] == [step.metrics for step in loud.steps]
    assert loud.steps[1].message == "T3 T4"
