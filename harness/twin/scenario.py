"""What is simulated: one record with everything a run of the twin depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farm.dispatch import DispatchPolicy, Plan
from harness.twin.clock import Clock, Cpu
from harness.twin.roofline import EngineSpeed
from harness.twin.sandbox import Sandboxes
from harness.twin.trainer import TrainerSpeed
from harness.twin.workload import Workload
from trainer.group import BatchRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """``shared_cpu``: the engine runs on the CPUs that the sandboxes share (the embedded one, which also copies what
    requests have in common instead of sharing it)."""

    count: int
    speed: EngineSpeed
    capacity_tokens: int
    context_length: int
    max_running: int
    overcommit: float
    load_s: float
    shared_cpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """``turn_cpu_s``: CPU seconds on the shared host around one turn, beside engine, sandboxes and trainer; zero at a
    scale where it does not matter."""

    turn_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """How often the driver looks, in seconds; the farm's own figures unless a long simulation takes larger ones."""

    tick_s: float = 0.25
    scale_s: float = 0.5
    seal_check_s: float = 0.2
    poll_s: float = 0.05  # trainer, policy log


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``guarded`` False takes away what the farm does against a full cache (admission by budget, fewer episodes in
    flight), as in a system without. ``trainer`` None: nobody consumes (evaluation)."""

    name: str
    plan: Plan
    workload: Workload
    policy: DispatchPolicy
    slots: int
    engines: Engines
    sandboxes: Callable[[Clock, Cpu | None], Sandboxes]
    cores: float | None  # of the shared host; None: nothing is shared
    seal_age_s: float
    seal_rows: int
    trainer: TrainerSpeed | None
    rules: BatchRules | None
    overheads: Overheads = Overheads()
    intervals: Intervals = Intervals()
    guarded: bool = True
    fault_rate: float = 0.0
    fault_seed: int = 0
    horizon_s: float = 3600.0
    stop_after_steps: int | None = None
