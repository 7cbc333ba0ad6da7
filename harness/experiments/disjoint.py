"""Whether any training repository is one of the benchmark's: the micro splits, and the real lists where they lie."""

from __future__ import annotations

from typing import Any

from farm.suites.overlap import RepoRef, overlap

from farm.tasks import load_tasks
from harness.claims import Measurement
from harness.lab import Lab
from harness.stats import Estimate

TRAIN_SPLITS = ("micro:rl", "micro:sft", "micro:pretrain")
LISTS = "ROLLOUT_FARM_DATA"


def overlaps(lab: Lab) -> Measurement:
    del lab  # nothing is run
    bench = [RepoRef(repo=t.repo) for t in load_tasks("micro:benchmark")]
    train = [RepoRef(repo=t.repo) for split in TRAIN_SPLITS for t in load_tasks(split)]
    found = overlap(train, bench)
    detail: dict[str, Any] = {
        "micro": {"train_repos": len({r.repo for r in train}), "benchmark_repos": len({r.repo for r in bench})},
        "real_lists": _real_lists(),
    }
    count = float(len(found))
    estimate = Estimate(value=count, low=count, high=count, n=len({r.repo for r in bench}))
    return Measurement(estimate=estimate, unit="overlaps (micro splits)", holds=not found, detail=detail)


def _real_lists() -> Any:
    raise NotImplementedError
