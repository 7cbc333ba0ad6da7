"""Verdicts from rules that are data: conditions over the published figures of a row, such as ``here.low > 0``.

A side is a number or the path of a figure: ``here.value``, ``here.low``, ``here.high``, ``here.n``, or ``measured.``
and the path in what the experiment tells (``measured.gain_over_base.low``). Only published figures count, so anybody
can judge a report again from its JSON. What is missing or not finite can't satisfy anything.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.errors import UsageError

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"(\S+) (<=|>=|==|<|>) (\S+)")


@dataclass(frozen=True, slots=True)
class Condition:
    left: str
    sign: str
    right: str

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"

    def holds(self, figures: Mapping[str, Any]) -> bool | None:
        """None when one of its figures is missing."""
        left, right = (_value(side, figures) for side in (self.left, self.right))
        return None if left is None or right is None else _OPERATORS[self.sign](left, right)


def parse(text: str) -> Condition:
    """Raises UsageError for what is not ``FIGURE <sign> FIGURE-OR-NUMBER``."""
    found = _FORM.fullmatch(text.strip())
    if not found:
        raise UsageError(f"condition {text!r} is not readable; write FIGURE SIGN FIGURE, for example 'here.low > 0'")
    return Condition(*found.groups())


def judge(conditions: Sequence[Condition], figures: Mapping[str, Any]) -> bool | None:
    """Whether all hold; None when one can't be told."""
    answers = [condition.holds(figures) for condition in conditions]
    return None if None in answers else all(answers)


def untold(conditions: Sequence[Condition], figures: Mapping[str, Any]) -> list[str]:
    """The conditions that can't be told, because a figure is missing."""
    return [str(condition) for condition in conditions if condition.holds(figures) is None]


def unmet(conditions: Sequence[Condition], figures: Mapping[str, Any]) -> list[str]:
    """The conditions that do not hold or can't be told."""
    return [str(condition) for condition in conditions if not condition.holds(figures)]


def _value(side: str, figures: Mapping[str, Any]) -> float | None:
    try:
        return float(side)
    except ValueError:
        value = _at(side.split("."), figures)
    return number(value)


def number(value: Any) -> float | None:
    """``value`` as a finite number; None when it is none."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer beyond any float
        return None
    return found if math.isfinite(found) else None


def _at(parts: Sequence[str], value: Any) -> Any:
    """The value at a path; a key may hold dots itself ("at_2.5x")."""
    if not parts:
        return value
    if not isinstance(value, Mapping):
        return None
    for length in range(1, len(parts) + 1):
        key = ".".join(parts[:length])
        if key in value and (found := _at(parts[length:], value[key])) is not None:
            return found
    return None
