"""The parts of a report as words and tables of words, for Markdown and HTML alike. Pure: the document goes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.document import NOT_BUILT, NOT_RUN, TOO_LITTLE
from harness.provenance import machine_words

NOTHING = "–"
_ITEMS = 12

READING = (
    "**here** was measured by this run on this machine, on the back ends named with each claim; **twin** is a "
    "prediction at the reference's scale by simulation with the farm's own decisions; **reported** is the reference "
    "figure. The three are never mixed, and a verdict follows from the stated rule alone."
)
SUITE = (
    "With the embedded back ends the tasks are the micro suite: generated mini repositories with injected bugs, real "
    "sandboxes and real test runs. It is *not* SWE-bench: its pass rates compare with each other only."
)
INTERVALS = (
    "Brackets are 95 % intervals. What is resampled differs: tasks in pass rates and their differences, trajectories "
    "in throughput, groups in length-spread, versions in separation; steps in a row and starts at once count by "
    "batches. n counts observations; where an interval rests on fewer independent ones, the row says so."
)


@dataclass(frozen=True, slots=True)
class Table:
    """``rows`` are as long as ``head``; all cells are plain words."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def here(claim: Mapping[str, Any]) -> str:
    """The measured cell: value, unit, interval, n; else why it is empty."""
    cell = claim["here"]
    if cell is None:
        detail = claim["detail"]
        return str(detail.get("problem") or detail.get("measured", {}).get("not_compared") or claim["status"])
    note = cell["unit"].partition(" ")[2]
    little = f": {TOO_LITTLE}" if str(claim["detail"].get("problem", "")).startswith(TOO_LITTLE) else ""
    return f"{figure(cell)}{' ' if note else ''}{note}, n={cell['n']}{little}"


def figure(cell: Mapping[str, Any]) -> str:
    """Value, unit and interval of a measured cell."""
    value = f"{number(cell['value'])} {cell['unit'].partition(' ')[0]}"
    return value if cell["low"] == cell["high"] else f"{value} [{number(cell['low'])}, {number(cell['high'])}]"


def twin(claim: Mapping[str, Any]) -> str:
    """The predicted cell with its range and whether it agrees; else why there is none."""
    cell = claim["twin"]
    if cell is None:
        return NOTHING if claim["detail"].get("no_twin") else str(claim["detail"].get("twin_problem") or NOT_RUN)
    missing = " (range not computed)" if "range" in cell.get("detail", {}) else ""
    spread = missing if cell.get("low") is None else f" [{number(cell['low'])}, {number(cell['high'])}]"
    if cell.get("kind") == "calibration":
        return str(cell["text"])
    agrees = {True: ", agrees", False: ", does not agree"}.get(cell.get("agrees"), "")
    return f"{cell['text']}{spread}{agrees}"


def reported(claim: Mapping[str, Any]) -> str:
    return str(claim["reported"]["text"])


def claims(document: Mapping[str, Any]) -> Table:
    rows = [
        (f"{c['detail']['statement']} (`{c['id']}`)", here(c), twin(c), reported(c), c["status"])
        for c in document["claims"]
    ]
    return Table(("claim", "here (measured)", "twin (predicted)", "reported", "verdict"), tuple(rows))


def counts(document: Mapping[str, Any]) -> str:
    """For example: 9 hold, 2 differ."""
    words = {"holds": "hold", "differs": "differ", "not run": "not run", NOT_BUILT: NOT_BUILT}
    found = {status: sum(c["status"] == status for c in document["claims"]) for status in words}
    return ", ".join(f"{count} {words[status]}" for status, count in found.items() if count)


def what_was_run(claim: Mapping[str, Any]) -> str:
    """One line on back ends, stages and sources of a claim."""
    detail = claim["detail"]
    back_ends = ", ".join(f"{role}: {name}" for role, name in detail["back_ends"].items() if name)
    sources = detail.get("sources", {"shards": 0})
    parts = [
        f"experiment {detail['experiment']}" if detail["experiment"] else "no experiment yet",
        f"stages {', '.join(detail['stages'])}" if detail["stages"] else "",
        f"by {'; '.join(map(_made_by, detail['made_by']))}" if detail.get("made_by") else "",
        f"on {back_ends}" if back_ends else "",
        f"{sources['shards']} shards, together {sources['sha256'][:16]}" if sources["shards"] else "",
    ]
    return "; ".join(part for part in parts if part)


def code(commit: str | None, dirty: bool | None) -> str:
    """For example: 337193d57180 with uncommitted changes. ``dirty`` None: nothing says so (an old stage)."""
    words = {True: " with uncommitted changes", False: "", None: " (state not kept)"}
    return f"{commit[:12] if commit else 'an unknown commit'}{words[dirty]}"


def measured(claim: Mapping[str, Any]) -> Table | None:
    return _flat_table("measured here", claim["detail"].get("measured"))


def predicted(claim: Mapping[str, Any]) -> Table | None:
    """What the twin tells beside its figure."""
    cell = claim["twin"]
    if cell is None:
        return None
    return _flat_table("predicted by the twin", {"rule": cell.get("rule", ""), **cell.get("detail", {})})


def parts(claim: Mapping[str, Any]) -> Sequence[Table]:
    """The tables below a claim."""
    return [table for table in (measured(claim), predicted(claim)) if table is not None]


