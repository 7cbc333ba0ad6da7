"""Start of the profile's sandboxes to their first finished command: alone, and many at once, which is all the load.

Starts at once share the machine, so they are no independent measurements; their batches are. Where Docker runs our
sandboxes too, the same is measured of it and stands beside: the reference's slow back end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from farm.config import load_config
from farm.sandbox import make_provider
from farm.sandbox.bench import measure, measure_any
from harness import stats
from harness.claims import Measurement
from harness.docker_here import PROVIDER, docker_problem
from harness.lab import Lab
from harness.profiles import Profile

REPORTED_S = 1.9
CONCURRENT = 16
DOCKER_STAGE = "sandbox-docker"


def median(lab: Lab) -> Measurement:
    name = lab.profile.back_ends["sandbox"]
    own = _measured(lab, "sandbox", name, lab.profile.sandbox_starts)
    alone, loaded = np.array(own["alone"]["start_ms"]), np.array(own["loaded"]["start_ms"])
    concurrent = own["concurrent"]
    estimate = _under_load(own)
    detail = {
        "alone_median_ms": round(float(np.median(alone)), 1),
        "alone_p95_ms": round(float(np.quantile(alone, 0.95)), 1),
        "loaded_p95_ms": round(float(np.quantile(loaded, 0.95)), 1),
        "cpu_per_start_ms": {name: _cpu_ms(own[name]) for name in ("alone", "loaded")},
        "exec_median_ms": round(float(np.median(own["alone"]["exec_ms"])), 2),
        "starts_loaded": len(loaded),
        "interval": "Student's t over the batches, which are the independent units",
        "back_end": f"{own['back_end']} on this machine" if own["back_end"] != "e2b" else "e2b",
    }
    figure = {"alone": alone.tolist(), f"{concurrent} at once": loaded.tolist()}
    if _docker_runs(lab, name):
        # Containers are slow to start: fewer of them do, in two batches or more.
        docker = _measured(lab, DOCKER_STAGE, PROVIDER, max(lab.profile.sandbox_starts // 2, CONCURRENT + 1))
        slow = _under_load(docker)
        detail["docker_on_this_machine"] = {
            "loaded_median_s": round(slow.value, 3),
            "low": round(slow.low, 3),
            "high": round(slow.high, 3),
            "alone_median_ms": round(float(np.median(docker["alone"]["start_ms"])), 1),
            "starts_loaded": len(docker["loaded"]["start_ms"]),
            "times_slower": round(slow.value / estimate.value, 1),
        }
        figure[f"Docker, {docker['concurrent']} at once"] = docker["loaded"]["start_ms"]
    return Measurement(
        estimate=estimate,
        unit=f"s (median of {concurrent} starts at once, mean over the batches)",
        holds=estimate.high < REPORTED_S,
        detail=detail,
        figures={"sandbox_start": figure},
    )


def _docker_runs(lab: Lab, own: str) -> bool:
    """Whether there is Docker to compare with. Of an archive its logs say so."""
    if lab.archive:
        return lab.has(DOCKER_STAGE)
    return own != PROVIDER and not docker_problem()


def _measured(lab: Lab, stage: str, name: str, count: int) -> dict[str, Any]:
    """At least ``count`` starts of the sandboxes ``name`` alone, and as many at once."""

    def work(folder: Path) -> None:
        alone = _starts(lab.profile, name, count, concurrent=1)
        loaded = _starts(lab.profile, name, count, concurrent=CONCURRENT)
        starts = {"concurrent": CONCURRENT, "back_end": name, "alone": alone, "loaded": loaded}
        (folder / "starts.json").write_text(json.dumps(starts))

    found: dict[str, Any] = json.loads((lab.stage(stage, work) / "starts.json").read_text())
    return found


def _under_load(found: Mapping[str, Any]) -> stats.Estimate:
    batches = np.array(found["loaded"]["start_ms"]).reshape(-1, found["concurrent"])
    return stats.mean(np.median(batches, axis=1) / 1e3)


def _starts(profile: Profile, name: str, count: int, *, concurrent: int) -> dict[str, list[float]]:
    if name == "bubblewrap":
        return measure(count, concurrent=concurrent)
    config = load_config(sets=(*profile.settings, f"sandbox.provider={name}"))
    provider = make_provider(name, **config.sandbox_options())

    async def starts() -> dict[str, list[float]]:
        await measure_any(provider, 1)  # what the first one makes ready
        return await measure_any(provider, count, concurrent=concurrent)

    return asyncio.run(starts())


def _cpu_ms(found: dict[str, list[float]]) -> float | None:
    """Median of a start; None where it can't be told: of a daemon or a service."""
    cpu_ms = found.get("start_cpu_ms")
    return round(float(np.median(cpu_ms)), 2) if cpu_ms else None
