"""The shipped training tasks: facts only, all qualified, from many packages, none of them in the benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path

from farm.suites import made, qualify
from farm.suites.overlap import RepoRef
from farm.suites.overlap_refs import compare

FOLDER = Path(__file__).parents[2] / "datasets" / "pypi" / "train"
VERIFIED = (
    "astropy/astropy", "django/django", "matplotlib/matplotlib", "mwaskom/seaborn", "pallets/flask", "psf/requests",
    "pydata/xarray", "pylint-dev/pylint", "pytest-dev/pytest", "scikit-learn/scikit-learn", "sphinx-doc/sphinx",
    "sympy/sympy",
)  # fmt: skip


def test_every_task_is_qualified_and_of_a_pinned_source() -> None:
    known, rows = made.read_sources(FOLDER), made.read_rows(FOLDER)
    results = qualify.read(FOLDER / "qualification.jsonl")
    assert {row["package"] for row in rows} == known.keys()
    assert len({row["instance_id"] for row in rows}) == len(rows) == len(results)
    for row in rows:
        result = results[row["instance_id"]]
        assert result.qualified
        assert result.gold_passed == result.empty_failed == result.runs >= 2
        assert row["fail_to_pass"]
        assert row["pass_to_pass"]
        assert row["cpu_limit_s"] >= 10
    pins = (FOLDER / "SOURCES.txt").read_text().split()
    assert sorted(one.origin for one in known.values()) == sorted(pins)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+#sha256=[0-9a-f]{64}", pin) for pin in pins)


def test_there_are_as_many_as_is_said() -> None:
    known, rows = made.read_sources(FOLDER), made.read_rows(FOLDER)
    assert len(known) >= 20
    assert len(rows) >= 300
    told = (FOLDER.parents[2] / "docs" / "tasks.md").read_text()
    assert f"{len(rows)} tasks from {len(known)} packages" in told


def test_nothing_of_the_benchmark_is_in_it() -> None:
    rows = made.read_rows(FOLDER)
    known = made.read_sources(FOLDER)
    train = [RepoRef(name=known[row["package"]].source.repo, paths=(row["path"],)) for row in rows]
    assert compare(train, [RepoRef(name=name) for name in VERIFIED]).findings == ()


def test_it_holds_facts_and_no_code() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        "SOURCES.txt", "sources.json", "tasks.jsonl", "qualification.jsonl",
    }  # fmt: skip
    longest = max(len(json.dumps(row)) for row in made.read_rows(FOLDER))
    assert longest < 8_000
