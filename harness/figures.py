"""The report's pictures, as SVG whose bytes depend on their data alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

HASH_SALT = "rollout-farm"


def draw(name: str, data: Any, path: Path) -> None:
    """Draw figure ``name`` (a key of FIGURES) from ``data`` into ``path``. Raises KeyError on an unknown name."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = HASH_SALT
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
    try:
        FIGURES[name](axes, data)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    finally:
        pyplot.close(figure)


def _learning_curve(axes: Any, points: list[dict[str, float]]) -> None:
    steps = [p["step"] for p in points]
    rates = [100 * p["pass_rate"] for p in points]
    window = 5
    smooth = [sum(rates[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(rates))]
    axes.plot(steps, rates, color="#b7c6d9", marker=".", linewidth=0.8, label="batch of one step")
    axes.plot(steps, smooth, color="#1f5fa8", linewidth=2.0, label=f"mean of {window} steps")
    axes.set(
        xlabel="trainer step", ylabel="training pass rate (%)", ylim=(0, None), title="Asynchronous RL, micro suite"
    )
    axes.legend(frameon=False)


def _step_time(axes: Any, times: dict[str, list[float]]) -> None:
    names = ["sync", "async"]
    axes.boxplot(
        [times[n] for n in names], orientation="horizontal", tick_labels=["synchronous", "asynchronous"], widths=0.5
    )
    for row, name in enumerate(names, start=1):
        axes.plot(times[name], [row] * len(times[name]), ".", color="#1f5fa8")
    axes.set(xlabel="step time (s)", xlim=(0, None), title="Step time from the same policy, tasks and seed")


def _length_spread(axes: Any, data: dict[str, list[float]]) -> None:
    axes.hist(data["tokens"], bins=30, color="#7da3cf")
    axes.axvline(2.5, color="#a33", linestyle="--", label="2.5x, reported")
    axes.set(
        xlabel="longest / shortest attempt of a group (tokens)", ylabel="groups", title="Length spread within groups"
    )
    axes.legend(frameon=False)


def _sandbox_start(axes: Any, data: dict[str, list[float]]) -> None:
    for label, values in data.items():
        ordered = sorted(values)
        axes.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], label=label)
    axes.set(xlabel="start to first command (ms)", ylabel="starts (%)", xlim=(0, None), title="Sandbox start")
    axes.legend(frameon=False)


def _step_timeline(axes: Any, data: dict[str, Any]) -> None:
    """One row per trajectory of one step's batch, coloured by what it was doing; the trainer below."""
    colours = {
        "queued": "#dddddd",
        "sandbox_start": "#f0b35a",
        "generate": "#1f5fa8",
        "exec": "#6aa56a",
        "grade": "#b36ac0",
        "trainer waits": "#dddddd",
        "trainer trains": "#a33333",
    }
    seen: dict[str, Any] = {}
    for row, events in enumerate(data["rows"]):
        for name, start_s, end_s in events:
            bars = axes.barh(row, end_s - start_s, left=start_s, height=0.9, color=colours.get(name, "#999999"))
            seen.setdefault(name, bars[0])
    axes.legend(
        seen.values(),
        seen.keys(),
        frameon=False,
        fontsize=7,
        ncols=len(seen),
        loc="upper left",
        bbox_to_anchor=(0, 1.1),
    )
    axes.set(xlabel="seconds", ylabel="trajectories, trainer on top", yticks=[])


FIGURES: dict[str, Callable[[Any, Any], None]] = {
    "learning_curve": _learning_curve,
    "step_time": _step_time,
    "length_spread": _length_spread,
    "sandbox_start": _sandbox_start,
    "step_timeline": _step_timeline,
}
