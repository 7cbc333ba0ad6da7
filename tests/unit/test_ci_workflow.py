"""The workflow for a hosted CI runs what this project's own CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / "ci" / "github-workflow.yml").read_text())["jobs"]


@pytest.mark.parametrize(
    ("job", "command"),
    [
        ("check", "make check"),
        ("check", "make test"),
        ("check", ".venv/bin/harness report --verify"),
        ("check", ".venv/bin/harness check"),
        ("reproduce", ".venv/bin/harness reproduce --all --profile quick"),
    ],
)
def test_a_pull_request_is_held_against_all_of_it(job: str, command: str) -> None:
    assert command in [step.get("run") for step in JOBS[job]["steps"]]


def test_every_script_it_calls_is_there() -> None:
    back_ends = JOBS["back-ends"]["strategy"]["matrix"]["script"]
    assert all((ROOT / "ci" / f"{name}.sh").is_file() for name in back_ends)
    runs = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    scripts = {found for run in runs for found in re.findall(r"\bci/[\w-]+\.sh", run)}
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_every_script_that_tests_a_real_thing_is_run() -> None:
    by_hand = {"setup", "gate", "show-gate", "allow-namespaces"}
    scripts = {path.stem for path in (ROOT / "ci").glob("*.sh")} - by_hand
    assert scripts == set(JOBS["back-ends"]["strategy"]["matrix"]["script"])
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"ci/{script}.sh" in makefile for script in scripts)
