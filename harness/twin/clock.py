"""Virtual time: a heap of things to do, and processor sharing on top of it.

Invariant: what is due runs in the order of its time, and at equal times in the order in which it was asked for, alarms
last; so a simulation is a function of its inputs alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

Action = Callable[[Any], None]


class Timeline(Protocol):
    """A time that a model lives in. ``now_s`` never falls."""

    now_s: float

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        """Run ``action(argument)`` once ``at_s`` is reached (at once, but not before what is due already, when it has
        passed)."""
        ...

    def alarm(self, ring: Callable[[], None]) -> Callable[[float], None]:
        """``ring()`` at a time that the function returned sets, and moves; it rings once. For the few that move it at
        nearly every event: to move it costs less than an entry of :meth:`at`, to have it a look at every event."""
        ...

    def busy(self, threads: float) -> None:
        """``threads`` more (or fewer) compete for what this timeline shares out."""
        ...


class _Alarms:
    """For when each is set (``inf``: not at all) and what it rings.

    They are queued in a heap. One that is put off stays where it is and is queued again when its turn comes: most
    moves put off what will be moved again before that."""

    def __init__(self) -> None:
        self._set_s = [math.inf]  # of no alarm: there is always a first one
        self._queued_s = [math.inf]  # the earliest entry of each in the heap; others are void
        self.queue = [(math.inf, 0)]  # the first one rings no earlier than its first entry
        self._rings: list[Callable[[], None]] = [_nothing]

    def add(self, ring: Callable[[], None]) -> int:
        self._set_s.append(math.inf)
        self._queued_s.append(math.inf)
        self._rings.append(ring)
        return len(self._rings) - 1

    def move(self, number: int, at_s: float) -> None:
        self._set_s[number] = at_s
        if at_s < self._queued_s[number]:
            self._queued_s[number] = at_s
            heapq.heappush(self.queue, (at_s, number))

    def first_s(self) -> float:
        """When the first one rings."""
        queue, set_s = self.queue, self._set_s
        while True:
            at_s, number = queue[0]
            if set_s[number] == at_s:
                return at_s
            heapq.heappop(queue)
            if self._queued_s[number] == at_s:
                self._queued_s[number] = math.inf
                self.move(number, set_s[number])

    def ring(self) -> None:
        """The first one, after a look at :meth:`first_s`."""
        _, number = heapq.heappop(self.queue)
        self._set_s[number] = self._queued_s[number] = math.inf
        self._rings[number]()


def _nothing() -> None:
    return


class Clock:
    """Virtual wall-clock time in seconds from 0. Nothing is shared out on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._times: list[float] = []  # a heap of the keys of _due: floats are compared faster than records
        self._due: dict[float, tuple[Action, Any]] = {}
        self._ties: dict[float, list[tuple[Action, Any]]] = {}  # what else is due at a time, which is rare
        self._alarms = _Alarms()
        self._end_s = math.inf

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        if at_s < self.now_s:
            at_s = self.now_s
        if at_s in self._due:
            self._ties.setdefault(at_s, []).append((action, argument))
        else:
            self._due[at_s] = (action, argument)
            heapq.heappush(self._times, at_s)

    def alarm(self, ring: Callable[[], None]) -> Callable[[float], None]:
        return partial(self._alarms.move, self._alarms.add(ring))

    def busy(self, threads: float) -> None:
        return

    def stop(self) -> None:
        """End :meth:`run` after what is due at this time."""
        self._end_s = -math.inf

    def run(self, until_s: float) -> None:
        """Until ``until_s`` has been reached, nothing is left to do, or it is stopped."""
        if self._end_s >= 0.0:
            self._end_s = until_s
        times, ties, take, pop, alarms = self._times, self._ties, self._due.pop, heapq.heappop, self._alarms
        queue = alarms.queue
        while True:
            ring_s = queue[0][0]
            if times and times[0] <= ring_s:
                if times[0] > self._end_s:
                    return
                self.now_s = now_s = pop(times)
                action, argument = take(now_s)
                others = ties.pop(now_s, ()) if ties else ()  # not what these will ask for
                action(argument)
                for action, argument in others:
                    action(argument)
            elif ring_s > self._end_s or ring_s == math.inf:
                return
            elif ring_s == alarms.first_s():
                if ring_s > self.now_s:
                    self.now_s = ring_s
                alarms.ring()


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
        self._next_wall_s = math.inf
        self._alarms = _Alarms()

    @property
    def slowdown(self) -> float:
        """How much longer than alone work takes at this moment."""
        return max(1.0, self.threads / self._cores)

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        self._advance()
        self._order += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._order, action, argument))
        self._schedule()

    def alarm(self, ring: Callable[[], None]) -> Callable[[float], None]:
        number = self._alarms.add(ring)

        def move(at_s: float) -> None:
            self._advance()
            self._alarms.move(number, max(at_s, self.now_s))
            self._schedule()

        return move

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
        due_s = self._due_s()
        if due_s == math.inf:
            self._version += 1  # what stands on the clock is for nothing now
            self._next_wall_s = math.inf
            return
        wall_s = self._clock.now_s + max(0.0, due_s - self.now_s) * self.slowdown
        if wall_s != self._next_wall_s:
            self._version += 1
            self._next_wall_s = wall_s
            self._clock.at(wall_s, self._wake, self._version)

    def _due_s(self) -> float:
        """When the next is due, in this time."""
        ring_s = self._alarms.first_s()
        return min(self._heap[0][0], ring_s) if self._heap else ring_s

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._next_wall_s = math.inf
        self._advance()
        self.now_s = max(self.now_s, self._due_s())  # rounding must not leave the one that is due
        while (due_s := self._due_s()) <= self.now_s:
            if self._heap and self._heap[0][0] <= due_s:
                _, _, action, argument = heapq.heappop(self._heap)
                action(argument)
            else:
                self._alarms.ring()
        self._schedule()
