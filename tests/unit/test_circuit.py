from __future__ import annotations

import pytest

from farm.circuit import (
    Circuit,
    CircuitRules,
    CircuitState,
    cool_down_s,
    left_s,
    look_failed,
    look_succeeded,
    request_failed,
    request_succeeded,
    speaks_against,
    try_again,
)

RULES = CircuitRules(looks=2, requests=3, cool_down_s=2.0)


def opened(trips: int = 1, at_s: float = 10.0) -> Circuit:
    return Circuit(state=CircuitState.OPEN, trips=trips, since_s=at_s)


def test_two_failed_looks_open_it_and_one_good_look_between_them_does_not_count() -> None:
    once = look_failed(Circuit(), RULES, now_s=1.0, serving=True)
    assert (once.state, once.looks) == (CircuitState.CLOSED, 1)
    assert look_succeeded(once) == Circuit()
    twice = look_failed(once, RULES, now_s=2.0, serving=True)
    assert twice == Circuit(state=CircuitState.OPEN, trips=1, since_s=2.0)


def test_an_engine_that_serves_nothing_is_not_given_a_second_look() -> None:
    assert look_failed(Circuit(), RULES, now_s=1.0, serving=False).state is CircuitState.OPEN


def test_requests_in_a_row_open_it_whatever_the_looks_say() -> None:
    circuit = Circuit()
    for _ in range(2):
        circuit = look_succeeded(request_failed(circuit, RULES, now_s=1.0))
    assert circuit.state is CircuitState.CLOSED
    assert request_succeeded(circuit) == Circuit()
    assert request_failed(circuit, RULES, now_s=3.0) == Circuit(state=CircuitState.OPEN, trips=1, since_s=3.0)


def test_what_ends_late_changes_nothing() -> None:
    circuit = opened()
    assert look_succeeded(circuit) == circuit
    assert request_succeeded(circuit) == circuit
    assert request_failed(circuit, RULES, now_s=11.0) == circuit
    assert look_failed(circuit, RULES, now_s=11.0, serving=True) == circuit
    half = Circuit(state=CircuitState.HALF_OPEN, trips=1, since_s=10.0)
    assert request_succeeded(half) == half
    assert request_failed(half, RULES, now_s=11.0) == half


def test_it_comes_back_through_one_look_after_its_cool_down() -> None:
    circuit = opened()
    assert left_s(circuit, RULES, now_s=10.5) == 1.5
    assert try_again(circuit, RULES, now_s=11.9) == circuit
    half = try_again(circuit, RULES, now_s=12.0)
    assert half.state is CircuitState.HALF_OPEN
    assert left_s(half, RULES, now_s=12.0) == 0.0
    assert look_succeeded(half).state is CircuitState.CLOSED
    again = look_failed(half, RULES, now_s=12.0, serving=True)
    assert (again.state, again.trips, again.since_s) == (CircuitState.OPEN, 2, 12.0)


def test_the_cool_down_doubles_up_to_a_limit_until_an_episode_goes_well() -> None:
    assert [cool_down_s(opened(trips), RULES) for trips in range(1, 8)] == [2, 4, 8, 16, 32, 32, 32]
    closed = look_succeeded(try_again(opened(5), RULES, now_s=100.0))
    assert closed.trips == 5
    assert request_succeeded(closed).trips == 0


@pytest.mark.parametrize(
    ("kind", "sick"),
    [
        ("unreachable", True), ("timeout", True), ("status_500", True), ("unverified_weights", True),
        ("queue_full", False), ("status_400", False), ("injected", False), ("no_engine", False),
    ],
)  # fmt: skip
def test_only_some_errors_speak_against_the_engine(kind: str, sick: bool) -> None:
    assert speaks_against(kind) is sick
