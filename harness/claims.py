"""The claims as data, and the records that an experiment gives back."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from harness.stats import Estimate

CLAIMS = Path(__file__).parent / "claims.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One reported figure. ``experiment`` is "module.function" below ``harness.experiments``, or None."""

    id: str
    statement: str
    reported: Mapping[str, Any]
    experiment: str | None = None
    rule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What an experiment measured on this machine.

    ``holds`` follows from the claim's rule; None means the measurement can't decide it. ``sources`` are digests of the
    shards it was computed from; ``detail`` is everything else that a reader needs to judge the figure."""

    estimate: Estimate | None
    unit: str
    holds: bool | None
    detail: Mapping[str, Any]
    sources: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)  # name -> data for harness.figures


def load() -> list[Claim]:
    with CLAIMS.open("rb") as file:
        return [Claim(**row) for row in tomllib.load(file)["claim"]]


def select(ids: tuple[str, ...]) -> list[Claim]:
    """The claims named, or all. Raises UsageError on an unknown id."""
    claims = load()
    known = {claim.id: claim for claim in claims}
    for wanted in ids:
        if wanted not in known:
            raise UsageError(f"claim {wanted!r} is unknown; known: {', '.join(known)}; see `harness list`")
    return [known[i] for i in ids] if ids else claims
