"""When to stop trying: everything fails, and always in the same way. PURE: no clock, no I/O.

The rule: it trips when, since the last success, attempts have failed at one boundary with one kind ``ROUNDS`` times for
each attempt that may be in flight (and ``MIN_ATTEMPTS`` times at least), over ``MIN_S`` seconds at least. One success
starts the count anew.

So one worker that dies (each of its slots fails once) does not trip it, and neither does an engine that dies with all
that was on it: its attempts are issued again at once and may be refused some hundred times, but only until the pool has
taken it out, which is well within ``MIN_S``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from farm.types import Boundary, FailedAttempt

ROUNDS = 3
MIN_ATTEMPTS = 16
MIN_S = 10.0

_LOOK_AT = {
    Boundary.SANDBOX_START: "see what `farm doctor` says",
    Boundary.SANDBOX_LOST: "see what `farm doctor` says, and whether limits.memory_bytes is enough for these tasks",
    Boundary.ENGINE: "look at the engines (`farm status`, logs/engine-*.log)",
    Boundary.GRADER: "look at how these tasks are graded (eval_script, limits.grade_s)",
    Boundary.AGENT: "look at the agent's code",
    Boundary.FARM: "look at the workers (logs/farm.log)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Why the farm stopped: ``attempts`` in a row, over ``seconds``, failed at ``boundary`` with ``kind``."""

    boundary: Boundary
    kind: str
    attempts: int
    seconds: float
    message: str  # of the last one

    def __str__(self) -> str:
        """One line: what failed, how it failed last, what to do."""
        last = " ".join(self.message.split())[:300] or "no message"
        return (
            f"stopped: {self.attempts} attempts failed at {self.boundary.value} ({self.kind}) within "
            f"{self.seconds:.0f} s and none succeeded, last: {last}; {_LOOK_AT[self.boundary]}, then start the farm "
            "again on its run folder: what has landed is kept, and these failures are not held against their episodes"
        )


class Breaker:
    """Fed with every end of an attempt."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Boundary, str]] = Counter()
        self._since_s: float | None = None
        self._slots = 0

    def succeeded(self) -> None:
        self._counts.clear()
        self._since_s = None
        self._slots = 0

    def failed(self, failure: FailedAttempt, *, slots: int, now_s: float) -> Trip | None:
        """``slots``: how many attempts may be in flight now; the most since the last success counts."""
        key = (failure.boundary, failure.kind)
        self._counts[key] += 1
        self._slots = max(self._slots, slots)
        if self._since_s is None:
            self._since_s = now_s
        seconds = now_s - self._since_s
        if self._counts[key] < max(MIN_ATTEMPTS, ROUNDS * self._slots) or seconds < MIN_S:
            return None
        return Trip(
            boundary=failure.boundary,
            kind=failure.kind,
            attempts=self._counts[key],
            seconds=seconds,
            message=failure.message,
        )
