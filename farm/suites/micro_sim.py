"""The micro suite's episodes without sandboxes: what the usual commands print and change, and what the tests say.

It gives the same observations as a real sandbox for the commands below and for sed edits, a thousand times faster,
and makes the transcripts that the base policy is trained on. Anything else is answered as by a shell that lacks the
command: rewards that count come from real sandboxes only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from farm.suites.micro_edits import Edit
from farm.suites.micro_problem import CHECK_COMMAND, Problem, grade, run_calls

READ = "cat *.py"
CHECK = CHECK_COMMAND
UNDO = "git checkout -q ."
SUBMIT = "submit"

_SED = re.compile(r"sed -i 's\|(\*?[^|*\\.\[\]^$\n']+)\|([^|\\&\n']*)\|' \*\.py")


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
            return self.source
        if command == CHECK:
            return self._check()
        if command == UNDO:
            self.source = self.problem.broken
            return ""
        match = _SED.fullmatch(command)
        if match:
            self.source = Edit(old=match[1], new=match[2]).apply(self.source)
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
