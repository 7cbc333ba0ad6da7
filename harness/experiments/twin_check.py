"""The twin against reality: the training run of this machine, predicted from the measured speed of its parts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import bench
from harness.claims import Measurement
from harness.experiments.runs import embedded_only, sources
from harness.lab import Lab
from harness.stats import Estimate

WITHIN_PERCENT = 15.0
PARTS = ("sandbox", "engine", "trainer")


def within(lab: Lab) -> Measurement:
    if elsewhere := embedded_only(lab, "engine"):
        return elsewhere
    run, fit_on = lab.rl(), lab.evaluate("base", lab.profile.policy)

    def work(folder: Path) -> None:
        from harness.twin import embedded

        figures = {name: figure for part in PARTS for name, figure in bench.PARTS[part]().items()}
        (folder / "bench.json").write_text(json.dumps(figures))
        found = embedded.validate(run, figures, fit_on=fit_on, cores=os.cpu_count() or 1)
        (folder / "check.json").write_text(json.dumps(asdict(found)))

    found = json.loads((lab.stage("twin-check", work) / "check.json").read_text())
    largest = max(abs(_error_percent(check)) for check in found["checks"])
    return Measurement(
        # One figure: a step takes as many groups as any other, so throughput is their number over the step time.
        estimate=Estimate(value=largest, low=largest, high=largest, n=1),
        unit="% (the larger error of throughput and step time, which are one figure)",
        holds=largest <= WITHIN_PERCENT,
        detail={
            "figures": _told(found["checks"]),
            "not_judged": _told(found["beside"])
            | {"why": "the twin shares the cores evenly among all that runs, and so stretches the training itself"},
            "went_in": "speeds of the parts, what each episode did, and the CPU around a turn "
            f"({found['overhead_cpu_s']:.3g} s), fitted on the evaluation of the base policy",
        },
        sources=sources(run) + sources(fit_on),
    )


def _told(checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        check["name"]: {
            "predicted": check["predicted"],
            "measured": check["measured"],
            "error_percent": round(_error_percent(check), 1),
        }
        for check in checks
    }


def _error_percent(check: Mapping[str, Any]) -> float:
    return 100.0 * float(check["predicted"] / check["measured"] - 1.0)
