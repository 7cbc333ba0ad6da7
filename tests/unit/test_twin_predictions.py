"""Calibration, predictions in small, sensitivity and `farm plan`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from farm.cli import main as farm
from farm.errors import UsageError
from harness import bench
from harness.twin import calibration, plan, scenarios, sensitivity
from harness.twin.predictions import (
    FIGURES,
    NO_RANGE,
    REPORTED,
    Horizons,
    Runs,
    TwinCell,
    _Maker,
    predictions,
)
from harness.twin.sensitivity import Job, Ranges
from harness.twin.thrash import thrash

# The reference's shape at a twentieth of its size, so that a test can afford it.
SMALL = calibration.load().given(
    engines=1, concurrent=16, group_size=4, groups_per_step=2, turns_median=10, host_cores=4
)
BRIEF = Horizons(
    cloud_s=2_400.0, cloud_warm_s=600.0, slow_s=6_000.0, slow_warm_s=600.0, long_s=6_000.0, long_warm_s=600.0,
    start_s=1_200.0,
)  # fmt: skip


# --------------------------------------------------------------------------------------- calibration


def test_every_input_says_what_it_is_and_where_it_comes_from() -> None:
    for entry in calibration.load().entries.values():
        assert entry.kind in calibration.KINDS
        assert entry.unit
        assert len(entry.source) > 5
        assert math.isfinite(entry.value)


def test_no_predicted_figure_goes_in() -> None:
    values = {entry.value for entry in calibration.load().entries.values()}
    assert not values & set(REPORTED.values())


def test_the_profile_inputs_are_the_farms_own() -> None:
    inputs = calibration.load()
    limits = scenarios.parse_config({"rollout": {"tasks": "swebench:x"}}, where="test").limits
    assert inputs["cap_tokens"] == limits.max_context_tokens
    assert inputs["turn_tokens"] == limits.max_tokens_per_turn
    assert (inputs["max_turns"], inputs["tool_s"], inputs["agent_s"]) == (
        limits.max_turns,
        limits.tool_s,
        limits.agent_s,
    )


def test_the_reference_capacity_is_derived_within_a_tenth() -> None:
    inputs = calibration.load()
    assert scenarios.kv_tokens(inputs) == 1_558_049  # (288 GiB - 3.2 GB) x 0.7 - 61.06 GB, over 98,304 B
    assert scenarios.kv_tokens(inputs) == pytest.approx(1.5e6, rel=0.1)


def test_inputs_can_be_changed_and_moved_to_another_gpu() -> None:
    inputs = calibration.load()
    assert inputs.scaled("gpu.hbm_bytes", 0.5).gpu.hbm_bytes == inputs.gpu.hbm_bytes / 2
    assert inputs.on(gpu="h100").gpu.name == "h100"
    assert inputs.on(gpu="h100")["command_s"] == inputs["command_s"]


# --------------------------------------------------------------------------------------- predictions


def test_ten_generations_block_the_other_99() -> None:
    found = thrash(calibration.load())
    assert (found.filled, found.others, found.blocked) == (10, 99, 99)
    assert found.guarded_timeouts == 0
    assert found.guarded_longest_s < found.timeout_s / 10


def test_predictions_in_small_are_whole_and_repeatable() -> None:
    small = SMALL.given(outstanding=14)
    ranges = Ranges({name: {"command_s": (0.9, 1.2)} for name in FIGURES})
    cells = predictions(small, ranges=ranges, horizons=BRIEF)
    assert set(cells) == {
        "steptime-cap", "cap-harmless", "async-step", "throughput", "sandbox-start", "kv-headroom", "kv-thrash",
        "separation",
    }  # fmt: skip
    text = json.dumps({claim: cell.to_json() for claim, cell in cells.items()}, sort_keys=True, allow_nan=False)
    again = predictions(small, ranges=ranges, horizons=BRIEF)
    assert text == json.dumps({c: cell.to_json() for c, cell in again.items()}, sort_keys=True)
    assert cells["throughput"].low == pytest.approx(0.9 * cells["throughput"].value)
    assert cells["throughput"].detail["moves_it_most"] == ["command_s"]


def test_a_figure_without_its_range_says_so() -> None:
    bare = _Maker(Runs(SMALL, BRIEF), None).separation()
    assert (bare.low, bare.detail["range"]) == (None, NO_RANGE)
    ranged = _Maker(Runs(SMALL, BRIEF), Ranges({"push_s": {"push_bytes_per_s": (0.8, 1.25)}})).separation()
    assert ranged.low == pytest.approx(0.8 * ranged.value)
    assert "range" not in ranged.detail


def test_the_inputs_that_no_report_has_are_not_called_reported() -> None:
    inputs = calibration.load().entries
    assert inputs["runaway"].kind == inputs["turns_median"].kind == "assumed"


def test_a_simulated_day_is_part_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.DAY_S == 24 * 3600
    monkeypatch.setattr(bench, "DAY_S", 300.0)
    (figure,) = bench.PARTS["twin"]().values()
    assert figure["n"] == 1
    assert figure["unit"] == "CPU s"


def test_what_went_in_is_never_said_to_agree() -> None:
    cell = TwinCell(value=1.9, unit="s", text="went in", kind="calibration")
    assert cell.to_json()["agrees"] is None


# --------------------------------------------------------------------------------------- sensitivity


def test_each_input_is_moved_alone_and_the_range_covers_all() -> None:
    inputs = calibration.load()

    def find(job: Job) -> dict[str, float]:
        value = job.inputs["engines"] * 1000 / job.inputs["command_s"]
        return dict.fromkeys(job.figures, value)

    ranges = sensitivity.compute(["cloud_per_hour", "capacity_tokens"], find, inputs)
    assert ranges.spans["cloud_per_hour"]["engines"] == (0.8, 1.2)
    assert ranges.spans["cloud_per_hour"]["command_s"] == (1.25, pytest.approx(1 / 1.2, abs=1e-4))
    assert ranges.around("cloud_per_hour", 100.0) == (pytest.approx(80.0), pytest.approx(125.0))
    assert ranges.strongest("cloud_per_hour") == ["command_s", "engines"]
    assert "engines" not in ranges.spans["capacity_tokens"]
    assert "outstanding" not in ranges.spans["cloud_per_hour"]


def test_only_what_a_figure_hangs_on_is_in_the_digest() -> None:
    inputs = calibration.load()
    assert sensitivity.digest() == sensitivity.digest(inputs)
    assert sensitivity.digest(inputs.scaled("command_s", 1.01)) != sensitivity.digest()
    assert sensitivity.digest(inputs.on(gpu="h100")) != sensitivity.digest()
    told = replace(inputs.entries["command_s"], source="somebody said so", kind="practice")
    assert sensitivity.digest(replace(inputs, entries={**inputs.entries, "command_s": told})) == sensitivity.digest()


def test_ranges_of_another_twin_are_not_used(tmp_path: Path) -> None:
    place = tmp_path / "sensitivity.json"
    assert sensitivity.stored(place) is None
    sensitivity.save(Ranges({"push_s": {"engines": (0.9, 1.1)}}), place)
    assert sensitivity.stored(place) == Ranges({"push_s": {"engines": (0.9, 1.1)}})
    place.write_text(place.read_text().replace(sensitivity.digest(), "0" * 32))
    assert sensitivity.stored(place) is None
    place.write_text("{")
    with pytest.raises(UsageError, match=r"harness\.twin sensitivity"):
        sensitivity.stored(place)


def test_the_ranges_in_the_repository_are_those_of_the_twin_in_it() -> None:
    kept = sensitivity.stored()
    assert kept is not None, "the twin has changed: make its ranges anew with `python -m harness.twin sensitivity`"
    low, high = kept.around("cloud_per_hour", 1.0)
    assert low < 1.0 < high


# ---------------------------------------------------------------------------------------------- plan


def _question(**changes: object) -> plan.Question:
    usual: dict[str, object] = {
        "model": "qwen3-30b-a3b", "gpu": "h200", "engines": 1, "sandbox": "e2b", "concurrency": 8,
        "values": {"group_size": 2, "groups_per_step": 2, "turns_median": 8},
    }  # fmt: skip
    return plan.Question(**(usual | changes))  # type: ignore[arg-type]


def test_a_plan_answers_what_was_asked() -> None:
    found = plan.answer(_question(gpu_hour=2.0, sandbox_hour=0.1))
    assert found.admitted >= 8
    assert found.per_hour > 0
    hourly = (1 + 8) * 2.0 + 8 * 0.1  # one engine, eight training GPUs, eight sandboxes
    assert found.cost_thousand == pytest.approx(1000 * hourly / found.per_hour)
    assert found.cost_step == pytest.approx(hourly * found.step_s / 3600)
    assert 0 < found.engine_busy < 1


def test_steps_that_take_long_are_waited_for_and_their_cap_is_one_that_is_accepted() -> None:
    # 40 trajectories a step, two at once: no two steps in two hours.
    slow = {"group_size": 4, "groups_per_step": 10, "turns_median": 8}
    found = plan.answer(_question(concurrency=2, values=slow))
    assert found.simulated_s > plan.HORIZONS_S[0] * 0.99
    assert found.step_s is not None
    assert found.step_s > 1000
    assert found.cap_for_all == calibration.load().shape.context_length
    assert plan.answer(_question(cap_tokens=found.cap_for_all)).cap_tokens == found.cap_for_all


def test_what_does_not_happen_in_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "HORIZONS_S", (1_900.0, 2_000.0))
    never = ["--concurrency", "2", "--engines", "1", "--gpu-hour", "2", "--set", "groups_per_step=100"]
    ran = CliRunner().invoke(farm, ["plan", *never])
    assert ran.exit_code == 0
    assert re.search(r"training step, median +none within 0\.6 hours", ran.stdout)
    assert "nan" not in ran.stdout
    assert "cost of a step" not in ran.stdout


def test_every_input_may_be_a_fifth_higher_or_lower() -> None:
    for entry in calibration.load().entries.values():
        low, high = entry.allowed
        assert low <= 0.8 * entry.value
        assert 1.2 * entry.value <= high


def test_too_small_a_cache_is_the_bottleneck() -> None:
    found = plan.answer(_question(gpu="h100", concurrency=64, values={"memory_fraction": 0.85, "groups_per_step": 4}))
    assert found.bottleneck.startswith("KV cache")
    assert found.engines_needed > 1
    assert found.cap_for_all < found.cap_tokens


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "abacus"], "model 'abacus' has no data sheet; known: qwen3-30b-a3b"),
        (["--gpu", "abacus"], "GPU 'abacus' has no data sheet"),
        (["--sandbox", "cellar"], "--sandbox 'cellar' is unknown; known: e2b, docker, local"),
        (["--set", "speed=3"], "input 'speed' is unknown; known: agent_s"),
        (["--set", "command_s"], "must be INPUT=NUMBER"),
        (["--set", "command_s=-1"], "command_s is -1; allowed: 0.001 to 86400 s per turn"),
        (["--set", "command_s=nan"], "command_s is nan; allowed"),
        (["--set", "bandwidth_share=0"], "bandwidth_share is 0; allowed: 0.01 to 1 share"),
        (["--set", "memory_fraction=5"], "memory_fraction is 5; allowed: 0.05 to 0.95"),
        (["--set", "group_size=0"], "group_size is 0; allowed: 1 to 1024 attempts"),
        (["--set", "turns_median=0"], "turns_median is 0; allowed: 1 to 1000 turns"),
        (["--set", "train_gpus=0"], "train_gpus is 0; allowed: 1 to 100000 GPUs"),
        (["--cores", "nan"], "host_cores is nan; allowed"),
        (["--gpu-hour", "nan"], "--gpu-hour is nan; must be a finite price"),
        (["--sandbox-hour", "inf"], "--sandbox-hour is inf; must be a finite price"),
        (["--cap", "900000"], "the model's context is 262144"),
        (["--gpu", "h100", "--model", "qwen3-32b"], "needs 66 GB for its weights"),
    ],
)
def test_bad_questions_get_one_line(arguments: list[str], told: str) -> None:
    ran = CliRunner().invoke(farm, ["plan", *arguments])
    assert ran.exit_code == 2
    assert told in ran.stderr
    assert len([line for line in ran.stderr.splitlines() if line.startswith("farm: ")]) == 1


def test_the_inputs_can_be_listed() -> None:
    ran = CliRunner().invoke(farm, ["plan", "--inputs"])
    assert ran.exit_code == 0
    assert "cloud_start_s" in ran.stdout
