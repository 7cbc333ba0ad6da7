"""farm.circuit under any sequence of what can happen to an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
    try_again,
)

EVENTS = ("look_failed", "idle_look_failed", "look_succeeded", "request_failed", "request_succeeded", "try_again")


def apply(circuit: Circuit, event: str, rules: CircuitRules, now_s: float) -> Circuit:
    match event:
        case "look_failed":
            return look_failed(circuit, rules, now_s=now_s, serving=True)
        case "idle_look_failed":
            return look_failed(circuit, rules, now_s=now_s, serving=False)
        case "look_succeeded":
            return look_succeeded(circuit)
        case "request_failed":
            return request_failed(circuit, rules, now_s=now_s)
        case "request_succeeded":
            return request_succeeded(circuit)
        case _:
            return try_again(circuit, rules, now_s=now_s)


@given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 10)), max_size=60),
    looks=st.integers(1, 4),
    requests=st.integers(1, 5),
)
def test_it_only_moves_along_its_edges(events: list[tuple[str, float]], looks: int, requests: int) -> None:
    rules = CircuitRules(looks=looks, requests=requests, cool_down_s=1.0)
    circuit, now_s = Circuit(), 0.0
    for event, passed_s in events:
        now_s += passed_s
        before, waiting_s = circuit, left_s(circuit, rules, now_s=now_s)
        circuit = apply(before, event, rules, now_s)
        edge = (before.state, circuit.state)
        match edge:
            case (CircuitState.CLOSED, CircuitState.OPEN):
                assert "failed" in event
            case (CircuitState.OPEN, CircuitState.HALF_OPEN):
                assert event == "try_again"
                assert waiting_s == 0.0, "not before its cool-down is over"
            case (CircuitState.HALF_OPEN, CircuitState.CLOSED):
                assert event == "look_succeeded"
            case (CircuitState.HALF_OPEN, CircuitState.OPEN):
                assert event in ("look_failed", "idle_look_failed")
            case _:
                assert edge[0] is edge[1], f"no such edge: {edge}"
        if circuit.state is CircuitState.CLOSED:
            assert circuit.looks < looks
            assert circuit.requests < requests
        assert 1.0 <= cool_down_s(circuit, rules) <= 16.0
        assert left_s(circuit, rules, now_s=now_s) <= 16.0
