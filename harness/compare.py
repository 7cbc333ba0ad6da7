"""Reports against the rules, and against each other. Pure: documents go in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import stats
from harness.claims import Claim
from harness.document import HOLDS, verdict

LEVEL = 0.05
_Z = 1.959964  # half of a 95 % interval, in standard errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """``recorded``: what the report says; ``now``: what the rules say of its figures; ``before``: the baseline's
    verdict, None when it has none."""

    claim: str
    recorded: str
    now: str
    before: str | None
    why: str = ""

    @property
    def lost(self) -> bool:
        """It held and no longer does."""
        return HOLDS in (self.before, self.recorded) and self.now != HOLDS


def check(
    document: Mapping[str, Any], claims: Sequence[Claim], baseline: Mapping[str, Any] | None = None
) -> list[Judged]:
    """Every claim judged by its rule on the report's figures. A claim that the report lacks is "missing"."""
    rows = {row["id"]: row for row in document["claims"]}
    before = {row["id"]: row["status"] for row in baseline["claims"]} if baseline else {}
    judged = []
    for claim in claims:
        if claim.id not in rows:
            judged.append(Judged(claim=claim.id, recorded="missing", now="missing", before=before.get(claim.id)))
            continue
        now, why = verdict(claim, rows[claim.id])
        judged.append(
            Judged(claim=claim.id, recorded=rows[claim.id]["status"], now=now, before=before.get(claim.id), why=why)
        )
    return judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One claim in two reports. ``p``: of the difference, adjusted for the number of rows (Holm); None where there is
    nothing to test. ``word``: equal, same within noise, higher, lower, changed (a count that must be the same), not
    tested (no interval says how wide either is), not comparable, only in A, only in B, neither."""

    claim: str
    a: Mapping[str, Any] | None
    b: Mapping[str, Any] | None
    status_a: str
    status_b: str
    word: str
    p: float | None = None

    @property
    def beyond_noise(self) -> bool:
        return self.word in ("higher", "lower", "changed") or self.status_a != self.status_b


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """Row by row. The two are taken as independent measurements, each as wide as its interval says."""
    left, right = ({row["id"]: row for row in document["claims"]} for document in (a, b))
    names = list(dict.fromkeys([*left, *right]))
    tested = {}
    for name in names:
        p = _p(_cell(left, name), _cell(right, name))
        if p is not None:
            tested[name] = p
    adjusted = dict(zip(tested, stats.holm(list(tested.values())), strict=True)) if tested else {}
    return [
        Change(
            claim=name,
            a=_cell(left, name),
            b=_cell(right, name),
            status_a=left[name]["status"] if name in left else "missing",
            status_b=right[name]["status"] if name in right else "missing",
            word=_word(
                _cell(left, name),
                _cell(right, name),
                adjusted.get(name),
                exact=any(_is_exact(rows.get(name)) for rows in (left, right)),
            ),
            p=adjusted.get(name),
        )
        for name in names
    ]


def differing_origins(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What makes the two hard to compare: another profile, other back ends, another machine."""
    words = {"profile": "profile", "back_ends": "back ends", "machine": "machine"}
    return [word for key, word in words.items() if a["provenance"].get(key) != b["provenance"].get(key)]


def _cell(rows: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    cell: Mapping[str, Any] | None = rows[name]["here"] if name in rows else None
    return cell


def _p(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> float | None:
    """Two-sided, normal; None where one is missing, the units differ or neither has a width."""
    if a is None or b is None or a["unit"] != b["unit"]:
        return None
    if None in (a["value"], b["value"], a["low"], a["high"], b["low"], b["high"]):
        return None
    error = math.hypot(*((cell["high"] - cell["low"]) / (2 * _Z) for cell in (a, b)))
    return math.erfc(abs(b["value"] - a["value"]) / error / math.sqrt(2)) if error > 0 else None


def _is_exact(row: Mapping[str, Any] | None) -> bool:
    """Whether its figure is a count that every run must give: a whole number, or one whose rule names its value."""
    if row is None or row["here"] is None:
        return False
    named = any(condition.startswith("here.value == ") for condition in row["detail"].get("require", ()))
    return named or isinstance(row["here"]["value"], int)


def _word(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, p: float | None, *, exact: bool) -> str:
    if a is None or b is None:
        return "neither" if a is b else "only in A" if b is None else "only in B"
    if a["unit"] != b["unit"]:
        return "not comparable"
    if a["value"] == b["value"]:
        return "equal"
    if p is None:
        return "changed" if exact else "not tested"
    if p >= LEVEL:
        return "same within noise"
    return "higher" if b["value"] > a["value"] else "lower"
