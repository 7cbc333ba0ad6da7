"""Test logs to statuses."""

from __future__ import annotations

from farm.grader.parsers import END_MARKER, START_MARKER, parse_micro, parse_pytest


def log(*lines: str) -> str:
    return "\n".join([START_MARKER, *lines, END_MARKER])


def test_micro_lines() -> None:
    assert parse_micro(log("PASSED a", "noise", "FAILED b", "ERROR c", "PASSED")) == {
        "a": "PASSED",
        "b": "FAILED",
        "c": "ERROR",
    }


def test_only_the_region_between_the_markers_counts() -> None:
    text = "\n".join(["PASSED before", log("PASSED a", END_MARKER, "PASSED b"), "PASSED after"])
    assert parse_micro(text) == {"a": "PASSED", "b": "PASSED"}
    assert parse_micro("PASSED a") == {}
    assert parse_micro(f"{START_MARKER}\nPASSED a") == {}


def test_a_test_with_two_statuses_is_an_error() -> None:
    assert parse_micro(log("PASSED a", "FAILED a")) == {"a": "ERROR"}
    assert parse_micro(log("PASSED a", "FAILED a", "PASSED a")) == {"a": "ERROR"}
    assert parse_micro(log("PASSED a", "PASSED a")) == {"a": "PASSED"}


SUMMARY = "=========================== short test summary info ============================"


def test_pytest_summary() -> None:
    text = log(
        "PASSED tests/fake.py::test_printed",
        SUMMARY,
        "\x1b[32mPASSED\x1b[0m tests/t.py::test_a",
        "PASSED tests/t.py::test_b[x - y z]",
        "FAILED tests/t.py::test_c[a - b] - AssertionError: no - really",
        "FAILED tests/t.py::test_d - assert [1] == [2 - 3]",
        "FAILED tests/t.py::test_e[1]",
        "ERROR tests/bad.py - ImportError: x",
        "SKIPPED [1] tests/t.py:3: not now",
        "XFAIL tests/t.py::test_x - known",
        "========================= 2 failed, 1 passed in 0.02s =========================",
        "PASSED tests/fake.py::test_late",
    )
    assert parse_pytest(text) == {
        "tests/t.py::test_a": "PASSED",
        "tests/t.py::test_b[x - y z]": "PASSED",
        "tests/t.py::test_c[a - b]": "FAILED",
        "tests/t.py::test_d": "FAILED",
        "tests/t.py::test_e[1]": "FAILED",
        "tests/bad.py": "ERROR",
    }


def test_pytest_passed_then_error_in_teardown() -> None:
    assert parse_pytest(log(SUMMARY, "PASSED t.py::a", "ERROR t.py::a - boom")) == {"t.py::a": "ERROR"}
