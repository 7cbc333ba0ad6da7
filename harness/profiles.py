"""How much of everything a profile measures, and on which back ends.

`quick` is for CI, `full` for the committed report; both run on the embedded default. `cluster` is the same experiments
on real SGLang engines, a GPU trainer, cloud or Docker sandboxes and SWE-bench Verified; the environment says where they
are, and :mod:`harness.back_ends` says what is missing before anything starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farm.errors import UsageError
from harness.provenance import ROOT

BASE_POLICY = ROOT / "datasets" / "micro" / "base-policy"

EMBEDDED: Mapping[str, str] = {
    "engine": "embedded",
    "sandbox": "bubblewrap",
    "trainer": "megatron on CPU",
    "tasks": "micro suite",
}
"""Role -> back end. The roles are those that claims name in ``back_ends``."""

# What the environment says for `cluster`.
ENGINES, SANDBOX, DATA, RL_TASKS, POLICY = (
    f"ROLLOUT_FARM_{name}" for name in ("ENGINES", "SANDBOX", "DATA", "RL_TASKS", "POLICY")
)
VERIFIED = "SWE-bench_Verified_test.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``expected_s`` are the stages' durations on two idle cores; they only feed the "time left" line.

    ``benchmark`` and ``training`` are task sources of ``farm``, ``policy`` is the model to start from, and ``settings``
    (``section.key=value``) choose the back ends named in ``back_ends``. ``*_groups`` are groups per step,
    ``tail_steps`` those of each run with a long tail of trajectories.
    ``capped`` and ``uncapped``: settings with the cap on a trajectory's length that is judged, and without;
    ``slow_sandbox`` and ``fast_sandbox``: the two back ends of the throughput comparison.
    ``left_out``: experiments (as claims name them) that are not run, each with why."""

    name: str
    workers: int
    attempts: int
    benchmark_tasks: int | None  # None: all
    demonstrations: int
    rl_steps: int
    rl_groups: int
    tail_steps: int
    tail_groups: int
    capped: tuple[str, ...]
    uncapped: tuple[str, ...]
    sandbox_starts: int
    throughput_tasks: int
    throughput_attempts: int
    throughput_slots: int  # of each worker
    slow_sandbox: tuple[str, ...]
    fast_sandbox: tuple[str, ...]
    thrash_timeout_s: float
    restart_steps: int
    infra_tasks: int
    made_tasks: int  # from real packages
    expected_s: dict[str, float]
    benchmark: str = "micro:benchmark"
    training: str = "micro:rl"
    policy: Path = BASE_POLICY
    settings: tuple[str, ...] = ()
    back_ends: Mapping[str, str] = field(default_factory=lambda: EMBEDDED)
    left_out: Mapping[str, str] = field(default_factory=dict)


# A turn of the micro policy is about eight tokens, so 64 of them fill its whole context of 512. The cap is where a cap
# is meant to be: above nearly all successes, of which the trained policy's 99th percentile was seen at 23 turns.
_PATIENT = ("limits.agent_s=240", "limits.episode_s=300")
_CAPPED = ("limits.max_turns=24", *_PATIENT)
_UNCAPPED = ("limits.max_turns=64", *_PATIENT)
_QUICK_S: dict[str, float] = {
    "eval": 10, "sft": 10, "rl": 20, "cap": 15, "infra": 10, "sandbox": 2, "throughput": 11, "kv": 21,
    "restart": 38, "disjoint": 1,
}  # fmt: skip
_FULL_S: dict[str, float] = {
    "eval": 40, "sft": 30, "rl": 520, "cap": 60, "step": 70, "infra": 40, "sandbox": 15, "throughput": 60, "kv": 45,
    "restart": 180, "disjoint": 5, "twin": 80, "twin-check": 40, "made": 10,
}  # fmt: skip

