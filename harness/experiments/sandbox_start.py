"""Start of the embedded sandbox to its first finished command: alone, and with a load of busy sandboxes beside it."""

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
        (folder / "starts.json").write_text(json.dumps({"alone": alone, "loaded": loaded}))

    found = json.loads((lab.stage("sandbox", work) / "starts.json").read_text())
    alone, loaded = np.array(found["alone"]["start_ms"]), np.array(found["loaded"]["start_ms"])
    estimate = stats.median(loaded / 1e3)
    return Measurement(
        estimate=estimate,
        unit=f"s (median, {CONCURRENT} starts at once)",
        holds=estimate.high < REPORTED_S,
        detail={
            "alone_median_ms": round(float(np.median(alone)), 1),
            "alone_p95_ms": round(float(np.quantile(alone, 0.95)), 1),
            "loaded_p95_ms": round(float(np.quantile(loaded, 0.95)), 1),
            "cpu_per_start_ms": round(float(np.median(found["alone"]["start_cpu_ms"])), 2),
            "exec_median_ms": round(float(np.median(found["alone"]["exec_ms"])), 2),
            "back_end": "bubblewrap on this machine; Docker and E2B are not measured here",
        },
        figures={"sandbox_start": {"alone": alone.tolist(), f"{CONCURRENT} at once": loaded.tolist()}},
    )
