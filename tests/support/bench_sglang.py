"""``ci/sglang.sh bench``: the embedded engine and a real SGLang, one after the other, on the same weights and requests.

One thread each, float32. Writes ``{"embedded": {"c1": ...}, "sglang": ..., "ratio": ...}``; see ``farm.engine.bench``.
``weights`` says how long each takes to serve another policy, from the folder or by a push over gloo (medians, seconds).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import push_cases
import real_sglang

from farm.engine.bench import BenchShape, measure_engine
from farm.engine.launch import EngineOptions, EngineProcess, launch_engine
from trainer.megatron.push import PushRules, push

SHAPE = BenchShape(vocab=571)
CONCURRENCIES = (1, 8, 32)
SECONDS, REPEATS = 9.0, 3
UPDATES = 9


Figures = tuple[dict[str, dict[str, float]], dict[str, float]]


def _embedded(policies: tuple[str, str], folder: Path) -> Figures:
    options = EngineOptions(model=policies[0], **_limits())
    process = asyncio.run(launch_engine(options, run_folder=folder, timeout_s=300))
    try:
        return _figures(process, policies)
    finally:
        asyncio.run(process.stop())


def _real(policies: tuple[str, str], folder: Path) -> Figures:
    with real_sglang.real_server(policies[0], folder, **_limits()) as process:
        return _figures(process, policies)


def _figures(process: EngineProcess, policies: tuple[str, str]) -> Figures:
    rates = asyncio.run(measure_engine(process.url, process.process.pid, **_measured()))
    return rates, _weights(process.url, policies)


def _weights(url: str, policies: tuple[str, str]) -> dict[str, float]:
    """Seconds from a published policy to an engine that has answered with its name and generates, and how many of a
    push's the engine was paused."""
    disk, pushes, paused = [], [], []
    for step in range(1, 2 * UPDATES + 1, 2):
        started = time.perf_counter()
        push_cases.load(url, policies[1], step)
        push_cases.info(url)
        disk.append(time.perf_counter() - started)
        version = push_cases.version_of(policies[0], step + 1)
        started = time.perf_counter()
        pushed = push([url], push_cases.buckets_of(version.path), version=version.pushed_name, rules=PushRules())
        pushes.append(time.perf_counter() - started)
        paused.append(pushed.paused_s)
    return {"disk_s": median(disk), "push_s": median(pushes), "push_paused_s": median(paused)}


def _limits() -> dict[str, Any]:
    context = SHAPE.context_tokens + 8
    return {
        "version": "step-000000",
        "context_length": context,
        "max_total_tokens": 2 * max(CONCURRENCIES) * context,
        "max_running_requests": max(CONCURRENCIES),
    }


def _measured() -> dict[str, Any]:
    return {"shape": SHAPE, "concurrencies": CONCURRENCIES, "seconds": SECONDS, "repeats": REPEATS}


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        one, other = (real_sglang.write_model(folder / str(seed), seed=seed, shape=SHAPE) for seed in range(2))
        real, real_weights = _real((one, other), folder)
        embedded, embedded_weights = _embedded((one, other), folder)
    ratio = {name: embedded[name]["median"] / real[name]["median"] for name in real}
    weights = {"embedded": embedded_weights, "sglang": real_weights}
    found = {
        "unit": "output tokens/s", "shape": asdict(SHAPE), "embedded": embedded, "sglang": real, "ratio": ratio,
        "weights": weights,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    for name in real:
        print(
            f"{name}: embedded {embedded[name]['median']:,.0f} tokens/s, SGLang {real[name]['median']:,.0f}, "
            f"{ratio[name]:.1f} x"
        )
    for name, seconds in weights.items():
        print(f"{name}: another policy " + ", ".join(f"{what} {value:.3f}" for what, value in seconds.items()))
    print(f"written to {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
