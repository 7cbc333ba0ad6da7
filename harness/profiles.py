"""How much of everything a profile measures. `quick` is for CI, `full` for the committed report."""

from __future__ import annotations

from dataclasses import dataclass

from farm.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``expected_s`` are the stages' durations on two idle cores; they only feed the "time left" line."""

    name: str
    attempts: int
    benchmark_tasks: int | None  # None: all
    rl_steps: int
    compare_steps: int
    sandbox_starts: int
    infra_tasks: int
    expected_s: dict[str, float]


PROFILES = {
    "quick": Profile(
        name="quick",
        attempts=1,
        benchmark_tasks=20,
        rl_steps=2,
        compare_steps=2,
        sandbox_starts=20,
        infra_tasks=20,
        expected_s={"eval": 15, "sft": 30, "rl": 45, "compare": 45, "infra": 15, "sandbox": 10},
    ),
    "full": Profile(
        name="full",
        attempts=4,
        benchmark_tasks=None,
        rl_steps=40,
        compare_steps=6,
        sandbox_starts=100,
        infra_tasks=100,
        expected_s={"eval": 35, "sft": 30, "rl": 480, "compare": 90, "infra": 35, "sandbox": 15},
    ),
}


def profile(name: str) -> Profile:
    """Raises UsageError on an unknown name."""
    if name not in PROFILES:
        raise UsageError(f"profile {name!r} is unknown; known: {', '.join(PROFILES)}")
    return PROFILES[name]
