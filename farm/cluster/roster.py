"""Which workers to ask for, take back and forget. PURE: what is seen in, steps out; time is an argument.

Invariants (property tests):

* A worker that has joined is never stopped here while its process is there: the scheduler drains it, closes it when it
  is empty, and then it ends by itself (Rule 8). Only one that runs and has not been joined for ``join_s`` is stopped.
* Workers that are live or on their way never exceed what is wanted by a step of this roster.
* After a failure fewer are asked for, and later: a farm whose hosts refuse does not hammer them. A worker that joined
  after the last failure and stayed for ``proven_s`` clears the memory of failures, and the loss of one that had stayed
  so long is none: it is replaced at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from farm.cluster.launcher import Phase, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterRules:
    join_s: float = 120.0
    proven_s: float = 60.0
    delay_s: float = 1.0
    delay_max_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """``has_joined``, ``proven``: of the workers that are known, those that have been there, and for long enough.
    ``alone_since_s``: since when a running one is not there; ``joined_since_s``: since when one is.

    ``failures`` in a row, the last at ``failed_at_s``; nothing is asked for before ``not_before_s``. ``last_failure``:
    for people."""

    number: int = 0
    has_joined: frozenset[str] = frozenset()
    proven: frozenset[str] = frozenset()
    alone_since_s: Mapping[str, float] = field(default_factory=dict)
    joined_since_s: Mapping[str, float] = field(default_factory=dict)
    failures: int = 0
    failed_at_s: float = -math.inf
    not_before_s: float = 0.0
    last_failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """``live`` and ``draining``: names that have joined; ``states``: what the launcher says of those it started."""

    want: int
    live: frozenset[str]
    draining: frozenset[str]
    states: Mapping[str, WorkerState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    start: tuple[str, ...] = ()
    withdraw: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    failed: tuple[tuple[str, WorkerState], ...] = ()


def next_steps(roster: Roster, seen: Seen, rules: RosterRules, *, now_s: float) -> tuple[Roster, Steps]:
    """What to do now, and the roster after it."""
    joined = seen.live | seen.draining
    ended = {name: state for name, state in seen.states.items() if state.phase is Phase.ENDED}
    running = {name for name, state in seen.states.items() if state.phase is Phase.RUNNING}
    waiting = [name for name, state in seen.states.items() if state.phase is Phase.WAITING]

    joined_since = {name: roster.joined_since_s.get(name, now_s) for name in joined}
    alone_since = {name: roster.alone_since_s.get(name, now_s) for name in running - joined}
    hung = {name for name, since in alone_since.items() if now_s - since > rules.join_s}
    failed = {name: state for name, state in ended.items() if _failed(state, name in roster.has_joined)}
    failed |= {name: replace(seen.states[name], message=f"did not join within {rules.join_s:g} s") for name in hung}

    stayed = {name for name, since in joined_since.items() if now_s - since >= rules.proven_s}
    if any(joined_since[name] > roster.failed_at_s for name in stayed):
        roster = replace(roster, failures=0)
    roster = replace(
        roster,
        has_joined=joined | (roster.has_joined & seen.states.keys()),
        proven=frozenset(stayed | (roster.proven & seen.states.keys())),
        joined_since_s=joined_since,
        alone_since_s=alone_since,
    )
    told = [f"{name}: {state.message or 'it ended'}" for name, state in failed.items() if name not in roster.proven]
    if told:  # many at once are one failure
        roster = after_failure(roster, told[-1], rules, now_s=now_s)

    coming = len(waiting) + len(running - joined - hung)
    missing = seen.want - len(seen.live) - coming
    start: tuple[str, ...] = ()
    if missing > 0 and now_s >= roster.not_before_s:
        count = 1 if roster.failures else missing
        start = tuple(f"worker-{roster.number + i}" for i in range(count))
        roster = replace(roster, number=roster.number + count)
    return roster, Steps(
        start=start,
        withdraw=tuple(waiting[missing:]) if missing < 0 else (),  # the newest
        stop=tuple(sorted(ended.keys() | hung)),
        failed=tuple(failed.items()),
    )


def after_failure(roster: Roster, message: str, rules: RosterRules, *, now_s: float) -> Roster:
    delay_s = min(rules.delay_s * 2.0**roster.failures, rules.delay_max_s)
    return replace(
        roster,
        failures=roster.failures + 1,
        failed_at_s=now_s,
        not_before_s=max(roster.not_before_s, now_s + delay_s),
        last_failure=message,
    )


def _failed(state: WorkerState, had_joined: bool) -> bool:
    """One that had joined and ended with 0, or was told to, has done its work."""
    return not (had_joined and state.code in (0, None))
