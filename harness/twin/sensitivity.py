"""How far each prediction moves when an input is a fifth higher or lower: one input at a time, same seed.

The ranges are kept in ``sensitivity.json`` beside the digest of what they were computed from, because they take some
hundred simulations; `python -m harness.twin sensitivity` makes them anew, on half of the reference's set-up and in
shorter simulations. They are shares of the figure at the inputs themselves, so they apply to the whole, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.errors import UsageError
from harness.twin import calibration
from harness.twin.calibration import Inputs

HERE = Path(__file__).parent
STORED = HERE / "sensitivity.json"
CHANGE = 0.2
_STRONGEST = 3

# Inputs that only some figures depend on; all others may move every simulated figure.
_LOCAL_ONLY = frozenset({"host_cores", "command_threads", "local_start_s"})
_CLOUD_ONLY = frozenset({"cloud_start_s", "round_trip_s"})
_THRASH_ONLY = frozenset({"runaway_tokens_low", "runaway_tokens_high", "outstanding"})
_CAPPED_ONLY = frozenset({"cap_tokens", "turn_tokens"})


@dataclass(frozen=True, slots=True)
class Ranges:
    """``spans[figure][input]`` are the figure's factors with the input a fifth lower and a fifth higher."""

    spans: Mapping[str, Mapping[str, tuple[float, float]]]

    def around(self, figure: str, value: float) -> tuple[float, float]:
        """Lowest and highest over all inputs."""
        factors = [factor for pair in self.spans[figure].values() for factor in pair]
        return value * min([1.0, *factors]), value * max([1.0, *factors])

    def strongest(self, figure: str) -> list[str]:
        """The inputs that move the figure most, strongest first."""
        moved = {name: max(abs(f - 1.0) for f in pair) for name, pair in self.spans[figure].items()}
        return sorted((n for n in moved if moved[n] > 0.005), key=lambda n: (-moved[n], n))[:_STRONGEST]


@dataclass(frozen=True, slots=True)
class Job:
    """Which figures to find with these inputs."""

    inputs: Inputs
    figures: tuple[str, ...]


def compute(
    figures: Collection[str],
    find: Callable[[Job], dict[str, float]],
    inputs: Inputs,
    *,
    each: Callable[[Callable[[Job], dict[str, float]], list[Job]], Iterable[dict[str, float]]] = map,
    report: Callable[[str], None] = lambda _: None,
) -> Ranges:
    """``find`` gives the figures of a job; ``each`` maps it over the jobs, in order (a pool's map will do)."""
    names = [name for name in inputs.entries if name not in _THRASH_ONLY]
    moves = [(name, factor) for name in names for factor in (1.0 - CHANGE, 1.0 + CHANGE)]
    jobs = [Job(inputs, tuple(figures))]
    jobs += [Job(inputs.scaled(n, factor), tuple(f for f in figures if _may_move(f, n))) for n, factor in moves]
    found = iter(each(find, jobs))
    base = next(found)
    spans: dict[str, dict[str, tuple[float, float]]] = {figure: {} for figure in figures}
    for number, name in enumerate(names, start=1):
        low, high = next(found), next(found)
        for figure in low:
            spans[figure][name] = (round(low[figure] / base[figure], 4), round(high[figure] / base[figure], 4))
        report(f"[{number}/{len(names)}] {name}")
    return Ranges(spans)


def _may_move(figure: str, name: str) -> bool:
    if figure in ("capacity_tokens", "push_s"):
        return name in ("gpu.hbm_bytes", "memory_fraction", "reserved_bytes", "push_bytes_per_s")
    if figure in ("cloud_per_hour", "capped_step_s", "kv_peak_percent"):
        return name not in _LOCAL_ONLY
    if figure == "local_per_hour":
        return name not in _CLOUD_ONLY
    if figure == "uncapped_step_s":
        return name not in _LOCAL_ONLY | _CAPPED_ONLY
    return True


def save(ranges: Ranges, path: Path = STORED) -> None:
    document = {"digest": digest(), "change": CHANGE, "spans": ranges.spans}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def stored(path: Path = STORED) -> Ranges | None:
    """The ranges that were computed from the present twin and calibration; None when there are none."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(
            f"{path}: not JSON ({error}); make it anew with `python -m harness.twin sensitivity`"
        ) from None
    if document.get("digest") != digest():
        return None
    return Ranges({f: {n: (low, high) for n, (low, high) in pairs.items()} for f, pairs in document["spans"].items()})


def digest(inputs: Inputs | None = None) -> str:
    """Of the twin's models and of the values that go into them. Where a value comes from is no part of it, nor are the
    models of the embedded parts (``embedded.py``, ``recorded.py``), which no figure here depends on."""
    inputs = inputs or calibration.load()
    found = hashlib.sha256()
    for file in sorted(HERE / f"{name}.py" for name in _MODELS):
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    values = {name: entry.value for name, entry in inputs.entries.items()}
    found.update(json.dumps([inputs.shape.name, inputs.gpu_name, inputs.seed, values], sort_keys=True).encode())
    return found.hexdigest()[:32]


_MODELS = (
    "clock", "course", "engine", "fleet", "learner", "result", "roofline", "sandbox", "scenario", "scenarios", "sheets",
    "simulate", "trainer", "workload",
)  # fmt: skip
