"""Start of the profile's sandboxes to their first finished command: alone, and many at once, which is all the load.

Starts at once share the machine, so they are no independent measurements; their batches are.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np

from farm.config import load_config
from farm.sandbox import make_provider
from farm.sandbox.bench import measure, measure_any
from harness import stats
from harness.claims import Measurement
from harness.lab import Lab
from harness.profiles import Profile

REPORTED_S = 1.9
CONCURRENT = 16


def median(lab: Lab) -> Measurement:
    def work(folder: Path) -> None:
        name = lab.profile.back_ends["sandbox"]
        alone = _starts(lab.profile, name, concurrent=1)
        loaded = _starts(lab.profile, name, concurrent=CONCURRENT)
        starts = {"concurrent": CONCURRENT, "back_end": name, "alone": alone, "loaded": loaded}
        (folder / "starts.json").write_text(json.dumps(starts))

    found = json.loads((lab.stage("sandbox", work) / "starts.json").read_text())
    alone, loaded = np.array(found["alone"]["start_ms"]), np.array(found["loaded"]["start_ms"])
    concurrent = found["concurrent"]
    estimate = stats.mean(np.median(loaded.reshape(-1, concurrent), axis=1) / 1e3)
    return Measurement(
        estimate=estimate,
        unit=f"s (median of {concurrent} starts at once, mean over the batches)",
        holds=estimate.high < REPORTED_S,
        detail={
            "alone_median_ms": round(float(np.median(alone)), 1),
            "alone_p95_ms": round(float(np.quantile(alone, 0.95)), 1),
            "loaded_p95_ms": round(float(np.quantile(loaded, 0.95)), 1),
            "cpu_per_start_ms": {name: _cpu_ms(found[name]) for name in ("alone", "loaded")},
            "exec_median_ms": round(float(np.median(found["alone"]["exec_ms"])), 2),
            "starts_loaded": len(loaded),
            "interval": "Student's t over the batches, which are the independent units",
            "back_end": f"{found['back_end']} on this machine" if found["back_end"] != "e2b" else "e2b",
        },
        figures={"sandbox_start": {"alone": alone.tolist(), f"{concurrent} at once": loaded.tolist()}},
    )


def _starts(profile: Profile, name: str, *, concurrent: int) -> dict[str, list[float]]:
    if name == "bubblewrap":
        return measure(profile.sandbox_starts, concurrent=concurrent)
    provider = make_provider(name, **load_config(sets=profile.settings).sandbox_options())
    return asyncio.run(measure_any(provider, profile.sandbox_starts, concurrent=concurrent))


def _cpu_ms(found: dict[str, list[float]]) -> float | None:
    """Median of a start; None where it can't be told: of a daemon or a service."""
    cpu_ms = found.get("start_cpu_ms")
    return round(float(np.median(cpu_ms)), 2) if cpu_ms else None
