"""Farm and trainer as separate processes that meet in the logs alone: from a published step to all engines on it.

An engine may skip a version when a newer one is out already, so what counts is when it has this one or a newer. Late is
what comes later than the trainer takes for a step: such weights were sampled from for less than they should.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from harness import derived, stats
from harness.claims import Measurement
from harness.experiments.runs import landed, policies, sources, steps
from harness.lab import Lab

_SIDES = ("farm", "trainer")


def latency(lab: Lab) -> Measurement:
    run = lab.rl()
    events = _events(run)
    published = {version.step: version.published_at_s for version in policies(run)}
    bound_s = float(np.median(np.diff([at_s for _, at_s in sorted(published.items())])))
    everywhere = {step: _delay(events, step, at_s) for step, at_s in published.items() if step}
    in_time = [step for step, delay_s in everywhere.items() if delay_s is not None and delay_s <= bound_s]
    delays = np.array([delay_s for delay_s in everywhere.values() if delay_s is not None])
    processes = derived.processes(run)
    addresses = (run / "trainer" / "config.json").read_text().count("://")
    apart = len(set(processes.values())) == len(_SIDES) == len(processes) and not addresses
    return Measurement(
        estimate=stats.median(delays),
        unit="s (median, policy published to it or a newer one live on all engines)",
        holds=len(in_time) == len(everywhere) and apart,
        detail={
            "engines": len(events),
            "published_steps": len(everywhere),
            "live_everywhere_in_time": len(in_time),
            "late_or_missing_steps": sorted(set(everywhere) - set(in_time)),
            "bound_s": round(bound_s, 3),
            "p95_s": round(float(np.quantile(delays, 0.95)), 3),
            "separate_processes": len(set(processes.values())),
            "addresses_in_the_trainer_configuration": addresses,
            "in_common": "the run folder: its locks name the processes, and the trainer's settings name no other side",
        },
        sources=sources(run),
        figures={"step_timeline": _timeline(run)},
    )


def _events(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Engine -> what happened to it, in order."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in (run / "logs" / "engines.jsonl").read_text().splitlines():
        event = json.loads(line)
        found[event["url"]].append(event)
    return found


def _delay(events: dict[str, list[dict[str, Any]]], step: int, published_at_s: float) -> float | None:
    """Seconds until every engine had version ``step`` or a newer one; None when one never did. One that went down for
    good before it could is not waited for."""
    delays = []
    for history in events.values():
        on_it = [e["at_s"] for e in history if e["kind"] in ("up", "live") and e["step"] >= step]
        if on_it:
            delays.append(max(0.0, min(on_it) - published_at_s))
        elif history[-1]["kind"] != "down":
            return None
    return max(delays, default=None)


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
