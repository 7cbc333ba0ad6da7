"""Test logs to statuses: test id -> PASSED | FAILED | ERROR.

Only what stands between the first start marker and the last end marker counts. A test that is reported with two
different statuses is an ERROR: one of the two lines is wrong or forged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"

_STATUS = re.compile(r"(PASSED|FAILED|ERROR) (.+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = re.compile(r"=+ short test summary info =+")
_HEADING = re.compile(r"=+ .* =+")


def parse_micro(log: str) -> dict[str, str]:
    """Lines ``PASSED <id>``, ``FAILED <id>``, ``ERROR <id>``."""
    found = (_STATUS.fullmatch(line) for line in _region(log))
    return _merge((match[1], match[2].rstrip()) for match in found if match)


def parse_pytest(log: str) -> dict[str, str]:
    """The "short test summary info" sections of ``pytest -rA``.

    Skipped and expected failures have no status: code under test can cause both (``pytest.skip()``), so neither shows
    that a test passed.
    """
    return _merge(_summary_lines(_region(log)))


PARSERS: dict[str, Callable[[str], dict[str, str]]] = {"micro": parse_micro, "pytest": parse_pytest}


def _region(log: str) -> list[str]:
    """The lines between the markers; none when a marker is missing."""
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if START_MARKER in line]
    ends = [i for i, line in enumerate(lines) if END_MARKER in line]
    return lines[starts[0] + 1 : ends[-1]] if starts and ends else []


def _summary_lines(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    inside = False
    for coloured in lines:
        line = _COLOUR.sub("", coloured)
        if _HEADING.fullmatch(line):
            inside = bool(_SUMMARY.fullmatch(line))
        elif inside and (match := _STATUS.fullmatch(line)):
            yield match[1], _test_id(match[1], match[2].rstrip())


def _test_id(status: str, rest: str) -> str:
    """The id without the " - message" that follows a failure. Parameters in brackets may hold " - " themselves."""
    if status == "PASSED":
        return rest
    place = rest.find(" - ")
    while place >= 0:
        if "[" not in rest[:place] or rest[place - 1] == "]":
            return rest[:place]
        place = rest.find(" - ", place + 1)
    return rest


def _merge(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for status, test in lines:
        found[test] = status if found.get(test, status) == status else "ERROR"
    return found
