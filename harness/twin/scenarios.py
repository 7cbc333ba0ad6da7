"""The reference scale as scenarios: the inputs of the calibration turned into what :mod:`simulate` runs."""

from __future__ import annotations

import math
from dataclasses import replace

from farm.config import parse_config
from farm.dispatch import EndlessPlan, PlanSpec
from farm.service import dispatch_policy
from farm.types import Limits, SamplingParams
from harness.twin.calibration import Inputs
from harness.twin.clock import Clock, Cpu
from harness.twin.roofline import Achieved, EngineSpeed, capacity_tokens, engine_speed
from harness.twin.sandbox import Cloud, Sandboxes, SharedHost
from harness.twin.scenario import Engines, Intervals, Scenario
from harness.twin.trainer import trainer_speed
from harness.twin.workload import HeavyTail, tasks
from trainer.group import BatchRules

TASKS = 400
GRADE_LIMIT_S, EPISODE_SLACK_S = 1800.0, 2100.0
START_SPREAD = 0.35
OVERCOMMIT = 1.5
"""Admission reserves a whole cap for each episode; few ever use it, so budgets may be promised this many times."""

_PAIR_90 = 1.6449 * math.sqrt(2.0)
"""The 90th percentile of ``|ln(a / b)|`` is this times sigma, for two log-normal attempts a, b with sigma each."""

# A day in virtual time need not look as often as a farm does.
_LONG_RUN = Intervals(tick_s=30.0, scale_s=5.0)
_PLACE_DELAY_S = 1.0


_EXTENSIVE = ("engines", "concurrent", "host_cores", "groups_per_step", "train_gpus")


def half(inputs: Inputs) -> Inputs:
    """Half of everything that there is several of: the same loads, so the same times, at half the price."""
    return inputs.given(**{name: inputs[name] / 2 for name in _EXTENSIVE})


def speed(inputs: Inputs) -> EngineSpeed:
    achieved = Achieved(
        bandwidth=inputs["bandwidth_share"],
        prefill_flops=inputs["prefill_share"],
        step_overhead_s=inputs["step_overhead_s"],
    )
    return engine_speed(inputs.shape, inputs.gpu, achieved)


def kv_tokens(inputs: Inputs) -> int:
    """Capacity of one engine."""
    return capacity_tokens(
        inputs.shape,
        inputs.gpu,
        memory_fraction=inputs["memory_fraction"],
        reserved_bytes=inputs["reserved_bytes"],
    )


def workload(inputs: Inputs) -> HeavyTail:
    return HeavyTail(
        turns_median=inputs["turns_median"],
        task_sigma=inputs["task_sigma"],
        attempt_sigma=math.log(inputs["attempt_spread"]) / _PAIR_90,
        prompt_tokens=inputs.count("prompt_tokens"),
        output_tokens=inputs["output_tokens"],
        output_sigma=inputs["output_sigma"],
        observation_tokens=inputs["observation_tokens"],
        observation_sigma=inputs["observation_sigma"],
        command_s=inputs["command_s"],
        command_sigma=inputs["command_sigma"],
        grade_s=inputs["grade_s"],
        grade_sigma=0.8,
        runaway=inputs["runaway"],
        pass_rate=inputs["pass_rate"],
        seed=inputs.seed,
    )


def limits(inputs: Inputs, *, capped: bool) -> Limits:
    """``capped`` False: only the model's context and a long wall limit end a trajectory."""
    whole = inputs.shape.context_length
    agent_s = inputs["agent_s" if capped else "uncapped_agent_s"]
    return Limits(
        max_turns=inputs.count("max_turns"),
        max_tokens_per_turn=inputs.count("turn_tokens") if capped else whole,
        max_context_tokens=inputs.count("cap_tokens") if capped else whole,
        tool_s=inputs["tool_s"],
        agent_s=agent_s,
        grade_s=GRADE_LIMIT_S,
        episode_s=agent_s + EPISODE_SLACK_S,
    )


def reference(
    inputs: Inputs,
    *,
    name: str,
    sandboxes: str = "cloud",
    capped: bool = True,
    guarded: bool = True,
    mode: str = "async",
    horizon_s: float = 7200.0,
    local_start_work_s: float | None = None,
) -> Scenario:
    """RL at the reference's scale, ``mode`` "async" or "sync". ``sandboxes``: "cloud", or "local" on the inference
    node's own processors, where one start is ``local_start_work_s`` of CPU work."""
    allowed = limits(inputs, capped=capped)
    size, per_step = inputs.count("group_size"), inputs.count("groups_per_step")
    config = parse_config(
        {
            "rollout": {
                "tasks": "swebench:twin",
                "group_size": size,
                "groups_per_step": per_step,
                "max_staleness": round(inputs["max_staleness"]),
                "mode": mode,
            },
            "limits": {"agent_s": allowed.agent_s, "episode_s": allowed.episode_s, "lease_s": allowed.episode_s + 30.0},
        },
        where="twin",
    )
    spec = PlanSpec(
        group_size=size,
        seed=inputs.seed,
        purpose="rl",
        sampling=SamplingParams(),
        limits=allowed,
    )
    local = sandboxes == "local"

    def make(clock: Clock, cpu: Cpu | None) -> Sandboxes:
        if cpu is None:
            return Cloud(
                clock=clock,
                start_s=inputs["cloud_start_s"],
                spread=START_SPREAD,
                round_trip_s=inputs["round_trip_s"],
                starts_per_s=20.0,
            )
        assert local_start_work_s is not None
        return SharedHost(
            clock=clock,
            cpu=cpu,
            start_work_s=local_start_work_s,
            spread=START_SPREAD,
            command_threads=inputs["command_threads"],
        )

    return Scenario(
        name=name,
        plan=EndlessPlan(tasks(TASKS), spec),
        workload=workload(inputs),
        policy=replace(dispatch_policy(config, consumed=True), place_delay_s=_PLACE_DELAY_S),
        slots=inputs.count("concurrent"),
        engines=Engines(
            count=inputs.count("engines"),
            speed=speed(inputs),
            capacity_tokens=kv_tokens(inputs),
            context_length=inputs.shape.context_length,
            max_running=1024,
            overcommit=OVERCOMMIT,
            load_s=inputs.shape.weight_bytes / inputs["push_bytes_per_s"],
        ),
        sandboxes=make,
        cores=inputs["host_cores"] if local else None,
        seal_age_s=config.log.seal_age_s,
        seal_rows=config.log.seal_rows,
        trainer=trainer_speed(
            inputs.shape,
            inputs.gpu,
            gpus=inputs.count("train_gpus"),
            utilisation=inputs["train_share"],
            fixed_s=inputs["train_fixed_s"],
            micro_batch_tokens=inputs.count("train_row_tokens"),
            save_s=inputs.shape.weight_bytes / inputs["push_bytes_per_s"],
        ),
        rules=BatchRules(
            groups_per_step=per_step,
            min_attempts=config.rollout.min_attempts,
            max_staleness=config.rollout.staleness,
            wait_for_all=mode == "sync",
        ),
        intervals=_LONG_RUN,
        guarded=guarded,
        fault_rate=inputs["infra_failures"],
        fault_seed=inputs.seed,
        horizon_s=horizon_s,
    )
