"""`make bench`: the speed of the parts, as a table and as ``build/bench.json``.

Absolute figures belong to one machine at one time; compare ratios within one run.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from harness.lab import StageError, command_output
from harness.profiles import BASE_POLICY

Figure = dict[str, float | int | str]
Figures = dict[str, Figure]

SANDBOXES = 50
EPISODES = 400
DAY_S = 86_400.0
_TAKES_S = {"twin": 60, "real SGLang": 150}  # all others: about 10
_LIMIT_S = 1800.0
_ROOT = Path(__file__).parents[1]


def bench(out: Path) -> None:
    """Measure every part in turn, print the table, write ``out``."""
    console = Console()
    figures: Figures = {}
    parts = PARTS
    if sglang_is_here():
        parts = {**PARTS, "real SGLang": against_sglang}
    else:
        console.print("not compared with a real SGLang, which is not installed: `ci/sglang.sh install`, then again")
    for number, (name, part) in enumerate(parts.items(), start=1):
        left_s = sum(_TAKES_S.get(part_name, 10) for part_name in list(parts)[number - 1 :])
        console.print(f"[{number}/{len(parts)}] {name}, about {left_s} s left", style="dim")
        figures |= part()
    table = Table(Column("figure", overflow="fold"), "median", "p95", "n", "unit", box=None)
    for name, figure in figures.items():
        table.add_row(name, f"{figure['median']:.4g}", f"{figure['p95']:.4g}", str(figure["n"]), str(figure["unit"]))
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"written to {out}")


def _figure(values: Iterable[float], unit: str) -> Figure:
    array = np.array(list(values), dtype=float)
    return {
        "median": float(np.median(array)),
        "p95": float(np.quantile(array, 0.95)),
        "n": len(array),
        "unit": unit,
    }


def _sandbox() -> Figures:
    from farm.sandbox.bench import measure

    found = measure(SANDBOXES)
    return {f"sandbox.{name}": _figure(found[name], "ms") for name in ("start_ms", "start_cpu_ms", "exec_ms")}


def _engine() -> Figures:
    from farm.engine.bench import measure

    return {
        f"engine.output_tokens_per_s.{name}": {
            "median": found["median"],
            "p95": found["p95"],
            "n": int(found["n"]),
            "unit": "tokens/s",
        }
        for name, found in measure().items()
    }


def _log() -> Figures:
    from farm.log_bench import measure

    runs = [measure() for _ in range(3)]
    return {
        f"log.{name}": _figure((run[name] for run in runs), "MB/s") for name in ("append_mb_per_s", "tail_mb_per_s")
    }


def _trainer() -> Figures:
    found = json.loads(command_output("trainer", "bench", "--json"))
    return {name: dict(figure) for name, figure in found.items()}


def _farm() -> Figures:
    """Whole episodes of the shipped policy, through the public command."""
    from farm.results import summarize
    from harness.experiments.runs import landed

    rates, dispatch = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command_output(
                "farm", "rollout", "--tasks", "micro:rl", "--limit", str(EPISODES), "--policy", str(BASE_POLICY),
                "--run", str(run), "--workers", "2",
            )  # fmt: skip
            rates.append(summarize(landed(run)).episodes_per_hour or 0.0)
            dispatch.append(json.loads((run / "farm.json").read_text())["driver_cpu_ms_per_episode"])
    return {
        "dispatch.cpu_ms_per_episode": _figure(dispatch, "ms"),
        "episodes_per_hour": _figure(rates, "1/h"),
    }


def _twin() -> Figures:
    """A day of 384 trajectories at once at the reference's scale: seconds of one core, which should stay below 60."""
    from harness.twin import calibration, scenarios
    from harness.twin.simulate import simulate

    scenario = scenarios.reference(calibration.load(), name="day", horizon_s=DAY_S)
    started_s = time.process_time()
    simulate(scenario)
    return {"twin.simulated_day_s": _figure([time.process_time() - started_s], "CPU s")}


def sglang_is_here() -> bool:
    """Whether ``ci/sglang.sh`` has installed a real SGLang."""
    return (_ROOT / "build/sglang-venv/ready").exists()


def against_sglang() -> Figures:
    """The embedded engine and a real SGLang on the same weights, threads and requests (``make bench-sglang``)."""
    command = ["bash", "ci/sglang.sh", "bench"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise StageError(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found = json.loads((_ROOT / "build/bench-sglang.json").read_text())
    figures: Figures = {}
    for engine in ("embedded", "sglang"):
        for load, rate in found[engine].items():
            figures[f"against_sglang.{engine}.output_tokens_per_s.{load}"] = {
                "median": rate["median"], "p95": rate["p95"], "n": int(rate["n"]), "unit": "tokens/s",
            }  # fmt: skip
        for how, seconds in found["weights"][engine].items():
            figures[f"against_sglang.{engine}.{how}"] = _figure([seconds], "s")
    for load, ratio in found["ratio"].items():
        figures[f"against_sglang.embedded_to_sglang.{load}"] = _figure([ratio], "x")
    return figures


PARTS: dict[str, Callable[[], Figures]] = {
    "sandbox": _sandbox,
    "engine": _engine,
    "log": _log,
    "trainer": _trainer,
    "whole episodes": _farm,
    "twin": _twin,
}
