"""What a report, its origin and the record of a finished stage must hold to be read.

Only what this program goes by is checked; a file from elsewhere is refused with its first fault, before anything is
made of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator

from farm.errors import UsageError

_LONGEST_INTEGER = 19  # digits, of 64 bits: what no counter of ours goes beyond


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Cell(_Shape):
    """A figure that is not finite is null."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    unit: str

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"the interval's low end {self.low:g} is above its high end {self.high:g}")
        return self


class _Twin(_Shape):
    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    kind: str | None = None
    agrees: bool | None = None
    rule: str = ""
    detail: dict[str, Any] = Field(default_factory=dict)


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
    twin: _Twin | None
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


class Predictions(RootModel[dict[str, _Twin]]):
    """``predictions.json`` of the twin: claim id -> cell."""


class Done(_Shape):
    """``done.json`` of a finished stage. ``kept``: digest of the files kept beside it. Older ones say neither that nor
    whether the checkout was dirty, nor the machine."""

    wall_s: float
    commit: str | None = None
    dirty: bool | None = None
    machine: str | None = None
    key: dict[str, str] | None = None
    kept: str | None = None


def loads(text: str) -> Any:
    """The value that ``text`` is as JSON. Raises ValueError where it is none, for numbers that no figure of ours is
    (not finite, or integers of more than 64 bits), and where it is nested deeper than can be read."""
    try:
        return json.loads(text, parse_float=_finite, parse_int=_integer, parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:_LONGEST_INTEGER]} is not a finite number")
    return number


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(digits.lstrip('-'))} digits")
    return int(digits)


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def check(shape: type[BaseModel], value: Any, *, where: Path, remedy: str) -> None:
    """Raises UsageError with the first fault of ``value``, ``where`` it was read and what to do (``remedy``)."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        said = said[0].lower() + said[1:]
        raise UsageError(f"{where}: {place}: {said}; {remedy}" if place else f"{where}: {said}; {remedy}") from None


def read(shape: type[BaseModel], file: Path, *, remedy: str) -> Mapping[str, Any]:
    """The JSON object in ``file``, checked. Raises FileNotFoundError, and UsageError for all else that is wrong."""
    try:
        value = loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: is not readable JSON ({error}); {remedy}") from None
    check(shape, value, where=file, remedy=remedy)
    return dict(value)
