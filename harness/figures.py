"""The report's pictures, as SVG whose bytes depend on their data alone.

An experiment gives data with a ``kind`` that says how it is drawn:

* ``lines``: ``series`` (label -> [[x, y], ...]) over ``x`` and ``y`` (axis titles), ``smooth`` (points averaged)
* ``distribution``: ``series`` (label -> values) as cumulative shares over ``x``, ``marks`` (label -> value on x)
* ``boxes``: ``series`` (label -> values), one box each over ``x``, with every value as a point
* ``bars``: ``series`` (label -> {part -> value}), one stacked bar each over ``x``
* ``timeline``: ``rows`` of [[name, start_s, end_s], ...], one above the other, seconds on ``x``; the trainer's row
  (names that start with "trainer") is drawn taller

``title`` is for all. Figures of the first reports are named rather than of a kind; they map to one.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

HASH_SALT = "rollout-farm"

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#1f5fa8", "#e08a1e", "#4c9a5b", "#9a5bb0", "#a83232", "#c9ced6"
_CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, "#5b6b7d")
_ACTIVITY = {
    "queued": GREY,
    "sandbox_start": ORANGE,
    "generate": BLUE,
    "exec": GREEN,
    "collect": "#9ad0a5",
    "grade": PURPLE,
    "trainer waits": "#e3c9c9",
    "trainer trains": RED,
}
_PATH, _NUMBER = re.compile(rb' d="[^"]*"'), re.compile(rb"-?\d+\.\d+")
_INCH_PER_ROW = 0.34
_ROWS_IN_VIEW = 30  # a row as high as one of these is seen among hundreds


def svg(name: str, data: Any) -> bytes:
    """Figure ``name`` drawn from ``data``. Raises KeyError when it is of no known kind."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    drawing = _of_a_kind(name, data)
    settings = {
        "svg.hashsalt": f"{HASH_SALT} {name}",  # ids differ between figures that one page holds
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#7a828c",
        "axes.grid": True,
        "grid.color": "#e4e7eb",
        "axes.axisbelow": True,
        "axes.prop_cycle": matplotlib.cycler(color=_CYCLE),
    }
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7.0, _height(drawing)), layout="constrained")
        try:
            KINDS[drawing["kind"]](axes, drawing)
            axes.set_title(drawing.get("title", ""))
            file = io.BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        finally:
            pyplot.close(figure)
    return _PATH.sub(lambda path: _NUMBER.sub(_shorter, path.group()), file.getvalue())


def _shorter(number: re.Match[bytes]) -> bytes:
    """A coordinate to a hundredth of a point: nobody sees more, and it halves the file."""
    return f"{float(number.group()):.2f}".rstrip("0").rstrip(".").encode()


def _height(drawing: Mapping[str, Any]) -> float:
    """Inches: a figure of rows grows with them."""
    if drawing["kind"] in ("boxes", "bars"):
        return 1.5 + _INCH_PER_ROW * len(drawing["series"])
    return 4.6 if drawing["kind"] == "timeline" else 3.4


# ------------------------------------------------------------------------------------------------ kinds


def _lines(axes: Any, data: Mapping[str, Any]) -> None:
    window = data.get("smooth", 1)
    for colour, (label, points) in zip(_CYCLE * 3, data["series"].items(), strict=False):
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        if window == 1:
            axes.plot(xs, ys, color=colour, marker=".", markersize=3, linewidth=1.2, label=label)
            continue
        axes.plot(xs, ys, color=colour, marker=".", markersize=3, linewidth=0.7, alpha=0.4, label=label)
        axes.plot(xs, _running_mean(ys, window), color=colour, linewidth=2.0, label=f"{label}, mean of {window}")
    _labels(axes, data)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _legend(axes)


def _distribution(axes: Any, data: Mapping[str, Any]) -> None:
    for colour, (label, values) in zip(_CYCLE * 3, data["series"].items(), strict=False):
        ordered = sorted(values)
        shares = [100.0 * (i + 1) / len(ordered) for i in range(len(ordered))]
        axes.step(ordered, shares, where="post", color=colour, linewidth=1.6, label=f"{label} (n={len(ordered)})")
    for label, value in data.get("marks", {}).items():
        axes.axvline(value, color=RED, linestyle="--", linewidth=1.0, label=label)
    _labels(axes, {"y": "share at or below (%)", **data})
    axes.set_ylim(0, 101)
    _legend(axes)


def _boxes(axes: Any, data: Mapping[str, Any]) -> None:
    series = data["series"]
    axes.boxplot(
        list(series.values()),
        orientation="horizontal",
        tick_labels=[f"{label} (n={len(values)})" for label, values in series.items()],
        widths=0.55,
        showfliers=False,
        medianprops={"color": RED, "linewidth": 1.6},
    )
    for row, values in enumerate(series.values(), start=1):
        axes.plot(values, [row] * len(values), ".", color=BLUE, markersize=3, alpha=0.5)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    _labels(axes, data)