QUICK = Profile(
    name="quick",
    workers=1,
    attempts=1,
    benchmark_tasks=20,
    demonstrations=80,
    rl_steps=2,
    rl_groups=4,
    tail_steps=2,
    tail_groups=1,
    capped=_CAPPED,
    uncapped=_UNCAPPED,
    sandbox_starts=20,
    throughput_tasks=16,
    throughput_attempts=1,
    throughput_slots=16,
    slow_sandbox=("sandbox.start_delay_s=1.17",),  # a tenth of the reference's start latencies
    fast_sandbox=("sandbox.start_delay_s=0.19",),
    thrash_timeout_s=3.0,
    restart_steps=8,
    infra_tasks=20,
    made_tasks=4,
    expected_s=_QUICK_S,
    left_out={
        "async_step.ratio": "a quick run has too few steps to tell how they vary",
        "cap.harmless": "a quick run has too few tasks to tell five points",
        "real_packages.rates": "not measured: a quick run has no time to fetch packages",
        "twin_check.within": "a quick run is too short to predict",
    },
)
FULL = Profile(
    name="full",
    workers=2,
    attempts=4,
    benchmark_tasks=None,
    demonstrations=600,
    rl_steps=40,
    rl_groups=16,
    tail_steps=14,
    tail_groups=2,
    capped=_CAPPED,
    uncapped=_UNCAPPED,
    sandbox_starts=100,
    throughput_tasks=32,
    throughput_attempts=2,
    throughput_slots=16,
    slow_sandbox=("sandbox.start_delay_s=11.7",),  # the reference's start latencies
    fast_sandbox=("sandbox.start_delay_s=1.9",),
    thrash_timeout_s=8.0,
    restart_steps=145,
    infra_tasks=100,
    made_tasks=20,
    expected_s=_FULL_S,
)


def cluster(environment: Mapping[str, str]) -> Profile:
    """The reference's sizes (100 tasks, 4 attempts, 145 steps) on the back ends that ``environment`` names.

    What it does not name stays empty here; :func:`harness.back_ends.missing` tells the user."""
    urls = [url.strip() for url in environment.get(ENGINES, "").split(",") if url.strip()]
    sandbox = environment.get(SANDBOX, "")
    return Profile(
        name="cluster",
        workers=2,
        attempts=4,
        benchmark_tasks=100,
        demonstrations=600,
        rl_steps=145,
        rl_groups=16,
        tail_steps=10,
        tail_groups=16,
        capped=(),  # farm's own for SWE-bench rows: 100 turns, 32k tokens
        uncapped=("limits.max_turns=1000", "limits.max_context_tokens=262144", "engine.context_length=262144"),
        sandbox_starts=384,
        throughput_tasks=100,
        throughput_attempts=8,
        throughput_slots=192,
        slow_sandbox=("sandbox.provider=docker",),
        fast_sandbox=(f"sandbox.provider={sandbox}",),
        thrash_timeout_s=600.0,
        restart_steps=145,
        infra_tasks=100,
        made_tasks=100,
        expected_s={
            "eval": 3_600,
            "sft": 7_200,
            "rl": 145 * 300,
            "cap": 10 * 850,
            "step": 10 * 850,
            "infra": 3_600,
            "sandbox": 600,
            "throughput": 3_600,
            "kv": 3_600,
            "restart": 145 * 60,
        },
        benchmark=f"swebench:{Path(environment.get(DATA, '')) / VERIFIED}",
        training=environment.get(RL_TASKS, ""),
        policy=Path(environment.get(POLICY, "")),
        settings=("engine.kind=sglang", f"engine.urls={json.dumps(urls)}", f"sandbox.provider={sandbox}"),
        back_ends={
            "engine": "sglang",
            "sandbox": sandbox or "unset",
            "trainer": "megatron on GPUs",
            "tasks": "SWE-bench Verified",
        },
    )


def profile(name: str) -> Profile:
    """Raises UsageError on an unknown name."""
    match name:
        case "quick":
            return QUICK
        case "full":
            return FULL
        case "cluster":
            return cluster(os.environ)
    raise UsageError(f"profile {name!r} is unknown; known: quick, full, cluster")
