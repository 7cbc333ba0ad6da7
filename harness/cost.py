"""What a run cost, per trajectory and per solved task, from the usage columns of its log."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.types import Failed, Graded, Trajectory

PRICES = Path(__file__).parent / "prices.toml"


def prices(path: Path = PRICES) -> dict[str, dict[str, dict[str, Any]]]:
    """Role ("sandbox") -> back end -> price and source."""
    with path.open("rb") as file:
        return tomllib.load(file)


def usd_per_s(sandbox: str, priced: Mapping[str, Any], config: Mapping[str, Any]) -> float | None:
    """The price of one sandbox of the run with ``config``; None where ``sandbox`` has no price, or ``config`` does not
    say how large its sandboxes are."""
    price = priced.get("sandbox", {}).get(sandbox)
    size = config.get(sandbox, {})
    if price is None or "vcpus" not in size:
        return None
    vcpus, gib = float(size["vcpus"]), size["memory_mb"] / 1024
    return float(price["usd_per_vcpu_s"] * vcpus + price["usd_per_gib_s"] * gib)


def cost(
    trajectories: Sequence[Trajectory], sandbox: str, priced: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Totals, and the same per trajectory and per solved task (attempts that passed; None when none did).

    ``cpu_s`` is what sandboxes and workers used; engines and the trainer serve all trajectories at once and are not
    in it. ``sandbox_s`` is the whole time of the attempts that landed. ``prompt_tokens`` leaves out those that came
    from an engine's prefix cache. ``usd``: :func:`usd_per_s` for what is paid for, :func:`paid_s`."""
    graded = [t for t in trajectories if isinstance(t.outcome, Graded)]
    solved = sum(t.outcome.evidence.resolved for t in graded if isinstance(t.outcome, Graded))
    price = usd_per_s(sandbox, priced, config)
    totals: dict[str, float | None] = {
        "cpu_s": sum(t.usage.sandbox_cpu_s + t.usage.worker_cpu_s for t in trajectories),
        "sandbox_s": sum(t.ended_at_s - t.started_at_s for t in trajectories),
        "prompt_tokens": sum(t.usage.prompt_tokens - t.usage.cached_tokens for t in trajectories),
        "output_tokens": sum(t.usage.output_tokens for t in trajectories),
        "usd": None if price is None else price * sum(map(paid_s, trajectories)),
    }
    return {
        "trajectories": len(trajectories),
        "graded": len(graded),
        "failed": sum(isinstance(t.outcome, Failed) for t in trajectories),
        "solved": solved,
        "sandbox": sandbox,
        "total": totals,
        "per_trajectory": _over(totals, len(trajectories)),
        "per_solved": _over(totals, solved),
    }


def paid_s(trajectory: Trajectory) -> float:
    """Seconds for which a sandbox of ``trajectory`` is paid for, from its creation to its end; an episode has one at a
    time. The attempt that landed had none while one was being started, which includes the wait for a place in the
    account. Attempts that an infrastructure failure ended before are paid for, too; of those no timeline is kept, so
    their whole time counts, and none of one that was still waiting for a place when its time was up."""
    landed = trajectory.ended_at_s - trajectory.started_at_s
    starting = sum(e.end_at_s - e.start_at_s for e in trajectory.timeline if e.name == "sandbox_start")
    before = sum(a.ended_at_s - a.started_at_s for a in trajectory.prior if a.kind != "account_wait")
    return landed - starting + before


def activity_s(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean seconds of a trajectory by what it was doing."""
    sums: dict[str, float] = {}
    for trajectory in trajectories:
        for event in trajectory.timeline:
            sums[event.name] = sums.get(event.name, 0.0) + event.end_at_s - event.start_at_s
    return {name: total / len(trajectories) for name, total in sums.items()}


def _over(totals: Mapping[str, float | None], count: int) -> dict[str, float | None]:
    return {name: None if total is None or not count else total / count for name, total in totals.items()}
