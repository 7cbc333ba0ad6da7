"""What a user asks before a run: how many engines and sandboxes, which cap, what will a step take and cost.

The twin simulates two hours of the set-up that is asked about, and longer (at most a day) while it has not made two
steps, with the reference's workload unless inputs are overridden; the answer adds what admission allows and where the
bottleneck is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from farm.errors import UsageError
from harness.twin import calibration, scenarios
from harness.twin.calibration import Inputs
from harness.twin.result import Result
from harness.twin.scenario import Scenario
from harness.twin.simulate import simulate

SANDBOXES: Mapping[str, float | None] = {"e2b": None, "docker": 2.5, "local": 0.011}
"""Kinds of sandboxes -> CPU seconds of one start on the shared host; None: the cloud's own machines.

``docker``: what makes the reported 11.7 s under load in the twin; ``local``: the embedded sandbox as measured here."""

_WARM_UP_S = 1_800.0
HORIZONS_S = (7_200.0, 28_800.0, 86_400.0)
"""Simulated seconds: each is tried until one holds enough steps."""

_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """``values``: other inputs by name. Prices are per hour, in any currency; None: cost is not asked for."""

    model: str
    gpu: str
    engines: int
    sandbox: str
    concurrency: int
    cap_tokens: int | None = None
    cores: float | None = None
    values: Mapping[str, float] | None = None
    gpu_hour: float | None = None
    sandbox_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``admitted``: episodes that admission lets in at once with every budget promised 1.5 times; ``cap_for_all``: the
    largest cap that the model has room for and at which it lets in all that were asked for. ``bottleneck`` is said in
    words. Costs are per step and per thousand trajectories, of engines, training GPUs and sandboxes. Of what did not
    happen within ``simulated_s`` the time is None."""

    capacity_tokens: int
    admitted: int
    cap_tokens: int
    cap_for_all: int
    in_flight: float
    per_hour: float
    trajectory_s: float | None
    step_s: float | None
    train_s: float | None
    start_s: float | None
    simulated_s: float
    engine_busy: float
    peak_use: float
    peak_queued: int
    engines_needed: int
    sandboxes: int
    bottleneck: str
    cost_step: float | None
    cost_thousand: float | None


def answer(question: Question) -> Answer:
    """Raises UsageError for what has no data sheet, an unknown input or an impossible number."""
    inputs = _inputs(question)
    start_work_s = SANDBOXES[question.sandbox]
    scenario = scenarios.reference(
        inputs,
        name="plan",
        sandboxes="cloud" if start_work_s is None else "local",
        local_start_work_s=start_work_s,
    )
    capacity, cap = scenario.engines.capacity_tokens, inputs.count("cap_tokens")
    if cap > min(capacity, inputs.shape.context_length):
        raise UsageError(
            f"--cap {cap}: one engine holds {capacity} tokens, and the model's context is "
            f"{inputs.shape.context_length}; lower the cap or take a larger GPU"
        )
    result = _simulated(scenario)
    span_s = result.ended_at_s - result.warm_up_s
    busy = sum(engine.busy_s for engine in result.engines) / (span_s * len(result.engines))
    admitted = question.engines * int(capacity * scenario.engines.overcommit // cap)
    in_flight = [count for _, count in result.in_flight]
    step_s, train_s = _known(result.step_s()), _median([step.train_s for step in result.steps])
    hourly = _hourly(question, inputs)
    per_hour = result.per_hour()
    return Answer(
        capacity_tokens=capacity,
        admitted=admitted,
        cap_tokens=cap,
        cap_for_all=min(
            int(capacity * scenario.engines.overcommit * question.engines / question.concurrency),
            capacity,
            inputs.shape.context_length,
        ),
        in_flight=sum(in_flight) / len(in_flight),
        per_hour=per_hour,
        trajectory_s=_known(result.trajectory_s()),
        step_s=step_s,
        train_s=train_s,
        start_s=_known(result.start_s()),
        simulated_s=result.ended_at_s,
        engine_busy=busy,
        peak_use=result.peak_use(),
        peak_queued=result.peak_queued(),
        engines_needed=max(1, math.ceil(question.concurrency * cap / (capacity * scenario.engines.overcommit))),
        sandboxes=question.concurrency,
        bottleneck=_bottleneck(question, inputs, admitted, step_s, train_s, per_hour),
        cost_step=None if hourly is None or step_s is None else hourly * step_s / 3600.0,
        cost_thousand=None if hourly is None or not per_hour else hourly * 1000.0 / per_hour,
    )


def _inputs(question: Question) -> Inputs:
    if question.sandbox not in SANDBOXES:
        raise UsageError(f"--sandbox {question.sandbox!r} is unknown; known: {', '.join(SANDBOXES)}")
    inputs = calibration.load().on(model=question.model, gpu=question.gpu)
    given: dict[str, float] = {"engines": question.engines, "concurrent": question.concurrency}
    if question.cap_tokens is not None:
        given["cap_tokens"] = question.cap_tokens
    if question.cores is not None:
        given["host_cores"] = question.cores
    for option, price in (("--gpu-hour", question.gpu_hour), ("--sandbox-hour", question.sandbox_hour)):
        if price is not None and not 0.0 <= price < math.inf:
            raise UsageError(f"{option} is {price:g}; must be a finite price of one for an hour, 0 or more")
    return inputs.asked(**{**given, **(question.values or {})})


def _simulated(scenario: Scenario) -> Result:
    """Over the first horizon that holds enough steps after the warm-up, else over the last."""
    for horizon_s in HORIZONS_S:
        result = simulate(replace(scenario, horizon_s=horizon_s), warm_up_s=_WARM_UP_S)
        if sum(step.ended_at_s >= _WARM_UP_S for step in result.steps) >= _STEPS:
            break
    return result


def _bottleneck(
    question: Question,
    inputs: Inputs,
    admitted: int,
    step_s: float | None,
    train_s: float | None,
    per_hour: float,
) -> str:
    if admitted < question.concurrency:
        return f"KV cache: admission lets in {admitted} of {question.concurrency}; add engines or lower the cap"
    if step_s and train_s and train_s > 0.8 * step_s:
        return "the trainer: rollouts wait for it; add training GPUs"
    if SANDBOXES[question.sandbox] is not None:
        work = inputs["command_threads"] * inputs["command_s"] * inputs["turns_median"]
        if per_hour / 3600.0 * work > 0.6 * inputs["host_cores"]:
            return f"the host's {inputs['host_cores']:.0f} cores: commands wait for each other; add hosts or use e2b"
    return "the agents themselves: commands, tests and generation; more in flight gives more per hour"


def _hourly(question: Question, inputs: Inputs) -> float | None:
    if question.gpu_hour is None and question.sandbox_hour is None:
        return None
    gpus = question.engines + inputs.count("train_gpus")
    return gpus * (question.gpu_hour or 0.0) + question.concurrency * (question.sandbox_hour or 0.0)


def _median(values: list[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
