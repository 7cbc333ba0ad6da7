"""PURE: what a log of the task's own tests says. No sandbox, no clock; also shipped into folders for Harbor, where it
stands beside a copy of ``parsers.py`` and nothing else of the farm.

The code under test runs in the same process as the tests, so it can print what it likes. The markers of the log carry a
random word made for this grading, the tests' exit code is reported under the same word, a non-zero one with no failing
test is not believed, neither is a test reported in two ways, and every expected test must be reported as passed. Where
``checked``, only status lines that end in a second word count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farm.grader.parsers import END_MARKER, START_MARKER

_MARKER_LINE = r"^([ \t]*(?:echo|:)[ \t]+['\"]?)({})(['\"]?[ \t]*)$"
_KEEPS_EXIT = r"(?:^(\w+)=\$\?\n)?"  # a script may keep the exit code itself, right before the marker


@dataclass(frozen=True)
class Verdict:
    """``statuses``: of the expected tests; ``found``: of all that the log reports; ``ran``: from start to end;
    ``believed``: the exit code agrees with the tests."""

    statuses: Mapping[str, str]
    found: Mapping[str, str]
    ran: bool
    believed: bool
    exit_code: int
    region: Sequence[str]

    @property
    def resolved(self) -> bool:
        every = bool(self.statuses) and all(status == "PASSED" for status in self.statuses.values())
        return self.ran and self.believed and every


def marked(script: str, word: str) -> str | None:
    """The eval script with ``word`` in its markers and a report of the tests' exit code; None when it does not write
    both markers, each once and on a line of its own."""
    script, starts = re.subn(
        _MARKER_LINE.format(re.escape(START_MARKER)), rf"\g<1>\g<2> {word}\g<3>", script, flags=re.MULTILINE
    )
    script, ends = re.subn(
        _KEEPS_EXIT + _MARKER_LINE.format(re.escape(END_MARKER)),
        lambda m: (
            "FARM_TESTS_EXIT=$?\n"
            + (f"{m[1]}=$FARM_TESTS_EXIT\n" if m[1] else "")
            + f"{m[2]}{m[3]} {word}{m[4]}\necho {word} exit $FARM_TESTS_EXIT"
        ),
        script,
        flags=re.MULTILINE,
    )
    return script if starts == ends == 1 else None


def judge(
    log: str,
    *,
    expected: Sequence[str],
    parse: Callable[[str], Mapping[str, str]],
    word: str,
    status_word: str | None,
    exit_code: int,
    timed_out: bool,
) -> Verdict:
    """Judge the log of a script that :func:`marked` made. ``status_word``: what status lines must end in, None where
    they need not; ``exit_code``: of the script, taken where the log does not report the tests' own."""
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if f"{START_MARKER} {word}" in line]
    ends = [i for i, line in enumerate(lines) if f"{END_MARKER} {word}" in line]
    exits = [line.split()[-1] for line in lines if line.startswith(f"{word} exit ")]
    ran = bool(starts and ends and len(exits) == 1 and not timed_out)
    region = lines[starts[0] + 1 : ends[-1]] if ran else lines
    believable = region
    if status_word is not None:
        ending = f" {status_word}"
        believable = [line[: -len(ending)] for line in region if line.endswith(ending)]
    found = parse("\n".join([START_MARKER, *believable, END_MARKER]))
    code = int(exits[0]) if ran else exit_code
    return Verdict(
        statuses={test: found.get(test, "MISSING") for test in expected},
        found=found,
        ran=ran,
        believed=code == 0 or any(status != "PASSED" for status in found.values()),
        exit_code=code,
        region=region,
    )
