"""The report as one JSON document: pure, from what was measured and what the logs of the stages say.

The columns are never mixed: ``here`` holds only what this run measured on its machine, ``twin`` what the twin predicts
at the reference's scale, ``reported`` the reference figure. All figures are rounded once, to six digits, and verdicts
are found on the rounded ones, so that a report can be judged again from its JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from harness import rules, shape
from harness.claims import Claim, Measurement

SCHEMA = 2
HOLDS, DIFFERS, NOT_RUN, NOT_BUILT = "holds", "differs", "not run", "not built yet"
TOO_LITTLE = "too little data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claim with what came of it. ``stages``: those that its experiment read; ``twin_problem``: what broke the twin,
    where it has a say in the claim."""

    claim: Claim
    measurement: Measurement | None
    problem: str = ""
    stages: tuple[str, ...] = ()
    twin: Mapping[str, Any] | None = None
    twin_problem: str = ""


def build(
    rows: Sequence[Row], *, version: str, provenance: Mapping[str, Any], stages: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole document. ``stages``: name -> what its logs say (:mod:`harness.stage_facts`)."""
    document: dict[str, Any] = plain(
        {
            "schema": SCHEMA,
            "version": version,
            "provenance": provenance,
            "stages": stages,
            "claims": [_row(row, provenance.get("back_ends", {}), stages) for row in rows],
        }
    )
    return document


def text(document: Mapping[str, Any]) -> str:
    """The bytes of ``report.json``. Keys stay in order: tables and figures made of what is read back are the same."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(path: Path) -> dict[str, Any]:
    """A report that was written. Raises UsageError when there is none, or it is of another schema."""
    file = path / "report.json" if path.is_dir() else path
    try:
        document = shape.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file}: no such report; `harness reproduce --all` writes one") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: is not a readable report ({error})") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{file}: is a report of schema {schema}, this program reads {SCHEMA}; make it anew")
    shape.check(shape.Report, document, where=file, remedy="`harness report --rebuild` makes it anew from its logs")
    return dict(document)


def verdict(claim: Claim, row: Mapping[str, Any]) -> tuple[str, str]:
    """(status, why it could not be judged) of a row of the document, by the claim's rule as it is now.

    A row without figures was not run, whatever it says, and so was one whose experiment could not decide. One that
    rests on too little data, or whose figure or interval is not finite, is not judged. A row that only its own
    experiment can judge keeps its status."""
    if (row["here"] is None and not row["detail"].get("measured")) or row["detail"].get("undecided"):
        return (NOT_BUILT if row["status"] == NOT_BUILT else NOT_RUN), ""
    here = row["here"]
    if here is not None and any(rules.number(here.get(part)) is None for part in ("value", "low", "high")):
        return NOT_RUN, "the rule can't be judged: the figure or its interval is not finite"
    figures = {"here": here or {}, "measured": row["detail"].get("measured", {})}
    if lacking := rules.unmet(claim.enough, figures):
        return NOT_RUN, f"{TOO_LITTLE}: the rule is judged from {' and '.join(lacking)} on"
    if not claim.require:
        return row["status"], ""
    answer = rules.judge(claim.require, figures)
    if answer is None:
        return NOT_RUN, f"the rule can't be judged: no figure for {', '.join(rules.untold(claim.require, figures))}"
    return (HOLDS if answer else DIFFERS), ""


def plain(value: Any) -> Any:
    """``value`` as JSON: floats with six digits, those that are not finite as null."""
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    number = float(value)  # numpy's scalars too
    return float(f"{number:.6g}") if math.isfinite(number) else None


def combined(digests: Sequence[str]) -> str:
    """One digest for many, as ``printf '%s\\n' ... | sha256sum`` gives it."""
    return hashlib.sha256("".join(f"{d}\n" for d in digests).encode()).hexdigest()


def _made_by(names: Sequence[str], stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What made the stages ``names``: each commit, machine and state of the checkout once, with its stages."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        if name in stages:
            stage = stages[name]
            found.setdefault((stage["commit"], stage.get("dirty"), stage.get("machine")), []).append(name)
    return [
        {"commit": commit, "dirty": dirty, "machine": machine, "stages": made}
        for (commit, dirty, machine), made in found.items()
    ]


def _row(row: Row, back_ends: Mapping[str, str], stages: Mapping[str, Any]) -> dict[str, Any]:
    claim, measurement = row.claim, row.measurement
    detail: dict[str, Any] = {
        "statement": claim.statement,
        "metric": claim.metric,
        "rule": claim.rule,
        "require": [str(condition) for condition in claim.require],
        "enough": [str(condition) for condition in claim.enough],
        "experiment": claim.experiment,
        "back_ends": {role: back_ends.get(role, "") for role in claim.back_ends},
        "stages": list(row.stages),
        "made_by": _made_by(row.stages, stages),
    }
    if claim.twin:
        detail["no_twin"] = claim.twin
    elif row.twin_problem:
        detail["twin_problem"] = row.twin_problem
    if row.problem:
        detail["problem"] = row.problem
    here = None
    if measurement:
        here = _here(measurement)
        detail |= {
            "measured": dict(measurement.detail),
            "sources": {"shards": len(measurement.sources), "sha256": combined(measurement.sources)},
            "figures": dict(measurement.figures),
            "undecided": measurement.holds is None,
        }
    made: dict[str, Any] = plain(
        {
            "id": claim.id,
            "status": _own_answer(row),
            "reported": dict(claim.reported) | {"source": claim.source},
            "here": here,
            "twin": row.twin,
            "detail": detail,
        }
    )
    made["status"], why = verdict(claim, made)
    if why:
        made["detail"]["problem"] = why
    return made


def _own_answer(row: Row) -> str:
    if row.claim.experiment is None:
        return NOT_BUILT
    if row.measurement is None or row.measurement.holds is None:
        return NOT_RUN
    return HOLDS if row.measurement.holds else DIFFERS


def _here(measurement: Measurement) -> dict[str, Any] | None:
    estimate = measurement.estimate
    if estimate is None:
        return None
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "n": estimate.n,
        "unit": measurement.unit,
    }
