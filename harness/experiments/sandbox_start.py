"""Start of the embedded sandbox to its first finished command: alone, and many at once, which is all the load there is.

Starts at once share the machine, so they are no independent measurements; their batches are.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from farm.sandbox.bench import measure
from harness import stats
from harness.claims import Measurement
from harness.lab import Lab

REPORTED_S = 1.9
CONCURRENT = 16


def median(lab: Lab) -> Measurement:
    def work(folder: Path) -> None:
        alone = measure(lab.profile.sandbox_starts)
        loaded = measure(lab.profile.sandbox_starts, concurrent=CONCURRENT)
        starts = {"concurrent": CONCURRENT, "back_end": "bubblewrap", "alone": alone, "loaded": loaded}
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
            "cpu_per_start_ms": {
                name: round(float(np.median(found[name]["start_cpu_ms"])), 2) for name in ("alone", "loaded")
            },
            "exec_median_ms": round(float(np.median(found["alone"]["exec_ms"])), 2),
            "starts_loaded": len(loaded),
            "interval": "Student's t over the batches, which are the independent units",
            "back_end": f"{found['back_end']} on this machine",
        },
        figures={"sandbox_start": {"alone": alone.tolist(), f"{concurrent} at once": loaded.tolist()}},
    )
