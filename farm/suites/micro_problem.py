"""One problem of the micro suite: correct code, one injected bug, calls that show it, and the texts made from them.

Pure and deterministic: everything follows from the random generator passed in. Calls are run in this process, on code
that this package has generated itself and that always ends.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import CodeType

from farm.suites import micro_code, micro_issue, micro_names
from farm.suites.micro_edits import Edit, candidate_edits
from farm.suites.operators import Mutation, mutations

MAX_LINES = 10
CHECK_FILE = "t"
CHECK_COMMAND = f"python3 -IS {CHECK_FILE}"
SIZES = ("1", "2")  # functions in the module

_HIDDEN_CALLS = 10
_LEAST_FAILING = 4
_TRIES = 60  # argument tuples tried per function
_VAGUE_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One test: ``name`` is its id, ``call`` a Python expression, ``expected`` the repr of its right value."""

    name: str
    call: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A broken module with what repairs it and what tells broken from repaired."""

    repo: str
    module: str
    kind: str
    size: str
    fixed: str
    broken: str
    gold: Edit
    issue: str
    visible: tuple[Call, ...]
    hidden: tuple[Call, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]

    @property
    def files(self) -> dict[str, str]:
        """What the agent finds: the broken module and a check it can run."""
        return {self.module: self.broken, CHECK_FILE: _check_script(self.module, self.visible)}

    @property
    def test_path(self) -> str:
        return f"tests/test_{self.module}"

    @property
    def test_script(self) -> str:
        return _test_script(self.module, self.hidden)


def draw_problem(rng: Random, *, held_out: bool, kind: str, size: str) -> Problem:
    """A problem with a bug of ``kind`` in a module of ``size`` functions, on its side of the split."""
    repositories = micro_names.repositories(held_out=held_out)
    while True:
        names = rng.choice(repositories)
        functions = [micro_code.random_function(rng, name) for name in rng.sample(names.functions, int(size))]
        fixed = "".join(function.source for function in functions)
        if fixed.count("\n") > MAX_LINES or is_held_out(fixed) != held_out:
            continue
        found = mutations(fixed, kinds=(kind,))
        problem = _break(rng, names, functions, fixed, rng.choice(found), size) if found else None
        if problem is not None:
            return problem


def shape(source: str) -> str:
    """The source without the names of its functions."""
    return re.sub(r"def \w+", "def", source)


def is_held_out(source: str) -> bool:
    """Whether modules of this shape belong to the benchmark, whatever their functions are called (one in four)."""
    return hashlib.sha256(shape(source).encode()).digest()[0] % 4 == 0


def run_calls(source: str, calls: Sequence[Call]) -> dict[str, str]:
    """What each call gives: the repr of its value, or the name of the exception; by test id.

    Raises SyntaxError when the source is unreadable.
    """
    namespace = load(source)
    return {call.name: evaluate(call.call, namespace) for call in calls}


def load(source: str) -> dict[str, object]:
    namespace: dict[str, object] = {}
    exec(source, namespace)
    return namespace


def evaluate(call: str | CodeType, namespace: dict[str, object]) -> str:
    try:
        return repr(eval(call, namespace))
    except Exception as error:  # generated code may raise anything; its type is the result
        return type(error).__name__


def _break(
    rng: Random,
    names: micro_names.Names,
    functions: Sequence[micro_code.Function],
    fixed: str,
    mutation: Mutation,
    size: str,
) -> Problem | None:
    broken = mutation.apply(fixed)
    gold = next((edit for edit in candidate_edits(broken) if edit.apply(broken) == fixed), None)
    if gold is None or is_held_out(broken) != is_held_out(fixed):
        return None
    bad = load(broken)
    failing, passing = _calls(rng, functions, load(fixed), bad)
    if len(failing) < _LEAST_FAILING:
        return None
    half = _HIDDEN_CALLS // 2
    example = failing[0]
    visible = _numbered([example, *failing[1:2], *passing[:2]], "check")
    hidden = _numbered(failing[2 : 2 + half] + passing[2 : 2 + half], "test")
    defined = Call(name="test_defined", call=f"callable({functions[0].name})", expected="True")
    hidden = (*hidden, defined)
    results = run_calls(broken, hidden)
    failed = tuple(call.name for call in hidden if results[call.name] != call.expected)
    issue = micro_issue.write_issue(
        rng,
        mutation,
        call=example.call,
        got=evaluate(example.call, bad),
        expected=example.expected,
        vague_share=_VAGUE_SHARE,
    )
    return Problem(
        repo=names.repo,
        module=names.module,
        kind=mutation.kind,
        size=size,
        fixed=fixed,
        broken=broken,
        gold=gold,
        issue=issue,
        visible=visible,
        hidden=hidden,
        fail_to_pass=failed,
        pass_to_pass=tuple(call.name for call in hidden if call.name not in failed),
    )


def _calls(
    rng: Random, functions: Sequence[micro_code.Function], good: dict[str, object], bad: dict[str, object]
) -> tuple[list[Call], list[Call]]:
    """Calls that tell ``bad`` from ``good`` and calls that don't, as many as are needed or can be found."""
    failing: list[Call] = []
    passing: list[Call] = []
    seen = set()
    enough = 2 + _HIDDEN_CALLS // 2
    for _ in range(_TRIES):
        for function in functions:
            arguments = micro_code.random_arguments(rng, function)
            call = f"{function.name}({','.join(map(repr, arguments))})".replace(" ", "")
            expected = evaluate(call, good)
            if call not in seen and not expected.endswith("Error"):
                same = evaluate(call, bad) == expected
                (passing if same else failing).append(Call(name="", call=call, expected=expected))
            seen.add(call)
        if min(len(failing), len(passing)) >= enough:
            break
    return failing, passing


