"""What the kept logs of a stage say of it: where it came from, what it cost, where its time went."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from farm.errors import UsageError
from harness import cost, derived, evidence, shape
from harness.code_digest import short_digest

_QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
_REMEDY = "bring back the committed logs (git checkout), or keep those of a finished run with `harness report --stages`"


def stage_facts(stage: Path) -> dict[str, Any]:
    """What made a finished stage, its ``key`` (:mod:`harness.stage_key`), and what each run in it says.

    Raises UsageError where its logs are damaged."""
    done = shape.read(shape.Done, stage / "done.json", remedy=_REMEDY)
    try:
        runs = {str(run.relative_to(stage)): _run(run) for run in evidence.runs(stage)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # pyarrow's own is a ValueError
        raise UsageError(f"{stage}: its logs are damaged ({type(error).__name__}: {error}); {_REMEDY}") from None
    if done.get("kept") not in (None, evidence.digest(stage)):
        raise UsageError(f"{stage}: its logs are not those that were kept; {_REMEDY}")
    return {
        "commit": done.get("commit"),
        "dirty": done.get("dirty"),
        "machine": done.get("machine"),
        "key": done.get("key"),
        "wall_s": done["wall_s"],
        "runs": runs,
    }


def _run(run: Path) -> dict[str, Any]:
    rows = derived.trajectories(run)
    config = json.loads((run / "config.json").read_text())
    facts: dict[str, Any] = {
        "config": short_digest(config),
        "seed": config.get("rollout", {}).get("seed"),
        "tasks": config.get("rollout", {}).get("tasks"),
        "shards": list(derived.shard_digests(run)),
        "policies": len(derived.policies(run)),
        "trajectories": len(rows),
    }
    if rows:
        facts |= {
            "cost": cost.cost(rows, config.get("sandbox", {}).get("provider", ""), cost.prices(), config),
            "activity_s": cost.activity_s(rows),
            "tokens": _quantiles([t.total_tokens for t in rows]),
            "seconds": _quantiles([t.ended_at_s - t.started_at_s for t in rows]),
        }
    return facts


def _quantiles(values: list[float] | list[int]) -> Mapping[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in _QUANTILES.items()}
