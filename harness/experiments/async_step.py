"""Step time and trainer wait: synchronous against asynchronous, from the same policy, tasks and seed.

What there is to wait for: the long tail of a policy that rambles without a cap, and sandboxes that take as long to
start as the reference's. Where the same cores roll out and train, that is all an asynchronous step can gain; on nodes
apart, training overlaps as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness import stats
from harness.claims import Measurement
from harness.experiments.runs import rambling, sources, step_seconds, steps
from harness.lab import Lab


def ratio(lab: Lab) -> Measurement:
    sandbox = lab.profile.fast_sandbox
    sync = rambling(lab, "step-sync", mode="sync", capped=False, sandbox=sandbox)
    free = rambling(lab, "step-async", mode="async", capped=False, sandbox=sandbox)
    lines = {"sync": steps(sync), "async": steps(free)}
    slow, fast = step_seconds(lines["sync"]), step_seconds(lines["async"])
    estimate = stats.median_ratio(slow, fast)
    return Measurement(
        estimate=estimate,
        unit="x (synchronous / asynchronous median step time)",
        holds=estimate.low > 1.0,
        detail={
            "sync": _told(lines["sync"]),
            "async": _told(lines["async"]),
            "policy": "the base policy, from which both runs start; no cap on the length of a trajectory",
            "sandbox": f"{lab.profile.throughput_note}; the fast one of the two",
            "left_out": "the first step of each run, which fills the pipeline",
        },
        sources=sources(sync) + sources(free),
        figures={"step_time": {"sync": slow.tolist(), "async": fast.tolist()}},
    )


def _told(lines: list[dict[str, Any]]) -> dict[str, float]:
    step_s = step_seconds(lines)
    wait_s = np.array([line["wait_s"] for line in lines[1:]])
    return {
        "steps": len(step_s),
        "median_step_s": round(float(np.median(step_s)), 3),
        "p95_step_s": round(float(np.quantile(step_s, 0.95)), 3),
        "wait_share": round(float(wait_s.sum() / step_s.sum()), 3),
    }
