"""The twin against reality: the training run of this machine, predicted from the measured speed of its parts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from harness import bench
from harness.claims import Measurement
from harness.experiments.runs import sources
from harness.lab import Lab
from harness.stats import Estimate

WITHIN_PERCENT = 15.0
PARTS = ("sandbox", "engine", "trainer")


def within(lab: Lab) -> Measurement:
    if lab.profile.name == "quick":
        return Measurement(
            estimate=None, unit="", holds=None, detail={"not_compared": "a quick run is too short to predict"}
        )
    run, fit_on = lab.rl(), lab.evaluate("base", lab.profile.policy)

    def work(folder: Path) -> None:
        from harness.twin import embedded

        figures = {name: figure for part in PARTS for name, figure in bench.PARTS[part]().items()}
        (folder / "bench.json").write_text(json.dumps(figures))
        found = embedded.validate(run, figures, fit_on=fit_on, cores=os.cpu_count() or 1)
        (folder / "check.json").write_text(json.dumps(asdict(found)))

    found = json.loads((lab.stage("twin-check", work) / "check.json").read_text())
    errors = {check["name"]: 100 * (check["predicted"] / check["measured"] - 1) for check in found["checks"]}
    largest = max(map(abs, errors.values()))
    return Measurement(
        estimate=Estimate(value=largest, low=largest, high=largest, n=len(errors)),
        unit="% (the larger error of throughput and step time)",
        holds=largest <= WITHIN_PERCENT,
        detail={
            "figures": {
                check["name"]: {
                    "predicted": check["predicted"],
                    "measured": check["measured"],
                    "error_percent": round(errors[check["name"]], 1),
                }
                for check in found["checks"]
            },
            "went_in": "speeds of the parts, what each episode did, and the CPU around a turn "
            f"({found['overhead_cpu_s']:.3g} s), fitted on the evaluation of the base policy",
        },
        sources=sources(run) + sources(fit_on),
    )
