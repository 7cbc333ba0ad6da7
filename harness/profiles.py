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
    (``section.key=value``) choose the back ends named in ``back_ends``."""

    name: str
    attempts: int
    benchmark_tasks: int | None  # None: all
    rl_steps: int
    compare_steps: int
    sandbox_starts: int
    infra_tasks: int
    expected_s: dict[str, float]
    benchmark: str = "micro:benchmark"
    training: str = "micro:rl"
    policy: Path = BASE_POLICY
    settings: tuple[str, ...] = ()
    back_ends: Mapping[str, str] = field(default_factory=lambda: EMBEDDED)


QUICK = Profile(
    name="quick",
    attempts=1,
    benchmark_tasks=20,
    rl_steps=2,
    compare_steps=2,
    sandbox_starts=20,
    infra_tasks=20,
    expected_s={"eval": 15, "sft": 30, "rl": 45, "compare": 45, "infra": 15, "sandbox": 10, "disjoint": 5},
)
FULL = Profile(
    name="full",
    attempts=4,
    benchmark_tasks=None,
    rl_steps=40,
    compare_steps=6,
    sandbox_starts=100,
    infra_tasks=100,
    expected_s={"eval": 35, "sft": 30, "rl": 480, "compare": 90, "infra": 35, "sandbox": 15, "disjoint": 5},
)


def cluster(environment: Mapping[str, str]) -> Profile:
    """The reference's sizes (100 tasks, 4 attempts, 145 steps) on the back ends that ``environment`` names.

    What it does not name stays empty here; :func:`harness.back_ends.missing` tells the user."""
    urls = [url.strip() for url in environment.get(ENGINES, "").split(",") if url.strip()]
    sandbox = environment.get(SANDBOX, "")
    return Profile(
        name="cluster",
        attempts=4,
        benchmark_tasks=100,
        rl_steps=145,
        compare_steps=20,
        sandbox_starts=384,
        infra_tasks=100,
        expected_s={"eval": 3_600, "sft": 7_200, "rl": 145 * 300, "compare": 20 * 300, "infra": 3_600, "sandbox": 600},
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
