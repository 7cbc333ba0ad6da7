"""Which functions each test calls: a pytest plugin that runs in the sandbox, and what it wrote, read back.

Only Python functions of the work tree are noticed, by the line they begin at, and only what a test calls while it runs;
what happens when modules are imported belongs to no test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from farm.errors import FarmError

PLUGIN_NAME = "farm_trace"
# Runs under the sandbox's own Python. sys.setprofile costs a call per call, not per line.
PLUGIN = """\
import json, os, sys, time
import pytest

root = os.getcwd() + os.sep
names, tests, seen = {}, {}, set()

def profile(frame, event, arg):
    if event == "call":
        code = frame.f_code
        if code.co_filename.startswith(root):
            seen.add((code.co_filename, code.co_firstlineno))

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    seen.clear()
    begun = time.process_time()
    sys.setprofile(profile)
    yield
    sys.setprofile(None)
    called = sorted({names.setdefault(key, len(names)) for key in seen})
    tests[item.nodeid] = [round(time.process_time() - begun, 4), called]

def pytest_sessionfinish(session, exitstatus):
    functions = [[path[len(root):], line] for path, line in names]
    with open(os.environ["FARM_TRACE"], "w") as file:
        json.dump({"functions": functions, "tests": tests}, file)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """``calls``: test id -> the functions it called, as (path, first line). ``cpu_s``: test id -> its CPU time,
    traced."""

    calls: Mapping[str, frozenset[tuple[str, int]]]
    cpu_s: Mapping[str, float]


def read_trace(data: bytes) -> Trace:
    """What the plugin wrote. Raises FarmError: the code under test may have spoilt it."""
    try:
        written = json.loads(data)
        functions = [(str(path), int(line)) for path, line in written["functions"]]
        tests = written["tests"].items()
        calls = {test: frozenset(functions[number] for number in numbers) for test, (_, numbers) in tests}
        cpu_s = {test: float(seconds) for test, (seconds, _) in tests}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise FarmError(f"the trace can't be read: {type(error).__name__}: {error}", kind="trace") from error
    return Trace(calls=calls, cpu_s=cpu_s)
