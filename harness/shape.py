"""What a report, its origin and the record of a finished stage must hold to be read.

Only what this program goes by is checked; a file from elsewhere is refused with its first fault, before anything is
made of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from farm.errors import UsageError


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Cell(_Shape):
    """A figure that is not finite is null."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    unit: str


class _Reported(_Shape):
    text: str
    source: str


class _Detail(_Shape):
    statement: str
    metric: str
    rule: str
    require: list[str]
    experiment: str | None
    back_ends: dict[str, str]
    stages: list[str]
    measured: dict[str, Any] = Field(default_factory=dict)


class _Claim(_Shape):
    id: str
    status: str
    reported: _Reported
    here: _Cell | None
    twin: dict[str, Any] | None
    detail: _Detail


class _Machine(_Shape):
    cores: int | None
    memory_gib: float
    processor: str
    system: str
    python: str


class _Provenance(_Shape):
    profile: str
    commit: str | None
    dirty: bool
    constraints: str
    versions: dict[str, str]
    machine: _Machine
    back_ends: dict[str, str]


class Report(_Shape):
    """``report.json`` (:mod:`harness.document`)."""

    version: str
    provenance: _Provenance
    stages: dict[str, dict[str, Any]]
    claims: list[_Claim]


class Origin(_Shape):
    """``logs/origin.json``: the run that the kept logs are of."""

    version: str
    provenance: _Provenance
    problems: dict[str, str]


class Done(_Shape):
    """``done.json`` of a finished stage. ``kept``: of the files kept beside it. Older ones do
    not say it, nor whether the checkout was dirty, nor the machine."""

    wall_s: float
    commit: str | None = None
    dirty: bool | None = None
    machine: str | None = None
    key: dict[str, str] | None = None
    kept: str | None = None


def check(shape: type[_Shape], value: Any, *, where: Path, remedy: str) -> None:
    """Raises UsageError with the first fault of ``value``, ``where`` it was read and what to do (``remedy``)."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        said = first["msg"][0].lower() + first["msg"][1:]
        raise UsageError(f"{where}: {place}: {said}; {remedy}" if place else f"{where}: {said}; {remedy}") from None


def read(shape: type[_Shape], file: Path, *, remedy: str) -> Mapping[str, Any]:
    """The JSON object in ``file``, checked. Raises FileNotFoundError, and UsageError for all else that is wrong."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: is not readable JSON ({error}); {remedy}") from None
    check(shape, value, where=file, remedy=remedy)
    return dict(value)
