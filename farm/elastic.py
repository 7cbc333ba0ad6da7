"""How many workers, how many episodes in flight. PURE: observations in, numbers out; time is an argument.

Invariants (property tests):

* The worker target is always within [minimum, maximum], rises at once with demand, and falls only after demand has
  stayed lower for ``settle_s``. It says how many workers are *wanted*: the cluster drains the others, so scale-down
  never kills a running episode (Rule 8).
* While there are slots, the in-flight target is within [1, slots]. It grows only while no engine queues and KV
  use is below ``kv_grow_below``, and shrinks on every retraction: more episodes than the KV cache holds make each of
  them slower, not the farm faster (Rule 6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRange:
    minimum: int
    maximum: int
    slots_per_worker: int
    settle_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """``target`` workers are wanted; demand has been below that since ``lower_since_s`` (None: it is not), and the
    highest demand seen since then would need ``lower_peak`` workers."""

    target: int
    lower_since_s: float | None = None
    lower_peak: int = 0


def next_workers(state: WorkerState, demand: int, span: WorkerRange, *, now_s: float) -> WorkerState:
    """``demand``: episodes that run or could run now."""
    need = min(max(math.ceil(demand / span.slots_per_worker), span.minimum), span.maximum)
    if need >= state.target:
        return WorkerState(target=need)
    if state.lower_since_s is None:
        return WorkerState(target=state.target, lower_since_s=now_s, lower_peak=need)
    peak = max(need, state.lower_peak)
    if now_s - state.lower_since_s < span.settle_s:
        return WorkerState(target=state.target, lower_since_s=state.lower_since_s, lower_peak=peak)
    return WorkerState(target=peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """All engines together, as last seen. ``retracted_total`` only grows (a restarted engine may reset it)."""

    queued: int
    used_tokens: int
    max_total_tokens: int
    retracted_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRules:
    """``growth`` and ``cut`` are factors per observation."""

    kv_grow_below: float = 0.85
    growth: float = 1.5
    cut: float = 0.7
    hold_s: float = 2.0  # after a cut: what was running needs time to show the new level


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightState:
    target: int
    retracted_total: int = 0
    hold_until_s: float = 0.0


def next_flights(
    state: FlightState, view: EngineView | None, *, slots: int, rules: FlightRules, now_s: float
) -> FlightState:
    """The in-flight target after one observation. ``view`` None: no engine is involved, so slots are the only limit.

    ``slots`` 0 (no engine serves yet, no worker is up) says nothing about the engines: the state stays as it is."""
    if slots <= 0:
        return state
    if view is None:
        return FlightState(target=slots, retracted_total=state.retracted_total)
    target = min(max(state.target, 1), slots)
    if view.retracted_total > state.retracted_total:
        cut = max(1, math.floor(target * rules.cut))
        return FlightState(target=cut, retracted_total=view.retracted_total, hold_until_s=now_s + rules.hold_s)
    use = view.used_tokens / view.max_total_tokens if view.max_total_tokens else 0.0
    if now_s >= state.hold_until_s and view.queued == 0 and use < rules.kv_grow_below:
        target = min(slots, max(target + 1, math.floor(target * rules.growth)))
    return FlightState(target=target, retracted_total=view.retracted_total, hold_until_s=state.hold_until_s)
