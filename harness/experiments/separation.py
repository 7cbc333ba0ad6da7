"""Farm and trainer as separate processes that share only the two logs: from a published step to all engines on it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from harness import stats
from harness.claims import Measurement
from harness.experiments.runs import landed, policies, sources, steps
from harness.lab import Lab


def latency(lab: Lab) -> Measurement:
    run = lab.rl()
    live = _live(run)
    published = {version.step: version.published_at_s for version in policies(run)}
    engines = {url for urls in live.values() for url in urls}
    everywhere = {step: max(urls.values()) for step, urls in live.items() if set(urls) == engines}
    delays = np.array(
        [at_s - published[step] for step, at_s in sorted(everywhere.items()) if step in published and step]
    )
    estimate = stats.median(delays)
    missing = sorted(step for step in published if step and step not in everywhere)
    return Measurement(
        estimate=estimate,
        unit="s (median, policy published to live on all engines)",
        holds=not missing,
        detail={
            "engines": len(engines),
            "published_steps": len(published) - 1,
            "live_everywhere": len(delays),
            "steps_not_live_everywhere": missing,
            "p95_s": round(float(np.quantile(delays, 0.95)), 3),
            "in_common": "two processes, each given the run folder and the starting policy, nothing else",
        },
        sources=sources(run),
        figures={"step_timeline": _timeline(run)},
    )


def _live(run: Path) -> dict[int, dict[str, float]]:
    """step -> engine -> when it went live there (epoch seconds)."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for line in (run / "logs" / "engines.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "live":
            found[event["step"]].setdefault(event["url"], event["at_s"])
    return found


def _timeline(run: Path) -> dict[str, Any]:
    """What every trajectory of one step in the middle of the run was doing, with the trainer's own time on top."""
    lines = steps(run)
    line = lines[len(lines) // 2]
    end_s = line["ended_at_s"]
    start_s = end_s - line["wait_s"] - line["train_s"] - line["checkpoint_s"] - line["publish_s"]
    rows: list[list[tuple[str, float, float]]] = []
    for trajectory in sorted(landed(run), key=lambda t: t.started_at_s):
        events = [
            (e.name, max(e.start_at_s, start_s) - start_s, min(e.end_at_s, end_s) - start_s)
            for e in trajectory.timeline
            if e.end_at_s > start_s and e.start_at_s < end_s and e.name != "queued"
        ]
        if events:
            rows.append([(name, round(a, 3), round(b, 3)) for name, a, b in events])
    waited = round(line["wait_s"], 3)
    rows.append([("trainer waits", 0.0, waited), ("trainer trains", waited, round(end_s - start_s, 3))])
    return {"step": line["step"], "rows": rows}
