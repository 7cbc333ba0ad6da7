"""Edits of the micro suite: replace an operator, a number or a name, found by the word beside it.

``sed -i 's|+ b|- b|' *.py``: the text to replace is copied from the listing, so an edit needs no line number. A text
that occurs twice in the file is not an edit: it would change both places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r"[+-]=|//|[<>=!]=|not in|[-+*%<>=,(]|\d+|\w+")
_ARITH = ("+", "-", "*", "//", "%")
_ORDER = ("<", "<=", ">", ">=")
_PAIRS = (
    ("+=", "-="),
    ("and", "or"),
    ("==", "!="),
    ("in", "not in"),
    ("True", "False"),
    ("min", "max"),
    ("any", "all"),
)
_SWAPS = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_BEFORE_NOT = ("if", "and", "or")


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
    """Every small edit that somebody who knows the bugs, but not the code, might try: in order, none twice."""
    found: dict[Edit, None] = {}
    for line in source.splitlines():
        if not line.startswith("def ") and not line.lstrip().startswith("for "):
            for edit in _edits(line):
                if source.count(edit.old) == 1:
                    found[edit] = None
    return list(found)


def _edits(line: str) -> Iterator[Edit]:
    tokens = list(_TOKEN.finditer(line))
    for place, token in enumerate(tokens):
        text = token[0]
        before = line[tokens[place - 1].start() : token.start()] if place else ""
        after = line[token.end() : tokens[place + 1].end()] if place + 1 < len(tokens) else ""
        if text.isdigit():
            for number in {max(0, int(text) - 1), int(text) + 1} - {int(text)}:
                yield Edit(old=before + text, new=f"{before}{number}")
        elif text in ("in", "not in", "True", "False"):
            yield Edit(old=before + text, new=before + _SWAPS[text])
        elif text in ("min", "max", "any", "all"):
            call = line[token.end() : tokens[place + 2].end()]
            yield Edit(old=text + call, new=_SWAPS[text] + call)
        else:
            yield from (Edit(old=text + after, new=other + after) for other in _others(text))
        if text in _BEFORE_NOT and after != " not":
            yield Edit(old=text + after, new=f"{text} not{after}")


def _others(operator: str) -> tuple[str, ...]:
    for group in (_ARITH, _ORDER):
        if operator in group:
            return tuple(other for other in group if other != operator)
    return (_SWAPS[operator],) if operator in _SWAPS else ()
