"""Whether an engine is to be trusted with work: a circuit breaker. PURE: no clock, no I/O.

    CLOSED --failures--> OPEN --cool-down--> HALF_OPEN --success--> CLOSED
                           ^                     |
                           +-------failure-------+

What holds at any time:

* an engine gets new episodes only while its circuit is CLOSED, and from OPEN it comes back only through HALF_OPEN,
  where one look (never an episode) tries it;
* what ends late changes nothing: while a circuit is OPEN, neither failures nor successes of what was under way count;
* the cool-down doubles with every time it opens, up to a limit, until an episode has gone well: an engine that answers
  looks and fails episodes is tried ever less often.

Looks (by the pool, every second) and requests (of episodes) are counted apart: two looks in a row mean silence, while
many requests can fail at once for one hiccup.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

_MAX_DOUBLINGS = 4
# Kinds of EngineError that speak against the engine. The others (a full queue, a request that was refused, a planned
# fault) are what a healthy engine answers too.
_SICK = frozenset({"unreachable", "timeout", "malformed", "unverified_weights", "out_of_memory"})


class CircuitState(StrEnum):
    """CLOSED: in use. OPEN: left alone. HALF_OPEN: being tried by one look."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitRules:
    """Failures in a row that open it; ``cool_down_s`` is that of the first time."""

    looks: int = 2
    requests: int = 8
    cool_down_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """``looks`` and ``requests`` failed in a row; ``trips``: how often it has opened since an episode went well;
    ``since_s``: when it opened last, on the caller's clock."""

    state: CircuitState = CircuitState.CLOSED
    looks: int = 0
    requests: int = 0
    trips: int = 0
    since_s: float = 0.0


def look_failed(circuit: Circuit, rules: CircuitRules, *, now_s: float, serving: bool) -> Circuit:
    """``serving``: whether the engine has work to lose; one that serves nothing is not given a second look."""
    match circuit.state:
        case CircuitState.OPEN:
            return circuit
        case CircuitState.HALF_OPEN:
            return _open(circuit, now_s)
        case CircuitState.CLOSED:
            circuit = replace(circuit, looks=circuit.looks + 1)
            return circuit if serving and circuit.looks < rules.looks else _open(circuit, now_s)


def look_succeeded(circuit: Circuit) -> Circuit:
    """It answered, proved its weights and generates."""
    match circuit.state:
        case CircuitState.OPEN:
            return circuit
        case CircuitState.HALF_OPEN | CircuitState.CLOSED:
            return replace(circuit, state=CircuitState.CLOSED, looks=0)


def request_failed(circuit: Circuit, rules: CircuitRules, *, now_s: float) -> Circuit:
    """A request of an episode failed in a way that :func:`speaks_against` the engine."""
    if circuit.state is not CircuitState.CLOSED:
        return circuit
    circuit = replace(circuit, requests=circuit.requests + 1)
    return circuit if circuit.requests < rules.requests else _open(circuit, now_s)


def request_succeeded(circuit: Circuit) -> Circuit:
    """An episode has gone well on it."""
    return replace(circuit, requests=0, trips=0) if circuit.state is CircuitState.CLOSED else circuit


def cool_down_s(circuit: Circuit, rules: CircuitRules) -> float:
    """How long an open circuit stays open."""
    doublings: int = min(max(circuit.trips - 1, 0), _MAX_DOUBLINGS)
    return rules.cool_down_s * float(1 << doublings)


def left_s(circuit: Circuit, rules: CircuitRules, *, now_s: float) -> float:
    """Seconds until the engine may be looked at; 0 unless the circuit is open."""
    if circuit.state is not CircuitState.OPEN:
        return 0.0
    return max(0.0, circuit.since_s + cool_down_s(circuit, rules) - now_s)


def try_again(circuit: Circuit, rules: CircuitRules, *, now_s: float) -> Circuit:
    """Half-open it when its cool-down is over."""
    if circuit.state is CircuitState.OPEN and left_s(circuit, rules, now_s=now_s) == 0.0:
        return replace(circuit, state=CircuitState.HALF_OPEN)
    return circuit


def speaks_against(kind: str) -> bool:
    """Whether an ``EngineError`` of this kind says that the engine itself is in a bad way."""
    return kind in _SICK or kind.startswith("status_5")


def _open(circuit: Circuit, now_s: float) -> Circuit:
    return Circuit(state=CircuitState.OPEN, trips=circuit.trips + 1, since_s=now_s)
