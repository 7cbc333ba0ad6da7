"""Virtual time: a heap of things to do, and processor sharing on top of it.

Invariant: what is due runs in the order of its time, and at equal times in the order in which it was asked for, then
alarms in the order in which they were made; so a simulation is a function of its inputs alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, Protocol

Action = Callable[[Any], None]


class Timeline(Protocol):
    """A time that a model lives in."""

    @property
    def now_s(self) -> float:
        """It never falls."""
        ...

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        """Run ``action(argument)`` once ``at_s`` is reached (at once, but not before what is due already, when it has
        passed)."""
        ...

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        """``ring()`` at a time that is still to be set. To move it costs less than an entry of :meth:`at`."""
        ...

    def busy(self, threads: float) -> None:
        """``threads`` more (or fewer) compete for what this timeline shares out."""
        ...


class Alarm:
    """Rings at the time it was last set for, once; ``inf``: not at all. One set for a time that has passed is next.

    It waits in a queue, a heap. One that is put off keeps its place and is queued anew when its turn comes: most are
    put off again before that."""

    __slots__ = ("_number", "_queue", "_queued_s", "_set_s", "ring")

    def __init__(self, queue: AlarmQueue, number: int, ring: Callable[[], None]) -> None:
        self.ring = ring
        self._queue = queue
        self._number = number
        self._set_s = math.inf
        self._queued_s = math.inf  # of its first entry; others are void

    def set(self, at_s: float) -> None:
        self._set_s = at_s
        if at_s < self._queued_s:
            self._queued_s = at_s
            heapq.heappush(self._queue, (at_s, self._number, self))

    def take(self, at_s: float) -> bool:
        """Its entry for ``at_s`` has left the queue: whether it rings."""
        if self._set_s == at_s:
            self._set_s = self._queued_s = math.inf
            return True
        if self._queued_s == at_s:
            self._queued_s = math.inf
            Alarm.set(self, self._set_s)
        return False


AlarmQueue = list[tuple[float, int, Alarm]]


def _alarm_queue() -> AlarmQueue:
    """With one that never rings: there is always a first."""
    queue: AlarmQueue = []
    queue.append((math.inf, 0, Alarm(queue, 0, lambda: None)))
    return queue


class Clock:
    """Virtual wall-clock time in seconds from 0. Nothing is shared out on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._times: list[float] = []  # a heap of the keys of _due: floats are compared faster than records
        self._due: dict[float, tuple[Action, Any]] = {}
        self._ties: dict[float, list[tuple[Action, Any]]] = {}  # what else is due at a time, which is rare
        self._alarms = _alarm_queue()
        self._count = 0
        self._end_s = math.inf

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        if at_s < self.now_s:
            at_s = self.now_s
        if at_s in self._due:
            self._ties.setdefault(at_s, []).append((action, argument))
        else:
            self._due[at_s] = (action, argument)
            heapq.heappush(self._times, at_s)

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        self._count += 1
        return Alarm(self._alarms, self._count, ring)

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
        while True:
            ring_s = alarms[0][0]
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
            else:
                alarm = pop(alarms)[2]
                if alarm.take(ring_s):
                    if ring_s > self.now_s:
                        self.now_s = ring_s
                    alarm.ring()


class Cpu:
    """Processor sharing: every running thread gets the same share of ``cores``, at most one core.

    Its own time ``now_s`` is the CPU seconds that one thread would have got; on ``clock`` it passes at the rate
    ``min(1, cores / threads)``. So a model that lives in it (an engine on the same machine) is slowed down like all
    the others."""

    def __init__(self, clock: Clock, cores: float) -> None:
        self._clock = clock
        self._cores = cores
        self._now_s = 0.0
        self.threads = 0.0
        self._wall_s = 0.0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._order = 0
        self._version = 0
        self._next_wall_s = math.inf
        self._alarms = _alarm_queue()
        self._count = 0

    @property
    def now_s(self) -> float:
        self._advance()
        return self._now_s

    @property
    def slowdown(self) -> float:
        """How much longer than alone work takes at this moment."""
        return max(1.0, self.threads / self._cores)

    def at(self, at_s: float, action: Action, argument: Any = None) -> None:
        self._advance()
        self._order += 1
        heapq.heappush(self._heap, (max(at_s, self._now_s), self._order, action, argument))
        self.schedule()

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        self._count += 1
        return _SharedAlarm(self, self._alarms, self._count, ring)

    def busy(self, threads: float) -> None:
        self._advance()
        self.threads = max(0.0, self.threads + threads)
        self.schedule()

    def run_job(self, work_s: float, action: Action, argument: Any = None, *, threads: float = 1.0) -> None:
        """``work_s`` CPU seconds spread over ``threads``; then ``action(argument)``."""
        self._advance()
        self.threads += threads
        self._order += 1
        done = self._now_s + work_s / threads
        heapq.heappush(self._heap, (done, self._order, self._finish, (threads, action, argument)))
        self.schedule()

    def _finish(self, job: tuple[float, Action, Any]) -> None:
        threads, action, argument = job
        self.threads = max(0.0, self.threads - threads)
        action(argument)

    def _advance(self) -> None:
        wall_s = self._clock.now_s
        if wall_s > self._wall_s:
            self._now_s += (wall_s - self._wall_s) / self.slowdown
            self._wall_s = wall_s

    def schedule(self) -> None:
        """Put on the clock when the next is due."""
        due_s = self._due_s()
        if due_s == math.inf:
            self._version += 1  # what stands on the clock is for nothing now
            self._next_wall_s = math.inf
            return
        wall_s = self._clock.now_s + max(0.0, due_s - self._now_s) * self.slowdown
        if wall_s != self._next_wall_s:
            self._version += 1
            self._next_wall_s = wall_s
            self._clock.at(wall_s, self._wake, self._version)

    def _due_s(self) -> float:
        """When to look for what is due, in this time."""
        ring_s = self._alarms[0][0]
        return min(self._heap[0][0], ring_s) if self._heap else ring_s

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._next_wall_s = math.inf
        self._advance()
        self._now_s = max(self._now_s, self._due_s())  # rounding must not leave the one that is due
        while (due_s := self._due_s()) <= self._now_s:
            if self._heap and self._heap[0][0] <= due_s:
                _, _, action, argument = heapq.heappop(self._heap)
                action(argument)
            else:
                alarm = heapq.heappop(self._alarms)[2]
                if alarm.take(due_s):
                    alarm.ring()
        self.schedule()


class _SharedAlarm(Alarm):
    """Of a :class:`Cpu`: when that comes on the clock follows from what else runs."""

    __slots__ = ("_cpu",)

    def __init__(self, cpu: Cpu, queue: AlarmQueue, number: int, ring: Callable[[], None]) -> None:
        super().__init__(queue, number, ring)
        self._cpu = cpu

    def set(self, at_s: float) -> None:
        super().set(max(at_s, self._cpu.now_s))
        self._cpu.schedule()
