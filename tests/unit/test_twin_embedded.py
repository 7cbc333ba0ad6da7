"""The embedded run as a check of the twin: what is read off measurements and records."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.engine.bench import BenchShape
from farm.errors import UsageError
from farm.types import EndReason, Event, Evidence, Graded, Limits, SamplingParams, Trajectory, Turn, Usage
from harness.twin.embedded import Check, Validation, engine_speed, validate, wait_share
from harness.twin.recorded import Recorded, RecordedPlan, command_cost

LIMITS = Limits()


def _turn(context: int, output: int, *, command: bool = True) -> Turn:
    return Turn(
        segment=0, context_ids=(1,) * context, output_ids=(2,) * output, output_logprobs=(0.0,) * output, spans=(),
        finish_reason="stop", action="", observation="", exit_code=0 if command else None, cached_tokens=0,
        retractions=0,
    )  # fmt: skip


def _trajectory(group: str, index: int, *, turns: int, graded: bool, started_at_s: float = 0.0) -> Trajectory:
    evidence = Evidence(statuses={}, resolved=True, patch_applied=True, exit_code=0, log_tail="")
    timeline = (Event(name="grade", start_at_s=0.0, end_at_s=1.0),) if graded else ()
    return Trajectory(
        episode_id="", group_id=group, group_size=3, index=index, instance_id=f"task of {group}", task_digest="",
        dataset="", repo="", strata={}, weight=1.0, seed=index, purpose="rl", sampling=SamplingParams(), attempt=1,
        worker="", engine_url="", outcome=Graded(reward=1.0, evidence=evidence), end_reason=EndReason.MAX_TURNS,
        turns=tuple(_turn(30 if n == 0 else 7, 10) for n in range(turns)), patch="", timeline=timeline,
        usage=Usage(sandbox_cpu_s=0.01 * (turns + 1) + (0.05 if graded else 0.0)), started_at_s=started_at_s,
    )  # fmt: skip


def test_the_engine_is_fitted_on_its_throughput() -> None:
    shape = BenchShape()
    step_s, token_s = 0.002, 0.0001
    new = (shape.prompt_tokens + (shape.turns - 1) * (shape.observation_tokens + 1)) / shape.turns

    def rate(concurrency: int) -> float:
        taken_s = shape.turn_tokens * step_s + concurrency * (shape.turn_tokens + new) * token_s
        return concurrency * shape.turn_tokens / taken_s

    speed = engine_speed({f"engine.output_tokens_per_s.c{n}": {"median": rate(n)} for n in (1, 8, 32)}, shape)
    assert speed.step_s[1] == pytest.approx(step_s + token_s)
    assert speed.step_s[32] == pytest.approx(step_s + 32 * token_s)
    assert speed.prefill_s(50, 100) == pytest.approx(50 * token_s)


def test_the_cost_of_commands_is_read_off_the_record() -> None:
    record = [_trajectory("a", n, turns=n + 1, graded=bool(n % 2)) for n in range(6)]
    cost = command_cost(record)
    assert cost.command_s == pytest.approx(0.01)
    assert cost.grade_s == pytest.approx(0.05)


def test_a_record_is_a_plan_without_an_end() -> None:
    record = [_trajectory("late", 0, turns=2, graded=True, started_at_s=5.0)]
    record += [_trajectory("early", index, turns=1, graded=False) for index in (0, 2)]
    plan = RecordedPlan(record, LIMITS)
    assert plan.length is None
    first, again = plan.group(0), plan.group(2)
    assert [episode.group_id for episode in (*first, *plan.group(1))] == ["early"] * 3 + ["late"] * 3
    assert [episode.index for episode in first] == [0, 1, 2]  # the one that never landed is made up
    ids = {episode.id for position in range(4) for episode in plan.group(position)}
    assert len(ids) == 12
    assert again[0].group_id != first[0].group_id
    assert RecordedPlan(record, LIMITS, repeat=False).length == 2


def test_a_recorded_episode_does_what_it_did() -> None:
    record = [_trajectory("a", index, turns=2, graded=True) for index in range(3)]
    plan = RecordedPlan(record, LIMITS)
    script = Recorded(plan.recorded, command_cost(record), 0.002).script(plan.group(0)[1], 1)
    assert (script.prompt, script.outputs, script.observations) == (30, [10, 10], [7, 0])
    assert script.end_reason is EndReason.MAX_TURNS
    assert script.grade_s is not None
    assert script.reward == 1.0


def test_a_check_holds_within_15_percent() -> None:
    good = Check(name="throughput", unit="1/s", predicted=11.0, measured=10.0)
    bad = Check(name="step time", unit="s", predicted=8.0, measured=10.0)
    assert good.error == pytest.approx(0.1)
    assert Validation(checks=(good,), overhead_cpu_s=0.0, fitted_on="x").holds
    assert not Validation(checks=(good, bad), overhead_cpu_s=0.0, fitted_on="x").holds


def test_the_trainer_s_wait_is_a_share_of_all_steps_but_the_first() -> None:
    assert wait_share([(99.0, 1.0), (3.0, 1.0), (1.0, 3.0), (2.0, 0.0)]) == pytest.approx(0.6)


def test_missing_figures_are_named() -> None:
    with pytest.raises(UsageError, match=r"no engine.output_tokens_per_s.c1; run `make bench`"):
        validate(Path("nowhere"), {}, fit_on=Path("nowhere"), cores=2.0)