def _numbered(calls: Sequence[Call], prefix: str) -> tuple[Call, ...]:
    return tuple(
        Call(name=f"{prefix}_{number}", call=call.call, expected=call.expected) for number, call in enumerate(calls, 1)
    )


def _check_script(module: str, calls: Sequence[Call]) -> str:
    rows = "".join(f"    ({call.call!r}, {call.expected!r}),\n" for call in calls)
    return _CHECK.format(module=module, rows=rows)


def _test_script(module: str, calls: Sequence[Call]) -> str:
    rows = "".join(f"    ({call.name!r}, {call.call!r}, {call.expected!r}),\n" for call in calls)
    return _TEST.format(module=module, rows=rows)


_CHECK = '''\
"""Run with: python3 -IS t"""
CALLS = [
{rows}]
names, failed = {{}}, 0
try:
    with open("{module}") as file:
        exec(file.read(), names)
except Exception as error:
    print("ERROR", type(error).__name__)
    raise SystemExit(1)
for call, expected in CALLS:
    try:
        failed += repr(eval(call, names)) != expected
    except Exception:
        failed += 1
print(f"FAILED {{failed}} of {{len(CALLS)}}" if failed else "PASSED")
raise SystemExit(failed > 0)
'''

_TEST = """\
import os

word = os.environ.pop("FARM_TEST_WORD", "")  # the grader believes only lines that end in it
CALLS = [
{rows}]
names, failed = {{}}, 0
try:
    with open("{module}") as file:
        exec(file.read(), names)
except Exception as error:
    print(type(error).__name__)
for test, call, expected in CALLS:
    try:
        status = "PASSED" if repr(eval(call, names)) == expected else "FAILED"
    except Exception:
        status = "ERROR"
    failed += status != "PASSED"
    print(status, test, word)
raise SystemExit(failed > 0)
"""


def grade(problem_hidden: Sequence[Call], source: str) -> Mapping[str, bool]:
    """Whether each hidden test passes on ``source``: what the sandboxed grading finds, in this process."""
    try:
        results = run_calls(source, problem_hidden)
    except Exception:  # whatever the module does when it is read, its tests fail
        return {call.name: False for call in problem_hidden}
    return {call.name: results[call.name] == call.expected for call in problem_hidden}
