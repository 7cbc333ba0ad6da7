"""``ci/sglang.sh bench``: the embedded engine and a real SGLang, one after the other, on the same weights and requests.

One thread each, float32. Writes ``{"embedded": {"c1": ...}, "sglang": ..., "ratio": ...}``; see ``farm.engine.bench``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import real_sglang

from farm.engine.bench import BenchShape, measure_engine
from farm.engine.launch import EngineOptions, launch_engine

SHAPE = BenchShape(vocab=571)
CONCURRENCIES = (1, 8, 32)
SECONDS, REPEATS = 9.0, 3


async def _embedded(model: str, folder: Path) -> dict[str, dict[str, float]]:
    options = EngineOptions(model=model, **_limits())
    process = await launch_engine(options, run_folder=folder)
    try:
        return await measure_engine(process.url, process.process.pid, **_measured())
    finally:
        await process.stop()


def _real(model: str, folder: Path) -> dict[str, dict[str, float]]:
    with real_sglang.real_server(model, folder, **_limits()) as process:
        return asyncio.run(measure_engine(process.url, process.process.pid, **_measured()))


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
        model = real_sglang.write_model(folder / "model", seed=0, shape=SHAPE)
        real = _real(model, folder)
        embedded = asyncio.run(_embedded(model, folder))
    ratio = {name: embedded[name]["median"] / real[name]["median"] for name in real}
    found = {"unit": "output tokens/s", "shape": asdict(SHAPE), "embedded": embedded, "sglang": real, "ratio": ratio}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    for name in real:
        print(
            f"{name}: embedded {embedded[name]['median']:,.0f} tokens/s, SGLang {real[name]['median']:,.0f}, "
            f"{ratio[name]:.1f} x"
        )
    print(f"written to {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
