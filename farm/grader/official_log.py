"""PURE: the official eval script with markers that can't be guessed, and the log that official grading is given.

Official grading takes what stands between the first start marker and the next end marker, and when it finds no test
there it searches the whole log. Code under test runs before the tests as well (nearly every eval script installs the
repository first), so it could write a whole region of its own. Here the markers that the script writes carry a random
word; only what they enclose reaches official grading, with every other marker in it defused. What code under test
prints *between* the true markers is part of the test output, as in the official harness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from farm.grader.parsers import END_MARKER, START_MARKER

EXIT_MARKER = ">>>>> Test Exit Code"

_MARKERS = (START_MARKER, END_MARKER, EXIT_MARKER)
_LINE = r"^([ \t]*)(:|echo)([ \t]+['\"]){}(['\"]?[^\n]*)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedScript:
    """``text`` is what to run. ``at_most``: how often the shell itself writes each marker of ``_MARKERS``."""

    text: str
    word: str
    at_most: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficialLog:
    """``text`` is for official grading. ``started``, ``ended``: whether the true markers are there. ``forged``: there
    are more of them than the script writes. ``exit_code`` of the tests, None where the script does not tell it or did
    not get so far."""

    text: str
    started: bool
    ended: bool
    forged: bool
    exit_code: int | None


def mark(script: str, word: str) -> MarkedScript | None:
    """``script`` with ``word`` behind its markers; None when it does not write both markers, once each, on lines of
    their own. The script removes itself first, so that what it runs can't simply read it."""
    traced = re.search(r"^set [^\n]*-\w*x", script, re.MULTILINE) is not None
    at_most = []
    for marker in _MARKERS:
        lines = re.findall(_LINE.format(re.escape(marker)), script, re.MULTILINE)
        if len(lines) != 1 and marker != EXIT_MARKER:
            return None
        script = re.sub(
            _LINE.format(re.escape(marker)), rf"\g<1>\g<2>\g<3>{marker} {word}\g<4>", script, flags=re.MULTILINE
        )
        at_most.append(sum((how == "echo") + traced for _, how, _, _ in lines))
    start, end, code = at_most
    first, newline, rest = script.partition("\n")
    text = f'{first}\nrm -f -- "$0"\n{rest}' if first.startswith("#!") and newline else f'rm -f -- "$0"\n{script}'
    return MarkedScript(text=text, word=word, at_most=(start, end, code))


def official_log(output: str, script: MarkedScript) -> OfficialLog:
    """What ``output`` (stdout and stderr of ``script`` in order) is worth."""
    true = [f"{marker} {script.word}" for marker in _MARKERS]
    forged = any(output.count(marker) > most for marker, most in zip(true, script.at_most, strict=True))
    _, started, rest = output.partition(true[0])
    region, ended, tail = rest.partition(true[1])
    code = re.search(rf"^{re.escape(true[2])}: (\d+)\r?$", tail, re.MULTILINE)
    tells_code = script.at_most[2] > 0
    lines = [START_MARKER + _defused(region) + END_MARKER if ended else _defused(region)]
    if code:
        lines.append(f"{EXIT_MARKER}: {code[1]}")
    return OfficialLog(
        text="\n".join(lines) + "\n",
        started=bool(started),
        ended=bool(ended) and (code is not None or not tells_code),
        forged=forged,
        exit_code=int(code[1]) if code else None,
    )


def _defused(text: str) -> str:
    """``text`` without a marker: each keeps its words and loses an arrow."""
    for marker in _MARKERS:
        text = text.replace(marker, marker[1:])
    return text