def noise(document: Mapping[str, Any]) -> Table:
    """How far each measured figure may be off by chance, and what a comparison could see."""
    rows = []
    for claim in document["claims"]:
        cell = claim["here"]
        if cell is None or cell["low"] == cell["high"]:
            continue
        told = claim["detail"].get("measured", {})
        errors, seen = told.get("standard_error_points") or {}, told.get("detectable_drop_points") or {}
        half = (cell["high"] - cell["low"]) / 2
        share = f" ({100 * half / abs(cell['value']):.0f} %)" if cell["value"] else ""
        rows.append(
            (
                claim["id"],
                f"{number(cell['value'])} {cell['unit'].partition(' ')[0]}",
                f"± {number(half)}{share}",
                str(cell["n"]),
                _both(errors),
                _both(seen),
            )
        )
    head = ("claim", "value", "half of the interval", "n", "standard error, points: these / such tasks",
            "detectable drop, points: these / such tasks")  # fmt: skip
    return Table(head, tuple(rows))


def costs(document: Mapping[str, Any]) -> Table:
    rows = []
    for name, run in runs(document):
        if "cost" not in run:
            continue
        found = run["cost"]
        rows.append(
            (
                name,
                str(found["trajectories"]),
                str(found["solved"]),
                *(
                    f"{number(found['per_trajectory'][key])} / {number(found['per_solved'][key])}"
                    for key in ("cpu_s", "prompt_tokens", "output_tokens")
                ),
                _money(found),
            )
        )
    head = ("run", "trajectories", "solved", "CPU s: per trajectory / per solved", "prompt tokens", "output tokens",
            "money")  # fmt: skip
    return Table(head, tuple(rows))


def stages(document: Mapping[str, Any]) -> Table:
    rows = []
    for name, stage in document["stages"].items():
        runs = list(stage["runs"].values())
        key = stage["key"] or {}
        rows.append(
            (
                name,
                code(stage["commit"], stage.get("dirty")),
                stage.get("machine") or NOTHING,
                " ".join(key.get(part, NOTHING)[:8] for part in ("code", "settings", "data")),
                number(stage["wall_s"]),
                ", ".join(str(run["tasks"]) for run in runs) or NOTHING,
                ", ".join(str(run["seed"]) for run in runs) or NOTHING,
                ", ".join(str(run["trajectories"]) for run in runs) or NOTHING,
                ", ".join(f"{len(run['shards'])}" for run in runs) or NOTHING,
            )
        )
    head = ("stage", "commit", "machine", "code, settings, data", "took (s)", "tasks", "seed", "trajectories", "shards")
    return Table(head, tuple(rows))


def provenance(document: Mapping[str, Any]) -> Table:
    found = document["provenance"]
    rows = [
        ("profile", str(found["profile"])),
        ("back ends", ", ".join(f"{role}: {name}" for role, name in found.get("back_ends", {}).items())),
        ("commit of the last run", f"{found['commit']}{' with uncommitted changes' if found['dirty'] else ''}"),
        ("lock (constraints.txt)", str(found["constraints"])),
        ("machine", machine_words(found["machine"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
    ]
    return Table(("what", "value"), tuple(rows))


def figures(document: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Figure name -> (the claim it belongs to, its data); those of the whole report belong to ""."""
    found: dict[str, tuple[str, Any]] = {}
    for claim in document["claims"]:
        for name, data in claim["detail"].get("figures", {}).items():
            found[name] = (claim["id"], data)
    active = {name: run["activity_s"] for name, run in runs(document) if run.get("activity_s")}
    if active:
        found["activity"] = (
            "",
            {"kind": "bars", "title": "Where a trajectory's time goes", "series": active, "x": "mean seconds"},
        )
    return found


def number(value: float | None) -> str:
    """Three digits, thousands with separators."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------ inside


def runs(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, stage in document["stages"].items():
        for place, run in stage["runs"].items():
            yield (name if len(stage["runs"]) == 1 else f"{name} {place}"), run


def _made_by(one: Mapping[str, Any]) -> str:
    return f"{code(one['commit'], one['dirty'])} ({', '.join(one['stages'])})"


def _flat_table(head: str, tree: Any) -> Table | None:
    rows = tuple(_flat("", tree)) if tree else ()
    return Table((head, "value"), rows) if rows else None


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """One row per leaf of a tree; lists of leaves, and small tables of numbers, on one line."""
    if path and isinstance(value, Mapping) and len(value) <= _ITEMS and all(map(_is_number, value.values())):
        yield path, ", ".join(f"{_words(key)} {_leaf(item)}" for key, item in value.items())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{path} · {_words(key)}" if path else _words(key), item)
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for index, item in enumerate(value, start=1):
            yield from _flat(f"{path} {index}", item)
    elif value not in ("", []):
        yield path, _leaf(value)


def _leaf(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_leaf(item) for item in value[:_ITEMS])
        return shown if len(value) <= _ITEMS else f"{shown}, … ({len(value)})"
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _both(pair: Mapping[str, Any]) -> str:
    if not pair:
        return NOTHING
    return f"{number(pair.get('these_tasks'))} / {number(pair.get('such_tasks'))}"


def _money(found: Mapping[str, Any]) -> str:
    each, solved = (found[key]["usd"] for key in ("per_trajectory", "per_solved"))
    if each is None:
        return f"{found['sandbox'] or 'this back end'} is not priced"
    return f"${each:.4f} / {NOTHING if solved is None else f'${solved:.4f}'}"
