"""The micro suite's episodes without sandboxes: what the usual commands print and change, and what the tests say.

It gives the same observations as a real sandbox for the commands below and for sed edits, a thousand times faster,
and makes the transcripts that the base policy is trained on. Anything else is answered as by a shell that lacks the
command: rewards that count come from real sandboxes only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from farm.suites.micro_problem import CHECK_COMMAND, Edit, Problem, grade, run_calls

READ = "grep -n . *.py"
CHECK = CHECK_COMMAND
UNDO = "git checkout -q ."
SUBMIT = "submit"

_SED = re.compile(r"sed -i '(\d+)s\|([^|\\.\[\]^$]+)\|([^|\\&]*)\|' \*\.py")
_TOKEN = re.compile(r"[+-]=|//|[<>=!]=|not in|[-+*%<>]|\d+|\w+")
_SWAPS = {
    "+=": ("-=",),
    "-=": ("+=",),
    "and": ("or",),
    "or": ("and",),
    "==": ("!=",),
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
    "if": ("if not",),
    "return": ("return not",),
    "True": ("False",),
    "False": ("True",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
}
_ARITH = ("+", "-", "*", "//", "%")
_ORDER = ("<", "<=", ">", ">=")
_LOGIC = ("and", "or")


@dataclass(slots=True)
class Simulation:
    """One episode's repository. ``source`` is the module as it stands."""

    problem: Problem
    source: str = field(init=False)

    def __post_init__(self) -> None:
        self.source = self.problem.broken

    def run(self, command: str) -> str:
        """What the command prints; the module is changed as the command would."""
        if command == READ:
            return "".join(f"{number}:{line}\n" for number, line in enumerate(self.source.splitlines(), 1))
        if command == CHECK:
            return self._check()
        if command == UNDO:
            self.source = self.problem.broken
            return ""
        match = _SED.fullmatch(command)
        if match:
            self.source = Edit(line=int(match[1]), old=match[2], new=match[3]).apply(self.source)
            return ""
        return f"bash: line 1: {command.split()[0] if command.split() else ''}: command not found\n"

    def solved(self) -> bool:
        """Whether all hidden tests pass now."""
        return all(grade(self.problem.hidden, self.source).values())

    def _check(self) -> str:
        calls = self.problem.visible
        try:
            results = run_calls(self.source, calls)
        except Exception as error:  # the check prints whatever reading the module raises
            return f"ERROR {type(error).__name__}\n"
        failed = sum(results[call.name] != call.expected for call in calls)
        return f"FAILED {failed} of {len(calls)}\n" if failed else "PASSED\n"


def candidate_edits(source: str) -> list[Edit]:
    """Every one-token edit that somebody who can't read code but knows the bugs might try, by line."""
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("def ") or line.lstrip().startswith("for "):
            continue
        for match in _TOKEN.finditer(line):
            old = match[0]
            if line.index(old) == match.start():  # sed takes the first one
                found += [Edit(line=number, old=old, new=new) for new in _replacements(old)]
    return found


def _replacements(old: str) -> tuple[str, ...]:
    if old.isdigit():
        return (str(int(old) - 1), str(int(old) + 1)) if int(old) else ("1",)
    for group in (_ARITH, _ORDER):
        if old in group:
            return tuple(new for new in group if new != old)
    return _SWAPS.get(old, ())
