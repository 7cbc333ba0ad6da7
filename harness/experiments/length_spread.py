"""How far attempts at one task differ in length, over the groups of the RL run."""

from __future__ import annotations

import numpy as np

from harness import metrics, stats
from harness.claims import Measurement
from harness.experiments.runs import landed, sources
from harness.lab import Lab

REPORTED = 2.5
SHARE = 0.10


def ratio(lab: Lab) -> Measurement:
    run = lab.rl()
    spread = metrics.group_spread(landed(run))
    beyond = float((spread["tokens"] >= REPORTED).mean())
    return Measurement(
        estimate=stats.median(spread["tokens"]),
        unit="x (median over groups)",
        holds=beyond >= SHARE,
        detail={
            "share_of_groups_at_2.5x_or_more": round(beyond, 3),
            "tokens_p90": round(float(np.quantile(spread["tokens"], 0.9)), 2),
            "tokens_max": round(float(spread["tokens"].max()), 2),
            "interval": "groups resampled one by one; those of one task are alike, so it is rather too narrow",
            "seconds_median": round(float(np.median(spread["seconds"])), 2),
            "seconds_p90": round(float(np.quantile(spread["seconds"], 0.9)), 2),
        },
        sources=sources(run),
        figures={"length_spread": {"tokens": spread["tokens"].tolist()}},
    )
