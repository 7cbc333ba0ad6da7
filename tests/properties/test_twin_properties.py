"""Whole farms in virtual time: nothing is lost or doubled, no engine overflows, nobody starves, no luck in it."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.dispatch import DispatchPolicy, EndlessPlan, FinitePlan, PlanSpec
from farm.types import Boundary, Limits, SamplingParams
from harness.twin.clock import Clock, Cpu
from harness.twin.roofline import EngineSpeed
from harness.twin.sandbox import Cloud, Sandboxes, SharedHost
from harness.twin.scenario import Engines, Overheads, Scenario
from harness.twin.simulate import simulate
from harness.twin.trainer import TrainerSpeed
from harness.twin.workload import HeavyTail, tasks
from trainer.group import BatchRules

LIMITS = Limits(
    max_turns=12,
    max_tokens_per_turn=60,
    max_context_tokens=900,
    tool_s=20.0,
    agent_s=600.0,
    grade_s=60.0,
    episode_s=1200.0,
)
SPEED = EngineSpeed(
    step_s=(0.0, *(0.01 + 0.001 * n for n in range(1, 65))),
    kv_token_s=1e-6,
    prefill_chunk_s=0.01,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-8,
    prefill_floor_s=0.005,
)


def _sandboxes(clock: Clock, cpu: Cpu | None) -> Sandboxes:
    if cpu is None:
        return Cloud(clock=clock, start_s=1.0, spread=0.2, round_trip_s=0.1, starts_per_s=5.0)
    return SharedHost(clock=clock, cpu=cpu, start_work_s=0.5, spread=0.2, command_threads=1.0)


def _scenario(
    *,
    seed: int,
    purpose: str = "eval",
    groups: int = 6,
    engines: int = 2,
    capacity: int = 4000,
    slots: int = 12,
    shared: bool = False,
    faults: float = 0.0,
    runaway: float = 0.0,
    guarded: bool = True,
) -> Scenario:
    spec = PlanSpec(group_size=3, seed=seed, purpose=purpose, sampling=SamplingParams(), limits=LIMITS)
    trains = purpose == "rl"
    return Scenario(
        name="small",
        plan=EndlessPlan(tasks(groups), spec) if trains else FinitePlan(tasks(groups), spec),
        workload=HeavyTail(
            turns_median=5.0,
            task_sigma=0.4,
            attempt_sigma=0.4,
            prompt_tokens=80,
            output_tokens=30.0,
            output_sigma=0.6,
            observation_tokens=40.0,
            observation_sigma=0.6,
            command_s=1.0,
            command_sigma=1.0,
            grade_s=5.0,
            grade_sigma=0.3,
            runaway=runaway,
            pass_rate=0.4,
            seed=seed,
        ),
        policy=DispatchPolicy(
            retries=dict.fromkeys(Boundary, 20),
            lost_limit=20,
            lease_s=1300.0,
            max_staleness=1,
            groups_per_step=2 if trains else None,
        ),
        slots=slots,
        engines=Engines(
            count=engines,
            speed=SPEED,
            capacity_tokens=capacity,
            context_length=4000,
            max_running=64,
            overcommit=1.0,
            load_s=1.0,
            shared_cpu=shared,
        ),
        sandboxes=_sandboxes,
        cores=4.0 if shared else None,
        seal_age_s=2.0,
        seal_rows=16,
        trainer=TrainerSpeed(token_s=1e-3, pair_s=0.0, fixed_s=1.0, micro_batch_tokens=2000, save_s=0.5)
        if trains
        else None,
        rules=BatchRules(groups_per_step=2, min_attempts=2, max_staleness=1) if trains else None,
        overheads=Overheads(turn_cpu_s=0.01) if shared else Overheads(),
        guarded=guarded,
        fault_rate=faults,
        fault_seed=seed,
        horizon_s=50_000.0,
        stop_after_steps=4 if trains else None,
    )


_TIMES = st.integers(0, 12).map(float)


@settings(deadline=None)
@given(moves=st.lists(st.tuples(_TIMES, st.integers(0, 3), _TIMES | st.just(math.inf)), max_size=30))
def test_alarms_ring_when_a_look_at_all_of_them_says_so(moves: list[tuple[float, int, float]]) -> None:
    """``moves``: when, which, and for how much later it is set then."""
    clock, rung = Clock(), []
    alarms = [clock.alarm(lambda number=number: rung.append((clock.now_s, number))) for number in range(4)]
    for at_s, number, later_s in moves:
        clock.at(at_s, lambda move: alarms[move[0]].set(clock.now_s + move[1]), (number, later_s))
    clock.run(100.0)

    set_s, expected = [math.inf] * 4, []
    for at_s, number, later_s in [*sorted(moves, key=lambda move: move[0]), (math.inf, 0, math.inf)]:
        while (first_s := min(set_s)) < at_s:
            expected.append((first_s, set_s.index(first_s)))
            set_s[set_s.index(first_s)] = math.inf
        set_s[number] = at_s + later_s
    assert rung == expected


def test_a_chain_of_refusals_is_as_long_as_it_likes() -> None:
    """Each needs less than the one before, so none holds the next back, and all need more than any engine has."""
    spec = PlanSpec(group_size=1, seed=1, purpose="eval", sampling=SamplingParams(), limits=LIMITS)
    fits, *others = tasks(3000)
    large = [replace(task, own_limits={"max_context_tokens": 9000 - n}) for n, task in enumerate(others)]
    result = simulate(replace(_scenario(seed=1), plan=FinitePlan([fits, *large], spec), horizon_s=0.1))
    assert result.counts is not None
    assert (result.counts.in_flight, result.counts.waiting) == (1, len(large))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    engines=st.integers(1, 3),
    capacity=st.integers(1000, 6000),
    slots=st.integers(1, 20),
    shared=st.booleans(),
    faults=st.sampled_from([0.0, 0.1]),
    runaway=st.sampled_from([0.0, 0.1]),
    guarded=st.booleans(),
)
def test_every_episode_of_a_plan_lands_exactly_once(
    seed: int, engines: int, capacity: int, slots: int, shared: bool, faults: float, runaway: float, guarded: bool
) -> None:
    scenario = _scenario(
        seed=seed,
        engines=engines,
        capacity=capacity,
        slots=slots,
        shared=shared,
        faults=faults,
        runaway=runaway,
        guarded=guarded,
    )
    result = simulate(scenario)
    expected = {episode.id for position in range(6) for episode in scenario.plan.group(position)}
    assert set(result.rows) == expected
    assert set(result.rows.values()) == {1}
    assert result.counts is not None
    assert result.counts.in_flight == 0
    assert result.ended_at_s < scenario.horizon_s
    assert result.peak_use() <= 1.0 + 1e-6
    assert max(count for _, count in result.in_flight) <= slots


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), runaway=st.sampled_from([0.05, 0.2]))
def test_with_cap_and_admission_nobody_starves(seed: int, runaway: float) -> None:
    result = simulate(_scenario(seed=seed, capacity=1900, engines=1, slots=20, runaway=runaway, groups=10))
    assert result.failures["engine/timeout"] == 0
    assert sum(engine.retracted for engine in result.engines) == 0
    # Two caps fit, so the longest wait is for the turns of one other.
    assert max(landing.engine_wait_s for landing in result.landings) < 10.0


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), shared=st.booleans())
def test_training_consumes_fresh_groups_and_lands_each_row_once(seed: int, shared: bool) -> None:
    result = simulate(_scenario(seed=seed, purpose="rl", shared=shared, faults=0.05))
    assert len(result.steps) == 4
    assert set(result.rows.values()) == {1}
    assert max(step.staleness_max for step in result.steps) <= 1
    assert all(step.wait_s >= 0 and step.train_s >= 0 for step in result.steps)


def test_same_seed_same_bytes() -> None:
    first, again, other = (simulate(_scenario(seed=seed, purpose="rl", faults=0.05)).digest() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_more_cores_finish_earlier() -> None:
    scenario = _scenario(seed=1, shared=True)
    slow, fast = simulate(replace(scenario, cores=2.0)), simulate(replace(scenario, cores=8.0))
    assert fast.ended_at_s < slow.ended_at_s
