"""KV use and queues of the engines: head-room in normal work, and what generations without an end do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness import crowd, stats
from harness.claims import Measurement
from harness.crowd import CrowdPlan
from harness.experiments.runs import embedded_only, landed, most_in_flight, policies, settings, sources
from harness.lab import Lab
from harness.stats import Estimate

REPORTED_PERCENT, BLOCKED_SHARE = 23.0, 0.9
REPORTED_KV_TOKENS = 1_500_000  # the reference's budget of one engine, to scale by
SGLANG_CLIP_TOKENS = 4096

ENDLESS, OTHERS = 10, 40
BUDGET_TOKENS, LONGEST_TOKENS, CAP_TOKENS = 6144, 4096, 192
FILL_S = 120.0


def headroom(lab: Lab) -> Measurement:
    """Every look at the engines while the trained policy is evaluated: full load, and no policy update to pause for."""
    run = lab.evaluate("rl", Path(policies(lab.rl())[-1].path))
    looks = [line for line in _lines(run / "logs" / "engine_metrics.jsonl") if line["running"] or line["queued"]]
    if not looks:
        why = "not measured: the run was over before an engine was seen at work"
        return Measurement(estimate=None, unit="", holds=None, detail={"not_compared": why})
    use = 100 * np.array([look["used_tokens"] / look["max_total_tokens"] for look in looks])
    queue = np.array([look["queued"] for look in looks])
    running = np.array([look["running"] for look in looks])
    peak = float(use.max())
    return Measurement(
        estimate=Estimate(value=peak, low=peak, high=peak, n=len(looks)),
        unit="% of an engine's KV budget at the peak",
        holds=peak <= REPORTED_PERCENT and not queue.any(),
        detail={
            "peak_queue": int(queue.max()),
            "looks_with_a_queue": int((queue > 0).sum()),
            "kv_use_median_percent": round(float(np.median(use)), 2),
            "kv_use_p95_percent": round(float(np.quantile(use, 0.95)), 2),
            "running_at_the_peak": int(running[use.argmax()]),
            "running_max": int(running.max()),
            "retractions": max(look["retracted_total"] for look in looks),
            "engines": len({look["url"] for look in looks}),
            "budget_tokens": looks[0]["max_total_tokens"],
            "context_cap_tokens": settings(run)["limits"]["max_context_tokens"],
            "trajectories_in_flight_max": most_in_flight(landed(run)),
            "interval": "none: the largest of the looks, about one a second; between two looks it may have been larger",
        },
        sources=sources(run),
        figures={
            "kv_use": {
                "kind": "lines",
                "title": "KV in use and requests in the queue, all engines",
                "x": "s",
                "y": "% of the budget; requests",
                "series": {"KV in use": _over_time(looks, use), "queue": _over_time(looks, queue)},
            }
        },
    )


def thrash(lab: Lab) -> Measurement:
    if elsewhere := embedded_only(lab, "engine"):
        return elsewhere
    plan = CrowdPlan(
        endless=ENDLESS,
        others=OTHERS,
        budget_tokens=BUDGET_TOKENS,
        longest_tokens=LONGEST_TOKENS,
        cap_tokens=CAP_TOKENS,
        timeout_s=lab.profile.thrash_timeout_s,
        fill_s=FILL_S,
    )
    policy = lab.profile.policy

    def work(folder: Path) -> None:
        asyncio.run(_play(folder, policy, plan))

    found = json.loads((lab.stage("kv-thrash", work) / "crowds.json").read_text())
    played, with_plan = found["played"], CrowdPlan(**found["plan"])  # its own: this code's may have changed since
    told = {name: _told(crowd_, with_plan.timeout_s) for name, crowd_ in played.items()}
    budget_tokens = played["alone"]["loads"][0][1]["max_total_tokens"]  # what the engine said
    blocked = stats.wilson(told["alone"]["blocked"], told["alone"]["others"])
    return Measurement(
        estimate=Estimate(value=100 * blocked.value, low=100 * blocked.low, high=100 * blocked.high, n=blocked.n),
        unit="% of the others without a token until they time out, without cap and admission",
        holds=blocked.value >= BLOCKED_SHARE and not told["guarded"]["timeouts"] and not told["guarded"]["blocked"],
        detail={
            **told,
            "endless": with_plan.endless,
            "timeout_s": with_plan.timeout_s,
            "kv_budget_tokens": budget_tokens,
            "cap_tokens": with_plan.cap_tokens,
            "scale": f"1/{REPORTED_KV_TOKENS / budget_tokens:.0f} of the reference's KV budget; how far the engine "
            "looks ahead at admission is scaled alike",
        },
        figures={
            "kv_thrash": {
                "kind": "lines",
                "title": "Requests waiting for the engine beside endless generations",
                "x": "s",
                "y": "requests in the queue",
                "series": {name: [[at_s, x["queued"]] for at_s, x in one["loads"]] for name, one in played.items()},
            }
        },
    )


async def _play(folder: Path, policy: Path, plan: CrowdPlan) -> None:
    from farm.engine.launch import EngineOptions, launch_engine

    options = EngineOptions(
        model=str(policy),
        version="step-000000",
        max_total_tokens=plan.budget_tokens,
        context_length=plan.longest_tokens,
        max_running_requests=2 * (plan.endless + plan.others),
        clip_new_tokens=max(1, round(SGLANG_CLIP_TOKENS * plan.budget_tokens / REPORTED_KV_TOKENS)),
    )
    engine = await launch_engine(options, run_folder=folder, name="engine-0")
    try:
        played = await crowd.play(engine.url, plan)
    finally:
        await engine.stop()
    crowds = {name: asdict(one) for name, one in played.items()}
    (folder / "crowds.json").write_text(json.dumps({"plan": asdict(plan), "played": crowds}))


def _told(played: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    others = [client for client in played["clients"] if client["kind"] == crowd.OTHER]
    return {
        "others": len(others),
        "blocked": sum(client["longest_gap_s"] >= timeout_s for client in others),
        "timeouts": sum(client["timeouts"] for client in others),
        "longest_without_a_token_s": round(max(client["longest_gap_s"] for client in others), 3),
        "longest_wait_for_admission_s": round(max(client["longest_admission_s"] for client in others), 3),
        "tokens_to_the_others": sum(client["tokens"] for client in others),
        "kv_full_at_s": None if played["full_at_s"] is None else round(played["full_at_s"], 2),
        "peak_kv_percent": round(100 * max(x["used_tokens"] / x["max_total_tokens"] for _, x in played["loads"]), 1),
        "retractions": played["loads"][-1][1]["retracted_total"] - played["loads"][0][1]["retracted_total"],
        "seconds": round(played["seconds"], 1),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _over_time(looks: list[dict[str, Any]], values: stats.Floats) -> list[list[float]]:
    return [[round(look["at_s"] - looks[0]["at_s"], 3), float(v)] for look, v in zip(looks, values, strict=True)]
