"""The claims as data, and the records that an experiment gives back."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from harness import rules
from harness.rules import Condition
from harness.stats import Estimate

CLAIMS = Path(__file__).parent / "claims.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One reported figure; ``claims.toml`` says what each field is. ``experiment`` is "module.function" below
    ``harness.experiments``, or None. ``twin``: why the twin has no say in it, else empty."""

    id: str
    statement: str
    reported: Mapping[str, Any]
    metric: str = ""
    source: str = ""
    experiment: str | None = None
    back_ends: tuple[str, ...] = ()
    rule: str = ""
    require: tuple[Condition, ...] = ()
    enough: tuple[Condition, ...] = ()
    twin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What an experiment measured on this machine.

    ``holds`` is the experiment's own answer; it counts where the claim has no conditions, and None always means that
    the measurement can't decide it. ``sources`` are digests of the shards it was computed from; ``detail`` is all else
    that a reader needs to judge the figure, as JSON."""

    estimate: Estimate | None
    unit: str
    holds: bool | None
    detail: Mapping[str, Any]
    sources: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)  # name -> data for harness.figures


def load(path: Path = CLAIMS) -> list[Claim]:
    """Raises UsageError for a source that is not in the table, or a condition that can't be read."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    return [_claim(row, document["sources"]) for row in document["claim"]]


def select(ids: tuple[str, ...]) -> list[Claim]:
    """The claims named, or all. Raises UsageError on an unknown id."""
    claims = load()
    known = {claim.id: claim for claim in claims}
    for wanted in ids:
        if wanted not in known:
            raise UsageError(f"claim {wanted!r} is unknown; known: {', '.join(known)}; see `harness list`")
    return [known[i] for i in ids] if ids else claims


def _claim(row: dict[str, Any], sources: Mapping[str, str]) -> Claim:
    if row["source"] not in sources:
        raise UsageError(f"claim {row['id']!r}: source {row['source']!r} is not one of {', '.join(sources)}")
    return Claim(
        **row
        | {
            "source": sources[row["source"]],
            "back_ends": tuple(row.get("back_ends", ())),
            "require": tuple(map(rules.parse, row.get("require", ()))),
            "enough": tuple(map(rules.parse, row.get("enough", ()))),
        }
    )
