"""The twin against reality: the embedded run on this machine, predicted from measured constants.

In go the speeds of the parts (``make bench``), what commands cost in CPU, the CPU of driver and workers, how long
publishing takes, and what each episode did. Out come throughput and step time, which are compared with the run's own;
they are one figure, for a step takes as many groups as any other. Beside them stands the share of a step that the
trainer waits, which is a figure of its own and is not judged: all that runs shares the cores evenly in the twin, which
stretches the training far more than the operating system does, at the same work in all.
One constant can't be read off any counter: the CPU that farm, workers and operating system spend around a turn. It is
fitted on another run (an evaluation, where nobody trains), never on the one that is predicted. It is taken by the turn,
not by the attempt: requests, observations and rows grow with the turns, and two policies whose episodes differ in
length gave the same figure by the turn.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from farm.config import FarmConfig, parse_config
from farm.engine.bench import BenchShape
from farm.errors import UsageError
from farm.service import dispatch_policy
from farm.types import Trajectory
from harness.experiments.runs import landed, steps
from harness.twin.clock import Clock, Cpu
from harness.twin.recorded import CommandCost, Recorded, RecordedPlan, command_cost
from harness.twin.result import Result
from harness.twin.roofline import EngineSpeed
from harness.twin.sandbox import Sandboxes, SharedHost
from harness.twin.scenario import Engines, Overheads, Scenario
from harness.twin.simulate import simulate
from harness.twin.trainer import TrainerSpeed
from trainer.config import TrainerConfig, batch_rules

WITHIN = 0.15
_FIT_TRIES = 8
_FIT_PRECISION = 0.01
_MAX_BATCH = 256
_CONCURRENCIES = (1, 8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured of the parts on this machine, in CPU seconds."""

    cores: float
    engine: EngineSpeed
    start_work_s: float
    command_overhead_s: float
    trainer_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One predicted figure beside the measured one; ``error`` is predicted over measured, less 1."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """``holds``: every figure of ``checks`` is within 15 %; ``beside`` is told and not judged. ``overhead_cpu_s``: the
    fitted constant, for one turn."""

    checks: tuple[Check, ...]
    beside: tuple[Check, ...] = ()
    overhead_cpu_s: float
    fitted_on: str

    @property
    def holds(self) -> bool:
        return all(abs(check.error) <= WITHIN for check in self.checks)


def validate(
    run: Path, bench: Mapping[str, Mapping[str, Any]], *, fit_on: Path, cores: float, workers: int = 2
) -> Validation:
    """Predict the training run in folder ``run``. ``bench``: what ``make bench`` wrote; ``fit_on``: the folder of a
    rollout-only run on the same machine. Raises UsageError when one of them lacks what is needed."""
    machine = _machine(bench, cores)
    trajectories, lines = landed(run), steps(run)
    if len(lines) < 3:
        raise UsageError(f"{run}: {len(lines)} trained steps; at least 3 are needed to compare step times")
    overhead_s = _fit(fit_on, machine, workers)
    scenario = _scenario(run, trajectories, machine, overhead_s, workers, lines=lines)
    result = simulate(scenario)
    # The first step of a run fills the pipeline.
    measured_step_s = statistics.median(line["wait_s"] + line["train_s"] for line in lines[1:])
    predicted_step_s = statistics.median(step.step_s for step in result.steps[1:])
    return Validation(
        checks=(
            Check(
                name="throughput",
                unit="1/s",
                predicted=_rate(result, lines),
                measured=_measured_rate(trajectories, lines),
            ),
            Check(name="step time", unit="s", predicted=predicted_step_s, measured=measured_step_s),
        ),
        beside=(
            Check(
                name="wait share",
                unit="of the step time",
                predicted=wait_share([(step.wait_s, step.train_s) for step in result.steps]),
                measured=wait_share([(line["wait_s"], line["train_s"]) for line in lines]),
            ),
        ),
        overhead_cpu_s=overhead_s,
        fitted_on=fit_on.name,
    )


def wait_share(steps: Sequence[tuple[float, float]]) -> float:
    """The share of all steps but the first that the trainer waited, from (wait, training) of each."""
    waited_s, trained_s = (math.fsum(part) for part in zip(*steps[1:], strict=True))
    return waited_s / (waited_s + trained_s)


def engine_speed(bench: Mapping[str, Mapping[str, Any]], shape: BenchShape) -> EngineSpeed:
    """The embedded engine's step, from its throughput at several concurrencies: ``a + b * tokens of the step``.

    A prompt token costs what a sampled one does, and joins the same step. Least squares on relative errors over the
    time of one turn of all episodes: ``turn_tokens * a + concurrency * (turn_tokens + new prompt tokens) * b``."""
    new = (shape.prompt_tokens + (shape.turns - 1) * (shape.observation_tokens + 1)) / shape.turns
    rows, times = [], []
    for concurrency in _CONCURRENCIES:
        rate = _figure(bench, f"engine.output_tokens_per_s.c{concurrency}")
        taken_s = shape.turn_tokens * concurrency / rate
        rows.append([shape.turn_tokens / taken_s, concurrency * (shape.turn_tokens + new) / taken_s])
        times.append(1.0)
    (step_s, token_s), *_ = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)
    return EngineSpeed(
        step_s=(0.0, *(float(step_s + token_s * batch) for batch in range(1, _MAX_BATCH + 1))),
        kv_token_s=0.0,
        prefill_chunk_s=0.0,
        prefill_token_s=float(token_s),
        prefill_pair_s=0.0,
        prefill_floor_s=0.0,
    )


def _machine(bench: Mapping[str, Mapping[str, Any]], cores: float) -> Machine:
    return Machine(
        cores=cores,
        engine=engine_speed(bench, BenchShape()),
        start_work_s=_figure(bench, "sandbox.start_cpu_ms") / 1e3,
        command_overhead_s=_figure(bench, "sandbox.exec_ms") / 1e3,
        trainer_token_s=1.0 / _figure(bench, "trainer.tokens_per_s"),
    )


def _figure(bench: Mapping[str, Mapping[str, Any]], name: str) -> float:
    try:
        return float(bench[name]["median"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"the bench figures have no {name}; run `make bench` to write build/bench.json") from None


def _fit(run: Path, machine: Machine, workers: int) -> float:
    """CPU around one turn, such that the twin takes as long as the rollout-only run did."""
    trajectories = landed(run)
    if not trajectories:
        raise UsageError(f"{run}: no trajectory has landed, so nothing can be fitted on it")
    measured_s = max(t.ended_at_s for t in trajectories) - min(t.started_at_s for t in trajectories)
    turns = sum(len(t.turns) for t in trajectories)
    low, high = 0.0, 4.0 * machine.cores * measured_s / max(1, turns)
    overhead_s = high / 8
    for _ in range(_FIT_TRIES):
        result = simulate(_scenario(run, trajectories, machine, overhead_s, workers, lines=None))
        factor = result.ended_at_s / measured_s
        if abs(factor - 1.0) < _FIT_PRECISION:
            break
        low, high = (overhead_s, high) if factor < 1.0 else (low, overhead_s)
        overhead_s = (low + high) / 2
    return overhead_s


def _scenario(
    run: Path,
    trajectories: Sequence[Trajectory],
    machine: Machine,
    overhead_s: float,
    workers: int,
    *,
    lines: Sequence[Mapping[str, Any]] | None,
) -> Scenario:
    """The run as it was; ``lines`` None: nobody trains, and every recorded group runs once."""
    config = _config(run)
    trained = lines is not None
    plan = RecordedPlan(trajectories, config.limits.limits, repeat=trained)
    cost = command_cost(trajectories)

    def make(clock: Clock, cpu: Cpu | None) -> Sandboxes:
        assert cpu is not None
        return SharedHost(clock=clock, cpu=cpu, start_work_s=machine.start_work_s, spread=0.0, command_threads=1.0)

    return Scenario(
        name=run.parent.name,
        plan=plan,
        workload=_workload(plan, cost, machine),
        policy=dispatch_policy(config, consumed=trained),
        slots=config.cluster.slots * workers,
        engines=Engines(
            count=config.engine.count,
            speed=machine.engine,
            capacity_tokens=config.engine.max_total_tokens,
            context_length=config.engine.context_length,
            max_running=config.engine.max_running_requests,
            overcommit=config.engine.overcommit,
            load_s=0.03,
            shared_cpu=True,
        ),
        sandboxes=make,
        cores=machine.cores,
        seal_age_s=config.log.seal_age_s,
        seal_rows=config.log.seal_rows,
        trainer=_trainer(lines, machine) if lines is not None else None,
        rules=batch_rules(json.loads((run / "config.json").read_text()), where=str(run)) if trained else None,
        overheads=Overheads(turn_cpu_s=overhead_s),
        horizon_s=1e6,
        stop_after_steps=len(lines) if lines is not None else None,
    )


def _workload(plan: RecordedPlan, cost: CommandCost, machine: Machine) -> Recorded:
    return Recorded(plan.recorded, cost, machine.command_overhead_s)


def _trainer(lines: Sequence[Mapping[str, Any]], machine: Machine) -> TrainerSpeed:
    return TrainerSpeed(
        token_s=machine.trainer_token_s,
        pair_s=0.0,
        fixed_s=0.0,
        micro_batch_tokens=TrainerConfig().micro_batch_tokens,
        save_s=statistics.median(line["checkpoint_s"] + line["publish_s"] for line in lines),
    )


def _config(run: Path) -> FarmConfig:
    data = json.loads((run / "config.json").read_text())
    return parse_config(data, where=str(run / "config.json"))


def _rate(result: Result, lines: Sequence[Mapping[str, Any]]) -> float:
    """Graded trajectories per second, from the end of the first step to the end of the last."""
    first, last = result.steps[0].ended_at_s, result.steps[len(lines) - 1].ended_at_s
    return sum(first < landing.at_s <= last for landing in result.landings) / (last - first)


def _measured_rate(trajectories: Sequence[Trajectory], lines: Sequence[Mapping[str, Any]]) -> float:
    first, last = lines[0]["ended_at_s"], lines[-1]["ended_at_s"]
    return float(sum(first < t.ended_at_s <= last for t in trajectories) / (last - first))