def _bars(axes: Any, data: Mapping[str, Any]) -> None:
    series = data["series"]
    parts = list(dict.fromkeys(part for bar in series.values() for part in bar))
    left = dict.fromkeys(series, 0.0)
    for colour, part in zip(_CYCLE * 3, parts, strict=False):
        widths = [bar.get(part, 0.0) for bar in series.values()]
        axes.barh(
            list(series), widths, left=list(left.values()), height=0.6, color=_ACTIVITY.get(part, colour), label=part
        )
        left = {label: left[label] + width for label, width in zip(series, widths, strict=True)}
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    _labels(axes, data)
    _legend(axes, below=True)


def _timeline(axes: Any, data: Mapping[str, Any]) -> None:
    """All stretches of one kind as a single path: a tenth of the bytes of one rectangle each."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners: dict[str, list[tuple[float, float]]] = defaultdict(list)
    row, tall = 0.0, max(1.0, len(data["rows"]) / _ROWS_IN_VIEW)
    for stretches in data["rows"]:
        height = tall if stretches and stretches[0][0].startswith("trainer") else 1.0
        low, high = row + 0.05, row + height - 0.05
        row += height
        for name, start_s, end_s in stretches:
            corners[name] += [(start_s, low), (end_s, low), (end_s, high), (start_s, high), (start_s, low)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    for name in sorted(corners, key=lambda n: list(_ACTIVITY).index(n) if n in _ACTIVITY else len(_ACTIVITY)):
        points = corners[name]
        path = Path(points, codes * (len(points) // 5))
        axes.add_patch(PathPatch(path, facecolor=_ACTIVITY.get(name, "#999999"), edgecolor="none", label=name))
    axes.set_xlim(0, max((x for points in corners.values() for x, _ in points), default=1.0))
    axes.set_ylim(0, row)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    _labels(axes, {"x": "seconds", **data})
    _legend(axes, below=True)


def _labels(axes: Any, data: Mapping[str, Any]) -> None:
    axes.set(xlabel=data.get("x", ""), ylabel=data.get("y", ""))


def _legend(axes: Any, *, below: bool = False) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2 and not below:
        return
    if below:
        axes.figure.legend(
            handles, labels, frameon=False, fontsize=8, ncols=min(4, len(labels)), loc="outside lower center"
        )
    else:
        axes.legend(frameon=False, fontsize=8)


def _running_mean(values: list[float], window: int) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


KINDS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "lines": _lines,
    "distribution": _distribution,
    "boxes": _boxes,
    "bars": _bars,
    "timeline": _timeline,
}


# --------------------------------------------------------------------------------------- named figures


def _of_a_kind(name: str, data: Any) -> Mapping[str, Any]:
    if isinstance(data, Mapping) and "kind" in data:
        return data
    return NAMED[name](data)


def _learning_curve(points: list[dict[str, float]]) -> Mapping[str, Any]:
    return {
        "kind": "lines",
        "title": "Asynchronous RL on the micro suite: pass rate in training",
        "series": {"batch of one step": [[p["step"], 100 * p["pass_rate"]] for p in points]},
        "smooth": 5,
        "x": "trainer step",
        "y": "pass rate (%)",
    }


def _step_time(times: dict[str, list[float]]) -> Mapping[str, Any]:
    names = {"sync": "synchronous", "async": "asynchronous"}
    return {
        "kind": "boxes",
        "title": "Step time from the same policy, tasks and seed",
        "series": {names.get(name, name): values for name, values in times.items()},
        "x": "step time (s)",
    }


def _length_spread(data: dict[str, list[float]]) -> Mapping[str, Any]:
    return {
        "kind": "distribution",
        "title": "Length spread within groups",
        "series": {"groups": data["tokens"]},
        "marks": {"2.5x, reported": 2.5},
        "x": "longest / shortest attempt of a group (tokens)",
    }


def _sandbox_start(data: dict[str, list[float]]) -> Mapping[str, Any]:
    return {
        "kind": "distribution",
        "title": "Sandbox start to the first finished command",
        "series": data,
        "x": "milliseconds",
    }


def _step_timeline(data: dict[str, Any]) -> Mapping[str, Any]:
    return {
        "kind": "timeline",
        "title": f"What every trajectory did during step {data['step']}; the trainer on top",
        "rows": data["rows"],
        "y": "trajectories",
    }


NAMED: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "learning_curve": _learning_curve,
    "step_time": _step_time,
    "length_spread": _length_spread,
    "sandbox_start": _sandbox_start,
    "step_timeline": _step_timeline,
}
