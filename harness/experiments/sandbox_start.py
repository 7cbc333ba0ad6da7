<<<<<<< HEAD
"""Start of the profile's sandboxes to their first finished command: alone, and many at once."""
=======
"""Start of the embedded sandbox to its first finished command: alone, and many at once, which is all the load there is.

Starts at once share the machine, so they are no independent measurements; their batches are.
"""
>>>>>>> origin/h/exp

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
<<<<<<< HEAD
        alone = _starts(lab.profile, concurrent=1)
        loaded = _starts(lab.profile, concurrent=CONCURRENT)
        (folder / "starts.json").write_text(json.dumps({"alone": alone, "loaded": loaded}))
=======
        alone = measure(lab.profile.sandbox_starts)
        loaded = measure(lab.profile.sandbox_starts, concurrent=CONCURRENT)
        starts = {"concurrent": CONCURRENT, "back_end": "bubblewrap", "alone": alone, "loaded": loaded}
        (folder / "starts.json").write_text(json.dumps(starts))
>>>>>>> origin/h/exp

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
<<<<<<< HEAD
            **_cpu(found["alone"]),
            "exec_median_ms": round(float(np.median(found["alone"]["exec_ms"])), 2),
            "back_end": _told(lab.profile.back_ends["sandbox"]),
=======
            "cpu_per_start_ms": {
                name: round(float(np.median(found[name]["start_cpu_ms"])), 2) for name in ("alone", "loaded")
            },
            "exec_median_ms": round(float(np.median(found["alone"]["exec_ms"])), 2),
            "starts_loaded": len(loaded),
            "interval": "Student's t over the batches, which are the independent units",
            "back_end": f"{found['back_end']} on this machine",
>>>>>>> origin/h/exp
        },
        figures={"sandbox_start": {"alone": alone.tolist(), f"{concurrent} at once": loaded.tolist()}},
    )


def _starts(profile: Profile, *, concurrent: int) -> dict[str, list[float]]:
    name = profile.back_ends["sandbox"]
    if name == "bubblewrap":
        return measure(profile.sandbox_starts, concurrent=concurrent)
    provider = make_provider(name, **load_config(sets=profile.settings).sandbox_options())
    return asyncio.run(measure_any(provider, profile.sandbox_starts, concurrent=concurrent))


def _cpu(found: dict[str, list[float]]) -> dict[str, float]:
    """Only where it can be told: of a daemon or a service it can't."""
    cpu_ms = found.get("start_cpu_ms")
    return {"cpu_per_start_ms": round(float(np.median(cpu_ms)), 2)} if cpu_ms else {}


def _told(name: str) -> str:
    return "bubblewrap on this machine; Docker and E2B are not measured here" if name == "bubblewrap" else name
