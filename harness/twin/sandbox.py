"""Models of sandboxes: machines of a cloud, or containers that share the CPUs of one host.

A cloud gives every sandbox its own CPUs: a start takes what it takes (log-normal around its median), held back by a
limit on creations per second, and every command has a round trip. On a shared host starts and commands are work for the
same cores; how long they take follows from how many run at once (:class:`harness.twin.clock.Cpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from harness.twin.clock import Clock, Cpu

Action = Callable[[Any], None]


class Sandboxes(Protocol):
    def start(self, chance: float, action: Action, argument: Any) -> None:
        """Start a sandbox, then ``action(argument)``. ``chance`` is standard normal: how unlucky this start is."""
        ...

    def run(self, work_s: float, action: Action, argument: Any) -> None:
        """Run a command that takes ``work_s`` on an idle machine."""
        ...


@dataclass(slots=True, kw_only=True)
class Cloud:
    """``starts_per_s``: the provider's limit on creations. ``spread``: sigma of the log of the start time."""

    clock: Clock
    start_s: float
    spread: float
    round_trip_s: float
    starts_per_s: float
    _free_at_s: float = 0.0

    def start(self, chance: float, action: Action, argument: Any) -> None:
        created_s = max(self.clock.now_s, self._free_at_s)
        self._free_at_s = created_s + 1.0 / self.starts_per_s
        self.clock.at(created_s + self.start_s * _factor(self.spread, chance), action, argument)

    def run(self, work_s: float, action: Action, argument: Any) -> None:
        self.clock.at(self.clock.now_s + self.round_trip_s + work_s, action, argument)


@dataclass(slots=True, kw_only=True)
class SharedHost:
    """``start_work_s``: CPU seconds of one start; ``command_threads``: how many cores a command uses when it can;
    ``round_trip_s``: what a command takes beside its work."""

    clock: Clock
    cpu: Cpu
    start_work_s: float
    spread: float
    command_threads: float
    round_trip_s: float = 0.0

    def start(self, chance: float, action: Action, argument: Any) -> None:
        self.cpu.run_job(self.start_work_s * _factor(self.spread, chance), action, argument)

    def run(self, work_s: float, action: Action, argument: Any) -> None:
        job = (work_s * self.command_threads, action, argument)
        if self.round_trip_s:
            self.clock.at(self.clock.now_s + self.round_trip_s, self._work, job)
        else:
            self._work(job)

    def _work(self, job: tuple[float, Action, Any]) -> None:
        work_s, action, argument = job
        self.cpu.run_job(work_s, action, argument, threads=self.command_threads)


def _factor(spread: float, chance: float) -> float:
    return float(2.718281828459045 ** (spread * chance))
