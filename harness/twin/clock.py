"""Virtual time: a heap of things to do, and processor sharing on top of it.

Invariant: what is due runs in the order of its time, and at equal times in the order in which it was asked for; so a
simulation is a function of its inputs alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, Protocol

Action = Callable[[Any], None]


class Timeline(Protocol):
    """A time that a model lives in. ``now_s`` never falls."""

    now_s: float

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        """Run ``action(argument)`` once ``at_s`` is reached (at once, but not before what is due already, when it has
        passed)."""
        ...

    def busy(self, threads: float) -> None:
        """``threads`` more (or fewer) compete for what this timeline shares out."""
        ...


class Clock:
    """Virtual wall-clock time in seconds from 0. Nothing is shared out on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._times: list[float] = []  # a heap of the keys of _due: floats are compared faster than records
        self._due: dict[float, list[tuple[Action, Any]]] = {}
        self._end_s = math.inf

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        if at_s < self.now_s:
            at_s = self.now_s
        if at_s in self._due:
            self._due[at_s].append((action, argument))
        else:
            self._due[at_s] = [(action, argument)]
            heapq.heappush(self._times, at_s)

    def busy(self, threads: float) -> None:
        return

    def stop(self) -> None:
        """End :meth:`run` after what is due at this time."""
        self._end_s = -math.inf

    def run(self, until_s: float) -> None:
        """Until ``until_s`` has been reached, nothing is left to do, or it is stopped."""
        if self._end_s >= 0.0:
            self._end_s = until_s
        times, take, pop = self._times, self._due.pop, heapq.heappop
        while times and times[0] <= self._end_s:
            self.now_s = pop(times)
            for action, argument in take(self.now_s):
                action(argument)


class Cpu:
    """Processor sharing: every running thread gets the same share of ``cores``, at most one core.

    Its own time ``now_s`` is the CPU seconds that one thread would have got; on ``clock`` it passes at the rate
    ``min(1, cores / threads)``. So a model that lives in it (an engine on the same machine) is slowed down like all
    the others."""

    def __init__(self, clock: Clock, cores: float) -> None:
        self._clock = clock
        self._cores = cores
        self.now_s = 0.0
        self.threads = 0.0
        self._wall_s = 0.0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._order = 0
        self._version = 0
        self._next_wall_s = float("inf")

    @property
    def slowdown(self) -> float:
        """How much longer than alone work takes at this moment."""
        return max(1.0, self.threads / self._cores)

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        self._advance()
        self._order += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._order, action, argument))
        self._schedule()

    def busy(self, threads: float) -> None:
        self._advance()
        self.threads = max(0.0, self.threads + threads)
        self._schedule()

    def run_job(self, work_s: float, action: Action, argument: Any = None, *, threads: float = 1.0) -> None:
        """``work_s`` CPU seconds spread over ``threads``; then ``action(argument)``."""
        self._advance()
        self.threads += threads
        self._order += 1
        done = self.now_s + work_s / threads
        heapq.heappush(self._heap, (done, self._order, self._finish, (threads, action, argument)))
        self._schedule()

    def _finish(self, job: tuple[float, Action, Any]) -> None:
        threads, action, argument = job
        self.threads = max(0.0, self.threads - threads)
        action(argument)

    def _advance(self) -> None:
        wall_s = self._clock.now_s
        if wall_s > self._wall_s:
            self.now_s += (wall_s - self._wall_s) / self.slowdown
            self._wall_s = wall_s

    def _schedule(self) -> None:
        if not self._heap:
            return
        wall_s = self._clock.now_s + max(0.0, self._heap[0][0] - self.now_s) * self.slowdown
        if wall_s != self._next_wall_s:
            self._version += 1
            self._next_wall_s = wall_s
            self._clock.at(wall_s, self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._next_wall_s = float("inf")
        self._advance()
        due_s = self._heap[0][0]
        self.now_s = max(self.now_s, due_s)  # rounding must not leave the one that is due
        while self._heap and self._heap[0][0] <= self.now_s:
            _, _, action, argument = heapq.heappop(self._heap)
            action(argument)
        self._schedule()
