"""The twin's models against figures computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from farm.errors import UsageError
from farm.types import Episode
from harness.twin import sheets
from harness.twin.clock import Clock, Cpu
from harness.twin.engine import EngineModel, Request
from harness.twin.roofline import Achieved, EngineSpeed, capacity_tokens, engine_speed, routed_share
from harness.twin.sandbox import Cloud, SharedHost
from harness.twin.trainer import TrainerSpeed
from harness.twin.workload import ENDLESS, HeavyTail, tasks

QWEN = sheets.model("qwen3-30b-a3b")
MI355X = sheets.gpu("mi355x")
# One second a step at batch 1, two at batch 2 and so on; a second for each prompt token.
SLOW = EngineSpeed(
    step_s=(0.0, *(float(n) for n in range(1, 200))),
    kv_token_s=0.0,
    prefill_chunk_s=0.0,
    prefill_token_s=1.0,
    prefill_pair_s=0.0,
    prefill_floor_s=0.0,
)


# ------------------------------------------------------------------------------------------- sheets


def test_the_reference_model_has_its_published_size() -> None:
    assert QWEN.kv_bytes_per_token == 98_304  # 48 layers x 2 x 4 heads x 128 x 2 B
    assert pytest.approx(30.5e9, rel=0.002) == QWEN.weights
    assert pytest.approx(61.06e9, rel=0.001) == QWEN.weight_bytes
    assert pytest.approx(3.04e9, rel=0.01) == QWEN.active_weights  # 3.3 B with the embedding that is only looked up


def test_a_dense_model_uses_all_its_weights() -> None:
    dense = sheets.model("qwen3-8b")
    assert pytest.approx(8.19e9, rel=0.005) == dense.weights
    assert dense.active_weights == dense.weights - dense.vocabulary * dense.hidden
    assert routed_share(dense, 7) == 0.0


def test_the_capacity_follows_from_memory_and_weights() -> None:
    found = capacity_tokens(QWEN, MI355X, memory_fraction=0.72, reserved_bytes=288 * sheets.GIB - 288e9)
    assert found == int((288e9 * 0.72 - QWEN.weight_bytes) / 98_304)
    assert found == pytest.approx(1.49e6, rel=0.005)  # the arithmetic of the reported 1.5 M


@pytest.mark.parametrize("find", [sheets.model, sheets.gpu])
def test_an_unknown_name_lists_the_known(find) -> None:
    with pytest.raises(UsageError, match="no data sheet; known: "):
        find("abacus")


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="needs 470 GB"):
        capacity_tokens(sheets.model("qwen3-235b-a22b"), MI355X, memory_fraction=0.7, reserved_bytes=0)


# ----------------------------------------------------------------------------------------- roofline


def test_one_token_reads_its_experts_and_many_read_all() -> None:
    assert routed_share(QWEN, 1) == pytest.approx(8 / 128)
    assert routed_share(QWEN, 16) == pytest.approx(1 - (120 / 128) ** 16)
    assert routed_share(QWEN, 1000) == pytest.approx(1.0)


def test_a_decode_step_is_the_bytes_it_reads_over_the_bandwidth() -> None:
    speed = engine_speed(QWEN, MI355X, Achieved(bandwidth=0.5, prefill_flops=0.5, step_overhead_s=0.001))
    read = (QWEN.shared_weights + QWEN.expert_weights * 8 / 128) * 2
    assert speed.step_s[1] == pytest.approx(0.001 + read / 4e12)
    assert speed.kv_token_s == pytest.approx(98_304 / 4e12)


def test_prefill_reads_all_weights_once_or_computes() -> None:
    speed = engine_speed(QWEN, MI355X, Achieved(bandwidth=1.0, prefill_flops=1.0, step_overhead_s=0.0))
    assert speed.prefill_s(1, 0) == pytest.approx(QWEN.weight_bytes / 8e12)
    compute_s = 8192 * (2 * QWEN.active_weights + 4 * 48 * 32 * 128 * (50_000 + 4096)) / 2.5e15
    assert speed.prefill_s(8192, 50_000) == pytest.approx(compute_s)


# ------------------------------------------------------------------------------------- virtual time


def test_what_is_due_runs_in_order_of_time_and_asking() -> None:
    clock, seen = Clock(), []
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(at_s, seen.append, name)
    clock.run(1.5)
    assert (seen, clock.now_s) == (["a", "b"], 1.0)
    clock.run(9.0)
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("cores", [None, 1.0])
def test_an_alarm_rings_once_at_the_time_it_was_last_set_for(cores: float | None) -> None:
    clock, seen = Clock(), []
    timeline = clock if cores is None else Cpu(clock, cores)
    early = timeline.alarm(lambda: seen.append(("early", clock.now_s)))
    late = timeline.alarm(lambda: seen.append(("late", clock.now_s)))
    never = timeline.alarm(lambda: seen.append(("never", clock.now_s)))
    early.set(5.0)
    late.set(1.0)
    never.set(2.0)
    early.set(3.0)
    late.set(7.0)
    never.set(math.inf)
    clock.at(3.0, lambda _: seen.append(("asked", clock.now_s)))
    clock.at(4.0, lambda _: early.set(1.0))
    clock.run(100.0)
    assert sorted(seen[:2]) == [("asked", 3.0), ("early", 3.0)]
    assert seen[2:] == [("early", 4.0), ("late", 7.0)], "a time that has passed is now"
    assert clock.now_s == 7.0, "nothing is left to do"


def test_an_alarm_competes_for_the_cores() -> None:
    clock, ends = Clock(), []
    cpu = Cpu(clock, cores=1.0)
    cpu.run_job(2.0, lambda _: ends.append(("job", clock.now_s)))
    cpu.alarm(lambda: ends.append(("alarm", clock.now_s))).set(1.0)
    cpu.busy(1.0)
    clock.run(100.0)
    assert ends == [("alarm", pytest.approx(2.0)), ("job", pytest.approx(4.0))]  # at half speed


def test_the_time_of_a_cpu_is_now_whoever_asks() -> None:
    clock, seen = Clock(), []
    cpu = Cpu(clock, cores=1.0)
    cpu.busy(2.0)
    clock.at(4.0, lambda _: seen.append(cpu.now_s))
    clock.run(9.0)
    assert seen == [2.0]


def test_jobs_share_the_cores() -> None:
    clock, ends = Clock(), []
    cpu = Cpu(clock, cores=1.0)
    for work_s in (1.0, 3.0):
        cpu.run_job(work_s, lambda name: ends.append((name, clock.now_s)), work_s)
    clock.run(100.0)
    assert ends == [(1.0, pytest.approx(2.0)), (3.0, pytest.approx(4.0))]  # both at half speed, then one alone


def test_a_job_uses_no_more_than_its_threads() -> None:
    clock, ends = Clock(), []
    cpu = Cpu(clock, cores=8.0)
    cpu.run_job(6.0, lambda _: ends.append(clock.now_s), threads=2.0)
    clock.run(100.0)
    assert ends == [pytest.approx(3.0)]


# ------------------------------------------------------------------------------------------- engine


class _Sink:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.done: dict[str, float] = {}

    def __call__(self, request: Request) -> None:
        self.done[request.prefix] = self._clock.now_s


def _request(
    name: str, sink: _Sink, *, tokens: int = 10, sample: int = 5, limit: int = 100, group: str = ""
) -> Request:
    return Request(
        prefix=name,
        group=group or f"group of {name}",
        group_tokens=tokens if group else 0,
        tokens=float(tokens),
        sample=sample,
        max_new_tokens=limit,
        on_done=sink,
    )


def _engine(capacity: int = 1000) -> tuple[Clock, EngineModel, _Sink]:
    clock = Clock()
    return clock, EngineModel(clock, SLOW, capacity), _Sink(clock)


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    clock, engine, sink = _engine()
    engine.submit(_request("a", sink))
    clock.run(1e6)
    assert sink.done == {"a": pytest.approx(10 + 4)}  # the prefill samples the first of five tokens
    assert engine.kept_tokens == pytest.approx(15)


def test_prefill_of_one_stops_the_others() -> None:
    clock, engine, sink = _engine()
    engine.submit(_request("a", sink, sample=11))
    clock.at(15.0, lambda _: engine.submit(_request("b", sink, sample=1)), None)
    clock.run(1e6)
    # a has 5 of its 10 steps at 15 s; b's prefill takes 10 s and its only token; then 5 steps are left for a alone.
    assert sink.done == {"b": pytest.approx(25), "a": pytest.approx(30)}


def test_two_requests_step_together() -> None:
    clock, engine, sink = _engine()
    engine.submit(_request("a", sink))
    engine.submit(_request("b", sink))
    clock.run(1e6)
    assert sink.done == {"a": pytest.approx(20 + 4 * 2), "b": pytest.approx(20 + 4 * 2)}


def test_kv_reads_make_steps_longer_as_it_grows() -> None:
    clock, sink = Clock(), None
    speed = EngineSpeed(
        step_s=(0.0, 1.0), kv_token_s=0.1, prefill_chunk_s=0, prefill_token_s=0, prefill_pair_s=0, prefill_floor_s=0
    )
    engine, sink = EngineModel(clock, speed, 10_000), _Sink(clock)
    engine.submit(_request("a", sink, tokens=99, sample=11))
    clock.run(1e6)
    # Ten steps from 100 tokens of KV: the integral of 1 + 0.1 * (100 + x) from 0 to 10.
    assert sink.done["a"] == pytest.approx(10 * (1 + 10) + 0.1 * 10**2 / 2)


def test_the_next_turn_computes_only_what_is_new() -> None:
    clock, engine, sink = _engine()
    engine.submit(_request("a", sink))
    clock.run(1e6)
    later = _request("a", sink, tokens=15 + 3, sample=1)
    engine.submit(later)
    start_s = clock.now_s
    clock.run(1e6)
    assert sink.done["a"] - start_s == pytest.approx(3)
    assert later.cached_tokens == 15


def test_attempts_at_one_task_share_its_prompt() -> None:
    clock, engine, sink = _engine()
    engine.submit(_request("a", sink, group="task"))
    clock.run(1e6)
    other = _request("b", sink, group="task", sample=1)
    engine.submit(other)
    assert other.cached_tokens == 9  # the last token is always computed: its logits are needed


@pytest.mark.parametrize(("shares", "used"), [(True, 10 + 2 * 1), (False, 2 * 11)])
def test_a_prompt_in_common_is_stored_once(shares: bool, used: int) -> None:
    _, engine, sink = _engine()
    engine.shares_prefixes = shares
    for name in "ab":
        engine.submit(_request(name, sink, group="task"))
    assert engine.used_tokens == used


def test_a_weight_update_drops_what_is_kept() -> None:
    clock, engine, sink = _engine()
    engine.submit(_request("a", sink))
    clock.run(1e6)
    engine.pause()
    engine.resume(step=7)
    assert (engine.step, engine.kept_tokens) == (7, 0)


def test_a_pause_keeps_sampled_tokens_and_computes_their_kv_again() -> None:
    clock, engine, sink = _engine()
    request = _request("a", sink, sample=11)
    engine.submit(request)
    clock.at(15.0, lambda _: engine.pause(), None)
    clock.at(20.0, lambda _: engine.resume(step=1), None)
    clock.run(1e6)
    # 1 + 5 tokens by 15 s; then 16 tokens are computed again, which samples the 7th, and 4 steps follow.
    assert sink.done["a"] == pytest.approx(20 + 16 + 4)
    assert request.tokens == pytest.approx(21)


def test_a_full_cache_retracts_who_has_sampled_least_and_all_finish() -> None:
    clock, engine, sink = _engine(capacity=1000)
    engine.submit(_request("long", sink, sample=700, limit=700))  # after so many steps little is set aside
    clock.run(1e9)
    for n in range(3):
        engine.submit(_request(f"r{n}", sink, tokens=20, sample=600, limit=600))
    assert engine.running == 3
    clock.run(1e9)
    del sink.done["long"]
    assert sorted(sink.done) == ["r0", "r1", "r2"]
    assert engine.totals.retracted > 0
    assert engine.totals.peak_use <= 1.0 + 1e-6


def test_who_does_not_fit_waits_in_the_queue() -> None:
    clock, engine, sink = _engine(capacity=100)
    engine.submit(_request("a", sink, tokens=60, sample=10, limit=30))
    engine.submit(_request("b", sink, tokens=60, sample=10, limit=30))
    assert (engine.running, engine.waiting) == (1, 1)
    clock.run(1e9)
    assert sink.done["b"] > sink.done["a"]
    assert engine.totals.peak_queued == 1


def test_a_request_that_outgrows_an_empty_engine_is_aborted() -> None:
    clock, engine, sink = _engine(capacity=50)
    request = _request("a", sink, sample=ENDLESS, limit=10_000)
    engine.submit(request)
    clock.run(1e9)
    assert request.aborted
    assert "a" in sink.done
    assert engine.running == 0


def test_aborted_requests_leave_nothing() -> None:
    clock, engine, sink = _engine()
    requests = [_request(name, sink, sample=100) for name in "ab"]
    for request in requests:
        engine.submit(request)
    for request in requests:
        engine.abort(request)
    clock.run(1e6)
    assert (engine.running, engine.waiting, engine.used_tokens, sink.done) == (0, 0, 0.0, {})
    again = _request("c", sink)
    engine.submit(again)
    clock.run(1e6)
    assert list(sink.done) == ["c"]


# ---------------------------------------------------------------------------------- sandbox, trainer


def test_a_cloud_starts_at_its_median_and_limits_creations() -> None:
    clock, starts = Clock(), []
    cloud = Cloud(clock=clock, start_s=1.9, spread=0.3, round_trip_s=0.2, starts_per_s=2.0)
    for _ in range(3):
        cloud.start(0.0, lambda _: starts.append(clock.now_s), None)
    clock.run(1e3)
    assert starts == pytest.approx([1.9, 2.4, 2.9])


def test_starts_on_a_shared_host_slow_each_other_down() -> None:
    clock, starts = Clock(), []
    host = SharedHost(clock=clock, cpu=Cpu(clock, 2.0), start_work_s=1.0, spread=0.0, command_threads=1.0)
    for _ in range(8):
        host.start(0.0, lambda _: starts.append(clock.now_s), None)
    clock.run(1e3)
    assert starts == pytest.approx([4.0] * 8)


def test_a_training_step_pays_for_padding() -> None:
    speed = TrainerSpeed(token_s=1.0, pair_s=0.0, fixed_s=5.0, micro_batch_tokens=20)
    assert speed.step_s([]) == 0.0
    assert speed.step_s([10, 8]) == 5 + 2 * 10  # one micro-batch of two rows
    assert speed.step_s([30, 10, 8]) == 5 + 2 * 10 + 30
    assert TrainerSpeed(token_s=0.0, pair_s=2.0, fixed_s=0.0, micro_batch_tokens=20).step_s([10]) == 10 * 10


# ----------------------------------------------------------------------------------------- workload


def _workload(**changes: float) -> HeavyTail:
    usual = HeavyTail(
        turns_median=20.0, task_sigma=0.4, attempt_sigma=math.log(2.5) / (1.6449 * math.sqrt(2)), prompt_tokens=100,
        output_tokens=50.0, output_sigma=0.8, observation_tokens=80.0, observation_sigma=1.0, command_s=2.0,
        command_sigma=1.5, grade_s=10.0, grade_sigma=0.5, runaway=0.0, pass_rate=0.2,
    )  # fmt: skip
    return replace(usual, **changes)


def _episodes(count: int) -> list[list[Episode]]:
    return [
        [Episode(task=task, group_id=task.instance_id, index=i, group_size=2, seed=2 * n + i) for i in range(2)]
        for n, task in enumerate(tasks(count))
    ]


def test_two_attempts_spread_as_the_calibration_says() -> None:
    workload = _workload(turns_median=60.0)
    ratios = []
    for pair in _episodes(600):
        short, long = sorted(len(workload.script(e, 1).outputs) for e in pair)
        ratios.append(long / short)
    assert sorted(ratios)[int(0.9 * len(ratios))] == pytest.approx(2.5, rel=0.12)


def test_the_means_are_the_ones_asked_for() -> None:
    scripts = [_workload().script(e, 1) for pair in _episodes(300) for e in pair]
    outputs = [tokens for script in scripts for tokens in script.outputs]
    assert sum(outputs) / len(outputs) == pytest.approx(50, rel=0.06)
    assert sum(script.reward for script in scripts) / len(scripts) == pytest.approx(0.2, abs=0.06)


def test_a_script_depends_on_episode_and_attempt_alone() -> None:
    episode = _episodes(1)[0][0]
    assert _workload().script(episode, 1) == _workload().script(episode, 1)
    assert _workload().script(episode, 1) != _workload().script(episode, 2)


def test_some_turns_run_away() -> None:
    scripts = [_workload(runaway=0.01).script(e, 1) for pair in _episodes(100) for e in pair]
    turns = [tokens for script in scripts for tokens in script.outputs]
    assert sum(tokens == ENDLESS for tokens in turns) / len(turns) == pytest.approx(0.01, abs=0.005)
