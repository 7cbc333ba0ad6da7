"""Edits of the micro suite: one sed command that replaces an operator, a number or a word wherever it stands.

``sed -i 's|+ |- |' *.py``: an edit names no line, so its text must occur exactly once in the file. That is small enough
for a small policy, and still a real edit of a real file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

_ARITH = ("+ ", "- ", "* ", "// ", "% ")
_ORDER = ("< ", "<= ", "> ", ">= ")
_PAIRS = (
    ("+= ", "-= "), (" and ", " or "), ("== ", "!= "), ("True", "False"), ("min(", "max("), ("any(", "all("),
)  # fmt: skip
_BEFORE_NOT = ("if ", " and ", " or ", "any(", "all(")
_MEMBERS = ("a", "k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replace the first ``old`` of every line by ``new``, as one sed command does."""

    old: str
    new: str

    @property
    def command(self) -> str:
        return f"sed -i 's|{self.old}|{self.new}|' *.py"

    def apply(self, source: str) -> str:
        return "".join(line.replace(self.old, self.new, 1) for line in source.splitlines(keepends=True))


def candidate_edits(source: str) -> list[Edit]:
    """Every edit that somebody who knows the bugs, but can't tell which it is, might try; always in one order."""
    return [edit for edit in _ALL if source.count(edit.old) == 1]


def _all() -> tuple[Edit, ...]:
    edits = [(old, new) for group in (_ARITH, _ORDER) for old in group for new in group if old != new]
    edits += [pair for a, b in _PAIRS for pair in ((a, b), (b, a))]
    edits += [(word, f"{word}not ") for word in _BEFORE_NOT]
    edits += [(f"{name} in ", f"{name} not in ") for name in _MEMBERS] + [(" not in ", " in ")]
    edits += [step for low, high in pairwise("0123456789") for step in ((low, high), (high, low))]
    return tuple(Edit(old=old, new=new) for old, new in edits)


_ALL = _all()
