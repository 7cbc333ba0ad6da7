"""The experiments on made-up logs: what they read, how they judge."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from farm.config import load_config, to_json
from farm.errors import FarmError
from farm.inject import FaultPlan
from farm.policy_log import PolicyLog
from farm.protocols import EngineLoad
from farm.run_folder import RunFolder
from farm.suites import made
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Boundary,
    Cursor,
    EndReason,
    Event,
    Evidence,
    Failed,
    Graded,
    SamplingParams,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
    content_digest,
)
from harness import derived
from harness.claims import Measurement
from harness.crowd import Client, CrowdPlan, Played
from harness.experiments import (
    async_step,
    cap,
    disjoint,
    infra_errors,
    kv,
    pass_rates,
    real_packages,
    restart,
    sandbox_start,
    separation,
    throughput,
    twin_check,
)
from harness.lab import Lab
from harness.profiles import FULL, QUICK, cluster
from trainer.config import batch_rules
from trainer.group import Batcher, batch_digest

IDLE = EngineLoad(running=0, queued=0, used_tokens=0, max_total_tokens=100, retracted_total=0, generated_tokens_total=0)


TIMES = {
    "ended_at_s": 100.0, "wait_s": 0.0, "train_s": 1.0, "checkpoint_s": 0.0, "publish_s": 0.0,
    "episodes": 2, "trained_episodes": 1, "dropped": [],
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(folder=tmp_path / "stages", profile=QUICK, console=Console(file=io.StringIO()), archive=True)


def trajectory(
    task: int,
    *,
    index: int = 0,
    passed: bool = False,
    turns: int = 4,
    seconds: float = 1.0,
    start_s: float = 100.0,
    step: int = 0,
) -> Trajectory:
    one = Turn(
        segment=0, context_ids=(1,), output_ids=(2, 3), output_logprobs=(-1.0, -1.0),
        spans=(VersionSpan(step=step, start=0, end=2),), finish_reason="stop", action="", observation="", exit_code=0,
        cached_tokens=0, retractions=0,
    )  # fmt: skip
    evidence = Evidence(statuses={}, resolved=passed, patch_applied=True, exit_code=0, log_tail="")
    name, group = f"task-{task:03d}", f"group-{task}"
    return Trajectory(
        episode_id=content_digest([name, group, index, 7]), group_id=group, group_size=4, index=index,
        instance_id=name, task_digest="", dataset="", repo="", strata={}, weight=1.0, seed=7, purpose="rl",
        sampling=SamplingParams(), attempt=1, worker="", engine_url="",
        outcome=Graded(reward=float(passed), evidence=evidence),
        end_reason=EndReason.MAX_TURNS if turns == 8 else EndReason.SUBMITTED, turns=(one,) * turns, patch="diff",
        timeline=(Event(name="sandbox_start", start_at_s=start_s, end_at_s=start_s + seconds / 2),), usage=Usage(),
        started_at_s=start_s, ended_at_s=start_s + seconds,
    )  # fmt: skip


def made_run(path: Path, rows: Sequence[Trajectory], *sets: str, lines: Sequence[dict[str, Any]] = ()) -> RunFolder:
    run = RunFolder.create(path, to_json(load_config(sets=sets)))
    with DirectoryLog(run.trajectories) as log:
        log.append_many(rows)
        log.seal()
    if lines:
        run.metrics.write_text("".join(json.dumps(TIMES | line) + "\n" for line in lines))
    (path / "farm.json").write_text(json.dumps({"cluster": {"in_flight_limit": 12}}))
    return run


def made_stage(lab: Lab, name: str, rows: Sequence[Trajectory], *sets: str, **how: Any) -> RunFolder:
    run = made_run(lab.folder / name / "run", rows, *sets, **how)
    (lab.folder / name / "done.json").write_text('{"wall_s": 1.0, "commit": null}')
    return run


def trained_policy(lab: Lab) -> None:
    (lab.folder / "sft" / "policy").mkdir(parents=True)
    (lab.folder / "sft" / "done.json").write_text('{"wall_s": 1.0, "commit": null}')
    run = made_stage(lab, "rl", [trajectory(0)])
    PolicyLog(run.policies).publish(0, lambda folder: (folder / "w.safetensors").write_text("w"), consumed_groups=0)


def took(*seconds: float) -> list[dict[str, Any]]:
    return [{"step": n, "wait_s": s - 1.0, "train_s": 1.0} for n, s in enumerate(seconds, start=1)]


def holds(measurement: Measurement) -> bool:
    assert measurement.holds is not None
    json.dumps(dict(measurement.detail))
    for figure in measurement.figures.values():
        json.dumps(figure)
        assert {"kind", "title", "series"} <= figure.keys()
    return measurement.holds


def test_step_time_without_the_cap_over_step_time_with_it(lab: Lab) -> None:
    rows = [trajectory(n, turns=n) for n in (2, 4)]
    made_stage(lab, "cap-without", rows, "limits.max_turns=64", lines=took(99.0, *[6.0, 8.0] * 5))
    made_stage(lab, "cap-with", rows, lines=took(1.0, *[2.0] * 10))
    found = cap.step_time(lab)
    assert found.estimate is not None
    assert (found.estimate.value, found.estimate.n) == (3.5, 10)
    assert found.detail["interval"].startswith("means of 4 steps in a row")
    assert holds(found)
    assert (
        found.detail["without_cap"] | {"cap_turns": 64, "turns_mean": 3.0, "median_step_s": 7.0}
        == found.detail["without_cap"]
    )
    made_stage(replace(lab, folder=lab.folder / "2"), "cap-without", rows, lines=took(9.0, *[1.0, 3.0] * 5))
    made_stage(replace(lab, folder=lab.folder / "2"), "cap-with", rows, lines=took(9.0, *[1.0, 3.0] * 5))
    assert not holds(cap.step_time(replace(lab, folder=lab.folder / "2")))
    made_stage(replace(lab, folder=lab.folder / "3"), "cap-without", rows, lines=took(9.0, 6.0, 8.0))
    made_stage(replace(lab, folder=lab.folder / "3"), "cap-with", rows, lines=took(9.0, 1.0, 2.0))
    few = cap.step_time(replace(lab, folder=lab.folder / "3"))
    assert (few.estimate, few.holds) == (None, None)
    assert few.detail["not_compared"] == "too few steps to tell how they vary"


def test_asynchronous_steps_against_synchronous_ones_on_the_same_work(lab: Lab) -> None:
    rows = [trajectory(n, turns=n) for n in (2, 4)]
    made_stage(lab, "step-sync", rows, "sandbox.start_delay_s=1.5", lines=took(99.0, *[6.0, 8.0] * 5))
    made_stage(lab, "step-async", rows, lines=took(99.0, *[1.1, 2.9] * 5))
    found = async_step.ratio(lab)
    assert found.estimate is not None
    assert (found.estimate.value, found.estimate.n) == (3.5, 10)
    assert found.estimate.low > 1.0
    assert found.holds
    assert found.detail["sync"]["wait_share"] > found.detail["async"]["wait_share"]
    assert found.detail["async"]["lag_1_correlation_of_steps"] < -0.8
    assert found.detail["sync"]["sandbox"] == "bubblewrap, 1.5 s of start latency added"


def test_what_asynchronous_steps_drop_stands_beside_the_ratio(lab: Lab) -> None:
    rows = [trajectory(n, turns=n, start_s=100.0 + n / 4) for n in (2, 4, 30)]
    lines = took(99.0, *[1.0, 2.0] * 5)
    lines[3] |= {"dropped": [{"episode": rows[2].episode_id, "reason": "stale"}]}
    made_stage(lab, "step-sync", rows[:2], lines=took(99.0, *[6.0, 8.0] * 5))
    made_stage(lab, "step-async", rows, lines=lines)
    told = async_step.ratio(lab).detail["async"]
    assert (told["consumed_episodes"], told["dropped_episodes"], told["trained_episodes"]) == (22, 1, 11)
    assert told["turns_mean"] == {"dropped": 30.0, "others": 3.0}
    assert told["in_flight_max"] == 2
    assert told["s_per_consumed_episode_not_dropped"] == pytest.approx(15.0 / 19, abs=1e-3)


def test_two_steps_are_too_few_to_compare(lab: Lab) -> None:
    for name in ("step-sync", "step-async"):
        made_stage(lab, name, [trajectory(0)], lines=took(9.0, 1.0))
    assert async_step.ratio(lab).estimate is None


@pytest.mark.parametrize(("lost", "harmless"), [(0, True), (10, False)])
def test_a_cap_that_costs_successes_is_not_harmless(lab: Lab, lost: int, harmless: bool) -> None:
    trained_policy(lab)
    free = [trajectory(n, passed=n < 40, turns=30 if n < lost else 4) for n in range(100)]
    made_stage(lab, "eval-rl-uncapped", free, "limits.max_turns=64")
    cut = [trajectory(n, passed=lost <= n < 40, turns=24 if n < lost else 4) for n in range(100)]
    made_stage(lab, "eval-rl-capped", cut, "limits.max_turns=24")
    made_stage(lab, "eval-rl", [trajectory(n, passed=10 <= n < 40, turns=8) for n in range(100)])
    found = cap.harmless(lab)
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(-lost)
    assert (found.detail["cap_turns"], found.detail["successes_beyond_the_cap"]) == (24, lost)
    assert found.detail["pass_at_1_without_cap"] == 40.0
    assert found.detail["the_cap_in_training"]["cap_turns"] == 8
    assert found.detail["the_cap_in_training"]["points"] == -10.0
    assert found.detail["the_cap_in_training"]["successes_that_the_cap_ended"] == 30
    assert holds(found) is harmless


def test_throughput_is_counted_and_its_interval_comes_from_the_durations(lab: Lab) -> None:
    for name, seconds in (("slow", 20.0), ("fast", 5.0)):
        rows = [trajectory(n, seconds=seconds + n / 100, start_s=100.0 + seconds * (n // 8)) for n in range(16)]
        made_stage(lab, f"throughput-{name}", rows, f"sandbox.start_delay_s={seconds / 2}")
    found = throughput.ratio(lab)
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(
        found.detail["fast"]["per_hour"] / found.detail["slow"]["per_hour"], rel=1e-3
    )
    assert found.estimate.low <= found.estimate.value <= found.estimate.high
    assert 3.5 < found.estimate.value < 4.5
    assert found.detail["slow"]["share_of_time_in_starts"] == 0.5
    # What the runs say of themselves, not what this code would do today.
    assert found.detail["slow"]["back_end"] == "bubblewrap, 10 s of start latency added"
    assert found.detail["fast"]["back_end"] == "bubblewrap, 2.5 s of start latency added"
    assert found.detail["fast"]["in_flight_at_most"] == 12
    assert found.detail["slow"]["in_flight_mean"] == pytest.approx(8.0, rel=0.02)
    assert holds(found)


def test_throughput_with_docker_as_the_slow_back_end_is_labelled_so(lab: Lab) -> None:
    for name, seconds, provider in (("slow", 20.0, "docker"), ("fast", 5.0, "bubblewrap")):
        rows = [trajectory(n, seconds=seconds, start_s=100.0 + seconds * (n // 8)) for n in range(16)]
        made_stage(lab, f"throughput-{name}", rows, f"sandbox.provider={provider}")
    found = throughput.ratio(lab)
    assert (found.detail["slow"]["back_end"], found.detail["fast"]["back_end"]) == ("docker", "bubblewrap")
    assert found.detail["reading"].startswith("two real back ends: a Docker daemon")
    assert holds(found)


@pytest.mark.parametrize(
    ("busy", "answer"), [([(20, 0), (10, 0)], True), ([(24, 0), (10, 0)], False), ([(20, 0), (10, 1)], False)]
)
def test_headroom_is_the_peak_of_the_looks(lab: Lab, busy: list[tuple[int, int]], answer: bool) -> None:
    trained_policy(lab)
    run = made_stage(lab, "eval-rl", [trajectory(n, start_s=100.0 + n / 2) for n in range(4)])
    loads = [IDLE, *(replace(IDLE, running=3, used_tokens=used, queued=queued) for used, queued in busy), IDLE]
    lines = [{"at_s": float(n), "url": "u", **asdict(load)} for n, load in enumerate(loads)]
    (run.logs / "engine_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = kv.headroom(lab)
    assert found.estimate is not None
    assert (found.estimate.value, found.estimate.n) == (max(used for used, _ in busy), 2)
    assert found.detail["trajectories_in_flight_max"] == 2
    assert holds(found) is answer


def test_headroom_of_a_run_that_was_over_before_a_look_is_not_measured(lab: Lab) -> None:
    trained_policy(lab)
    run = made_stage(lab, "eval-rl", [trajectory(0)])
    (run.logs / "engine_metrics.jsonl").write_text(json.dumps({"at_s": 0.0, "url": "u", **asdict(IDLE)}) + "\n")
    found = kv.headroom(lab)
    assert found.estimate is None
    assert "not measured" in found.detail["not_compared"]


@pytest.mark.parametrize(("blocked", "guarded_timeouts", "answer"), [(10, 0, True), (5, 0, False), (10, 1, False)])
def test_thrash_needs_the_block_without_and_none_with(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, blocked: int, guarded_timeouts: int, answer: bool
) -> None:
    def played(count: int, timeouts: int) -> Played:
        others = [
            Client(name=f"o{n}", kind="other", longest_gap_s=9.0 if n < count else 0.1, timeouts=timeouts if n else 0)
            for n in range(10)
        ]
        return Played(clients=[*others, Client(name="e", kind="endless")], seconds=9.0, loads=[(0.0, IDLE)])

    folder = lab.folder / "kv-thrash"
    folder.mkdir(parents=True)
    (folder / "done.json").write_text("{}")
    crowds = {"alone": played(blocked, 1), "guarded": played(0, guarded_timeouts)}
    plan = CrowdPlan(
        endless=1, others=10, budget_tokens=100, longest_tokens=50, cap_tokens=20, timeout_s=8.0, fill_s=9.0
    )
    written = {"plan": asdict(plan), "played": {name: asdict(one) for name, one in crowds.items()}}
    (folder / "crowds.json").write_text(json.dumps(written))
    # It was played by its own plan, whatever today's is.
    monkeypatch.setattr(kv, "ENDLESS", 99)
    monkeypatch.setattr(kv, "CAP_TOKENS", 99)
    found = kv.thrash(replace(lab, profile=replace(QUICK, thrash_timeout_s=60.0)))
    assert found.estimate is not None
    assert found.estimate.value == 10 * blocked
    assert (found.detail["endless"], found.detail["cap_tokens"], found.detail["timeout_s"]) == (1, 20, 8.0)
    assert holds(found) is answer


def test_starts_are_judged_by_batch_and_told_as_they_were_made(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lab.folder / "sandbox"
    folder.mkdir(parents=True)
    (folder / "done.json").write_text("{}")
    loaded = [at + n for at in (50.0, 60.0, 70.0) for n in (-1.0, 0.0, 0.0, 1.0)]
    starts = {"start_ms": [10.0], "start_cpu_ms": [8.0], "exec_ms": [1.0], "stop_ms": [1.0]}
    written = {"concurrent": 4, "back_end": "bubblewrap", "alone": starts}
    written["loaded"] = starts | {"start_ms": loaded, "start_cpu_ms": [9.0] * 12}
    (folder / "starts.json").write_text(json.dumps(written))
    monkeypatch.setattr(sandbox_start, "CONCURRENT", 384)
    found = sandbox_start.median(lab)
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(0.06)
    assert found.estimate.n == 3
    assert found.estimate.high - found.estimate.low == pytest.approx(2 * 4.303 * 0.01 / 3**0.5, rel=1e-3)
    assert "4 starts at once" in found.unit
    assert set(found.figures["sandbox_start"]) == {"alone", "4 at once"}
    assert found.detail["cpu_per_start_ms"] == {"alone": 8.0, "loaded": 9.0}
    assert "docker_on_this_machine" not in found.detail
    docker = written | {"back_end": "docker", "loaded": {"start_ms": [10 * ms for ms in loaded], "exec_ms": [1.0]}}
    beside = lab.folder / "sandbox-docker"
    beside.mkdir()
    (beside / "starts.json").write_text(json.dumps(docker))
    (beside / "done.json").write_text('{"wall_s": 1.0, "commit": null}')
    both = sandbox_start.median(lab)
    assert both.estimate == found.estimate  # the row is the fast back end's
    assert (both.detail["docker_on_this_machine"]["loaded_median_s"], both.detail["back_end"]) == (
        0.6,
        found.detail["back_end"],
    )
    assert both.detail["docker_on_this_machine"]["times_slower"] == 10.0
    assert set(both.figures["sandbox_start"]) == {"alone", "4 at once", "Docker, 4 at once"}


def test_a_client_counts_the_time_between_tokens_also_over_a_request_given_up() -> None:
    client = Client(name="c", kind="other")
    client.asks(1.0)
    client.asks(4.0)  # the first was given up: it goes on waiting
    client.got(8, 6.0)
    assert (client.longest_gap_s, client.tokens, client.requests) == (5.0, 8, 2)
    client.asks(7.0)
    client.start_over(10.0)
    client.gap(12.0)
    assert (client.longest_gap_s, client.tokens) == (2.0, 0)


# ------------------------------------------------------------------------------------------ restart, failures


def test_a_jump_at_a_kill_is_told_from_noise() -> None:
    noise = np.random.default_rng(1).normal(size=145)
    calm = restart.jumps(list(noise), [36, 72, 109])
    assert calm["window"] == 5
    assert calm["steps"] == [36, 72, 109]
    assert min(calm["p"]) > 0.05 / 3
    broken = noise + np.where(np.arange(145) >= 72, 9.0, 0.0)
    found = restart.jumps(list(broken), [36, 72, 109])
    assert found["p"][1] < 1e-4 < min(found["p"][0], found["p"][2])


def test_a_kill_without_values_around_it_has_no_answer_and_one_with_them_has() -> None:
    assert restart.jumps([None] * 20, [5])["p"] == [None]
    assert restart.jumps([1.0], [1])["p"] == [None]
    assert restart.jumps([1.0] * 20, [5])["p"] == [1.0]
    some = restart.jumps([1.0, None, 2.0, 1.0, None, 2.0, 1.0, 2.0] * 3, [4, 12])
    assert len(some["p"]) == 2
    assert None not in some["p"]
    assert restart.levels([None] * 20, [5], rate=True)["p"] == [None]
    assert restart.levels([1.0] * 20, [2, 5], rate=False)["p"] == [None, 1.0]


KILLED, STEPS = [36, 72, 109], np.arange(145)
BAND = restart.ALPHA / 12


def worst(values: np.ndarray, *, rate: bool = False) -> float:
    return min(map(float, restart.levels(values.tolist(), KILLED, rate=rate)["p"]))


@pytest.mark.parametrize(
    "harm",
    [
        np.where(STEPS >= 90, 1000.0, 1.0),  # a blow-up that begins away from any kill
        np.where(STEPS >= 72, 1.0 + (STEPS - 72) / 36, 1.0),  # a drift that begins at one
        1.0 + STEPS / 10,  # a drift all along
        np.where(STEPS >= 72, 1.6, 1.0),  # a step to a higher level
    ],
)
def test_a_blow_up_or_a_drift_after_a_kill_leaves_the_band(harm: np.ndarray) -> None:
    noise = np.exp(np.random.default_rng(2).normal(0.0, 0.3, size=145))
    assert worst(noise) > BAND
    assert worst(noise * harm) < BAND


def test_a_pass_rate_that_falls_leaves_the_band_and_one_that_rises_does_not() -> None:
    noise = np.random.default_rng(3).normal(0.0, 0.15, size=145)
    assert worst(0.6 - 0.4 * STEPS / 145 + noise, rate=True) < BAND
    assert worst(0.2 + 0.4 * (1 - np.exp(-STEPS / 30)) + noise, rate=True) > BAND


def test_a_run_that_learns_raises_no_alarm() -> None:
    """Curves that learn fast at first: an entropy that falls and levels out, a gradient that grows by a half. At 5 %
    over twelve tests, 40 runs of two curves (six tests) give one alarm."""
    draw, alarms = np.random.default_rng(4), 0
    for _ in range(40):
        noise = np.exp(draw.normal(0.0, 0.3, size=(2, 145)))
        entropy = (0.25 + 0.2 * np.exp(-STEPS / 30)) * noise[0]
        gradient = (1.0 + 0.5 * STEPS / 145) * noise[1]
        alarms += min(worst(entropy), worst(gradient)) < BAND
    assert alarms <= 4


SETTINGS = ("rollout.groups_per_step=1", "rollout.group_size=4", "rollout.min_attempts=3")


def training(lab: Lab, steps: int = 12) -> list[dict[str, Any]]:
    """A stage in which every group has one failure; the metrics lines of its training."""
    failed = Failed(boundary=Boundary.ENGINE, kind="injected", message="")
    run = RunFolder.create(lab.folder / "restart" / "run", to_json(load_config(sets=SETTINGS)))
    with DirectoryLog(run.trajectories) as log:
        for task in range(steps):
            rows = [trajectory(task, index=i, passed=i == 1, step=task) for i in range(4)]
            log.append_many([*rows[:2], replace(rows[2], outcome=failed), rows[3]])
            log.seal()
        batcher = Batcher(batch_rules(run.config(), where=""))
        batches = [b for at, (_, row) in enumerate(log.read(Cursor())) if (b := batcher.push(Cursor(row=at), row))]
    lines = [
        {"step": n, "batch_digest": batch_digest(b.samples), "pass_rate": (n % 3) / 3, "entropy": 1.0 + n % 2,
         "approx_kl": 0.1 * (n % 2), "grad_norm": 1.0 + n % 3}
        for n, b in enumerate(batches, start=1)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(TIMES | line) + "\n" for line in lines))
    (lab.folder / "restart" / "done.json").write_text('{"wall_s": 1.0, "commit": null}')
    return lines


def replayed(lab: Lab, lines: list[dict[str, Any]], *, differing: int | None = None) -> None:
    steps = []
    for line in lines:
        step, batch = line["step"], line["batch_digest"]
        recorded = "other" if step == differing else f"w{step}"
        steps.append(
            {"step": step, "batch": batch, "recorded_batch": batch, "weights": f"w{step}", "recorded_weights": recorded}
        )
    (lab.folder / "restart" / "replay.json").write_text(json.dumps({"steps": steps}))
    kills = [{"after_step": step, "at_s": 0.0} for step in (3, 6, 9)]
    (lab.folder / "restart" / "kills.json").write_text(json.dumps({"kills": kills}))


def test_curves_with_a_value_that_is_not_finite_are_no_survival(lab: Lab) -> None:
    trained_policy(lab)
    lines = training(lab)
    replayed(lab, lines)
    for line in lines:
        line["grad_norm"] = float("nan")
    metrics = lab.folder / "restart" / "run" / "trainer" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(TIMES | line) + "\n" for line in lines))
    found = restart.survived(lab)
    assert found.detail["values_not_finite"] == 12
    assert found.detail["tests_without_an_answer"] == 6
    assert found.holds is False


@pytest.mark.parametrize("differing", [None, 7])
def test_a_restart_is_survived_when_every_step_is_bit_equal(lab: Lab, differing: int | None) -> None:
    trained_policy(lab)
    lines = training(lab)
    replayed(lab, lines, differing=differing)
    found = restart.survived(lab)
    assert found.detail["kills"] == 3
    assert found.detail["steps"] == found.detail["steps_with_equal_batches"] == 12
    assert found.detail["steps_with_equal_weights"] == 12 - (differing is not None)
    assert holds(found) is (differing is None)


# ------------------------------------------------------------------------------------------ real packages


def real(lab: Lab, *, resolved: int = 6, empty: dict[str, int] | None = None, why: str = "") -> Measurement:
    """Six sampled tasks, ``resolved`` of them with their gold patch."""
    made_stage(lab, "made-gold", [trajectory(n, passed=n < resolved, seconds=2.0 + n / 10) for n in range(6)])
    found = {"not_measured": why, "tasks": 6, "packages": 3, "of_tasks": 300, "of_packages": 20}
    for name, file, content in (
        ("made-sample", "sample.json", found),
        ("made-empty", "grades.json", empty or {"graded": 6, "resolved": 0}),
    ):
        (lab.folder / name).mkdir(parents=True)
        (lab.folder / name / file).write_text(json.dumps(content))
        (lab.folder / name / "done.json").write_text('{"wall_s": 1.0, "commit": null}')
    return real_packages.rates(replace(lab, profile=FULL))


def test_real_packages_are_rolled_out_and_every_grade_is_right(lab: Lab) -> None:
    found = real(lab)
    assert holds(found)
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(3600 * 6 / 2.5)
    assert found.estimate.low < found.estimate.value < found.estimate.high
    assert found.detail["grades"] == {"gold": {"graded": 6, "resolved": 6}, "empty": {"graded": 6, "resolved": 0}}


@pytest.mark.parametrize(
    ("resolved", "empty"),
    [(5, {"graded": 6, "resolved": 0}), (6, {"graded": 6, "resolved": 1}), (6, {"graded": 5, "resolved": 0})],
)
def test_one_wrong_or_missing_grade_is_told(lab: Lab, resolved: int, empty: dict[str, int]) -> None:
    assert not holds(real(lab, resolved=resolved, empty=empty))


def test_without_the_packages_nothing_is_claimed(lab: Lab) -> None:
    found = real(lab, why="the packages are not in the cache")
    assert (found.estimate, found.holds) == (None, None)
    assert found.detail["not_compared"].startswith("not measured: the packages are not")


def test_an_index_that_does_not_answer_costs_only_this_row(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(folder: Path) -> int:
        raise FarmError(f"no index has the code of {folder}", kind="no_sdist")

    monkeypatch.setattr(made, "fetch", down)
    online = replace(lab, profile=FULL, archive=False)
    found = real_packages.rates(online)
    assert found.holds is None
    assert online.used == ["made-sample"]
    kept = (lab.folder / "made-sample" / "sample.json").read_text()
    assert "farm.suites.made fetch datasets/pypi/train" in kept
    assert "no index has" not in kept  # which may name hosts
    assert real_packages.rates(replace(online, archive=True)).detail == found.detail


def test_the_sample_takes_one_task_of_every_package_before_a_second(tmp_path: Path) -> None:
    told = real_packages.draw_tasks(tmp_path / "tasks", count=30, seed=1)
    rows = [json.loads(line) for line in (tmp_path / "tasks" / "tasks.jsonl").read_text().splitlines()]
    known = json.loads((tmp_path / "tasks" / "sources.json").read_text())
    assert (told["tasks"], told["packages"]) == (30, told["of_packages"]) == (len(rows), len(known))
    assert {row["package"] for row in rows} == known.keys()
    assert max(Counter(row["package"] for row in rows).values()) == 2
    again, other = tmp_path / "again", tmp_path / "other"
    real_packages.draw_tasks(again, count=30, seed=1)
    real_packages.draw_tasks(other, count=30, seed=2)
    assert (again / "tasks.jsonl").read_text() == (tmp_path / "tasks" / "tasks.jsonl").read_text()
    assert (other / "tasks.jsonl").read_text() != (again / "tasks.jsonl").read_text()


# ------------------------------------------------------------------------------------------ failures


def test_infrastructure_errors_are_logged_and_stay_out_of_gradients(lab: Lab) -> None:
    trained_policy(lab)
    training(lab)
    plan = FaultPlan(rate=0.05, seed=7)  # the run's, not this code's
    clean = [trajectory(n, index=i, passed=i == 0) for n in range(100) for i in range(4)]
    made_stage(lab, "eval-base", clean)
    faulty = [
        row if (where := plan.boundary(row.episode_id, 1)) is None
        else replace(row, outcome=Failed(boundary=where, kind="injected", message=""), end_reason=EndReason.FAILED)
        for row in clean
    ]  # fmt: skip
    made_stage(lab, "infra", faulty, "inject.rate=0.05", "inject.seed=7")
    found = infra_errors.rate(lab)
    assert holds(found)
    assert found.detail["logged_as_failed"] == found.detail["injected"] > 3
    assert found.detail["training"] == {
        "trajectories": 48, "failures": 12, "trained_episodes": 36, "failures_in_a_gradient": 0, "steps": 12,
        "batches_as_recorded": 12,
    }  # fmt: skip
    bias = found.detail["bias_against_the_run_without_failures"]
    hits = [row for row in faulty if isinstance(row.outcome, Failed) and row.index == 0]
    assert bias["counted_as_zero"]["points"] == pytest.approx(-100 * len(hits) / 400, abs=0.01)
    assert bias["left_out"]["tasks"] == 100


# ------------------------------------------------------------------------------------------ separation


def _weights(folder: Path) -> None:
    (folder / "w.safetensors").write_text("w")


def separated(lab: Lab, events: Sequence[tuple[str, str, float, int]], *, trainer: str = "12") -> Measurement:
    """Three versions, ten seconds apart; ``events``: (kind, engine, at_s, step)."""
    (lab.folder / "sft" / "policy").mkdir(parents=True)
    (lab.folder / "sft" / "done.json").write_text('{"wall_s": 1.0, "commit": null}')
    run = made_stage(lab, "rl", [trajectory(0)], lines=took(1.0, 1.0))
    log = PolicyLog(run.policies)
    for step in range(3):
        log.publish(step, _weights, consumed_groups=0)
    (run.path / "farm.lock").write_text("11")
    (run.path / "trainer" / "trainer.lock").write_text(trainer)
    (run.path / "trainer" / "config.json").write_text("{}")
    rows = [{"kind": kind, "url": url, "at_s": at_s, "step": step} for kind, url, at_s, step in events]
    (run.logs / "engines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    derived.trajectories(run.path)  # makes the derived log, in which the times are then set
    place = run.path / "derived" / "policies.json"
    found = json.loads(place.read_text())
    for step, version in enumerate(found["versions"]):
        version["published_at_s"] = 100.0 + 10 * step
    place.write_text(json.dumps(found))
    return separation.latency(lab)


UP = [("up", "a", 99.0, 0), ("up", "b", 99.0, 0), ("live", "a", 111.0, 1), ("live", "a", 121.0, 2)]


@pytest.mark.parametrize(
    ("events", "trainer", "answer"),
    [
        ([*UP, ("live", "b", 112.0, 1), ("live", "b", 122.0, 2)], "12", True),
        ([*UP, ("live", "b", 120.0, 2)], "12", True),  # version 1 skipped: version 2 was out
        ([*UP, ("live", "b", 120.5, 2)], "12", False),  # on version 1 or newer only after more than a step
        ([*UP, ("live", "b", 112.0, 1)], "12", False),  # never on version 2
        ([*UP, ("live", "b", 112.0, 1), ("down", "b", 115.0, 0)], "12", True),  # gone before version 2
        ([*UP, ("live", "b", 112.0, 1), ("live", "b", 122.0, 2)], "11", False),  # one process is both
    ],
)
def test_every_engine_is_on_each_version_or_a_newer_one_in_time(
    lab: Lab, events: list[tuple[str, str, float, int]], trainer: str, answer: bool
) -> None:
    found = separated(lab, events, trainer=trainer)
    assert found.detail["separate_processes"] == (2 if trainer == "12" else 1)
    assert found.holds is answer


# ------------------------------------------------------------------------------------------ pass rates, lists, cluster


def stratified(lab: Lab, dataset: str) -> dict[str, Any]:
    rows = [
        replace(
            trajectory(n, index=i, passed=n % 4 > i), dataset=dataset, strata={"size": "small" if n < 30 else "large"}
        )
        for n in range(100)
        for i in range(2)
    ]
    made_stage(lab, "eval-base", rows)
    found: dict[str, Any] = pass_rates.base(lab).detail["stratified"]
    return found


def test_a_score_is_told_by_strata_and_for_the_population_that_there_is(lab: Lab) -> None:
    endless = stratified(lab, "micro/benchmark")
    assert endless["strata"] == 2
    assert "endless" in endless["drawn_from"]
    whole = stratified(replace(lab, folder=lab.folder / "2"), "swebench/SWE-bench_Verified_test@0123456789ab")
    assert (whole["strata"], whole["value"]) == (1, endless["value"])
    assert "500 tasks" in whole["drawn_from"]
    assert whole["standard_error_points"] < endless["standard_error_points"]  # a fifth of it was looked at


def test_the_real_lists_are_found_beside_the_project_and_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, given = tmp_path / "shared" / "data", tmp_path / "given"
    for folder in (beside, given):
        folder.mkdir(parents=True)
        (folder / disjoint.VERIFIED).write_text("")
    (beside / disjoint.REPOSITORIES).write_text("")
    root = tmp_path / "clones" / "project"
    monkeypatch.delenv(disjoint.LISTS, raising=False)
    assert disjoint._found(disjoint.VERIFIED, root) == beside / disjoint.VERIFIED
    monkeypatch.setenv(disjoint.LISTS, str(given))
    assert disjoint._found(disjoint.VERIFIED, root) == given / disjoint.VERIFIED
    assert disjoint._found(disjoint.REPOSITORIES, root) == beside / disjoint.REPOSITORIES
    assert disjoint._found("other", root) == given / "other"


@pytest.mark.parametrize("experiment", [kv.thrash, twin_check.within])
def test_what_only_embedded_parts_can_do_is_not_told_of_others(lab: Lab, experiment: Any) -> None:
    found = experiment(replace(lab, profile=cluster({})))
    assert found.estimate is found.holds is None
    assert found.detail == {"not_compared": "not run: embedded engine only, here it is sglang"}


def test_the_twin_is_judged_by_one_figure_and_its_wait_is_told_beside(lab: Lab) -> None:
    trained_policy(lab)
    made_stage(lab, "eval-base", [trajectory(0)])
    stage = lab.folder / "twin-check"
    stage.mkdir()
    (stage / "done.json").write_text("{}")
    pairs = {"throughput": (11.0, 10.0), "step time": (9.5, 10.0), "wait share": (0.1, 0.5)}
    checks = [{"name": name, "unit": "", "predicted": a, "measured": b} for name, (a, b) in pairs.items()]
    written = {"checks": checks[:2], "beside": checks[2:], "overhead_cpu_s": 0.01, "fitted_on": "run"}
    (stage / "check.json").write_text(json.dumps(written))
    found = twin_check.within(lab)
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(10.0)
    assert found.estimate.n == 1
    assert found.detail["not_judged"]["wait share"]["error_percent"] == -80.0
    assert holds(found)
