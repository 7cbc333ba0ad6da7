"""Worker and in-flight targets: bounds, hysteresis, reaction to the engines."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from farm.elastic import (
    EngineView,
    FlightRules,
    FlightState,
    WorkerRange,
    WorkerState,
    next_flights,
    next_workers,
)

SPAN = WorkerRange(minimum=1, maximum=4, slots_per_worker=10, settle_s=30.0)
RULES = FlightRules()


def view(*, queued: int = 0, used: int = 0, retracted: int = 0) -> EngineView:
    return EngineView(queued=queued, used_tokens=used, max_total_tokens=1000, retracted_total=retracted)


def test_workers_rise_at_once_and_fall_after_settling() -> None:
    state = next_workers(WorkerState(target=1), 35, SPAN, now_s=0.0)
    assert state.target == 4
    state = next_workers(state, 5, SPAN, now_s=1.0)
    assert state.target == 4
    state = next_workers(state, 15, SPAN, now_s=20.0)
    state = next_workers(state, 5, SPAN, now_s=31.5)
    assert state.target == 2, "to the highest demand seen while settling"


def test_demand_that_comes_back_resets_the_clock() -> None:
    state = next_workers(WorkerState(target=3), 5, SPAN, now_s=0.0)
    state = next_workers(state, 30, SPAN, now_s=10.0)
    state = next_workers(state, 5, SPAN, now_s=31.0)
    assert state.target == 3


@given(demands=st.lists(st.integers(0, 200), min_size=1, max_size=50))
def test_worker_target_stays_in_range_and_covers_a_steady_demand(demands: list[int]) -> None:
    state = WorkerState(target=SPAN.minimum)
    for second, demand in enumerate(demands):
        state = next_workers(state, demand, SPAN, now_s=float(second))
        assert SPAN.minimum <= state.target <= SPAN.maximum
        assert state.target >= min(-(-demand // SPAN.slots_per_worker), SPAN.maximum)
    for second in range(100):
        state = next_workers(state, demands[-1], SPAN, now_s=100.0 + second)
    assert state.target == min(max(-(-demands[-1] // SPAN.slots_per_worker), SPAN.minimum), SPAN.maximum)


def test_flights_grow_while_nothing_queues() -> None:
    state = FlightState(target=4)
    seen = []
    for second in range(6):
        state = next_flights(state, view(), slots=32, rules=RULES, now_s=float(second))
        seen.append(state.target)
    assert seen == [6, 9, 13, 19, 28, 32]


def test_flights_hold_when_requests_queue_or_kv_is_high() -> None:
    state = FlightState(target=8)
    assert next_flights(state, view(queued=1), slots=32, rules=RULES, now_s=0.0).target == 8
    assert next_flights(state, view(used=900), slots=32, rules=RULES, now_s=0.0).target == 8


def test_retraction_cuts_once_and_holds() -> None:
    state = next_flights(FlightState(target=20), view(retracted=3), slots=32, rules=RULES, now_s=0.0)
    assert state.target == 14
    held = next_flights(state, view(retracted=3), slots=32, rules=RULES, now_s=1.0)
    assert held.target == 14
    assert next_flights(held, view(retracted=3), slots=32, rules=RULES, now_s=2.5).target == 21


def test_without_engines_slots_are_the_limit() -> None:
    assert next_flights(FlightState(target=1), None, slots=7, rules=RULES, now_s=0.0).target == 7


@settings(max_examples=50)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 1000), st.integers(0, 5)), max_size=30
    )
)
def test_flight_target_stays_in_range(steps: list[tuple[int, int, int, int]]) -> None:
    state = FlightState(target=8)
    retracted = 0
    for second, (slots, queued, used, more) in enumerate(steps):
        retracted += more
        seen = view(queued=queued, used=used, retracted=retracted)
        state = next_flights(state, seen, slots=slots, rules=RULES, now_s=float(second))
        assert state.target >= 1
        assert state.target <= slots or not slots
