"""Logs as the test runners of SWE-bench's repositories write them, made from a row: all pass, or the issue's tests
fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"


def _pytest(test: str, passed: bool) -> str:
    return f"{'PASSED' if passed else 'FAILED'} {test}"


def _django(test: str, passed: bool) -> str:
    return f"{test} ... {'ok' if passed else 'FAIL'}"


def _sympy(test: str, passed: bool) -> str:
    return f"{test} {'ok' if passed else 'F'}"


LINES: Mapping[str, Callable[[str, bool], str]] = {"parse_log_django": _django, "parse_log_sympy": _sympy}


def log_of(row: Mapping[str, Any], *, solved: bool, exit_code: int | None = None) -> str:
    """The whole output of the eval script of ``row``; the tests of FAIL_TO_PASS fail unless ``solved``."""
    line = LINES.get(row["log_parser"], _pytest)
    results = [line(test, solved) for test in row["FAIL_TO_PASS"]]
    results += [line(test, True) for test in row["PASS_TO_PASS"]]
    return whole(results, exit_code=(0 if solved else 1) if exit_code is None else exit_code)


def whole(results: list[str], *, exit_code: int) -> str:
    """``results`` between the markers as ``set -x`` traces them."""
    lines = ["+ cd /testbed", f"+ : '{START}'", *results, f"+ SWEBENCH_TEST_EXIT_CODE={exit_code}", f"+ : '{END}'"]
    lines += [f"+ echo '>>>>> Test Exit Code: {exit_code}'", f">>>>> Test Exit Code: {exit_code}", "+ git checkout x"]
    return "\n".join(lines) + "\n"
