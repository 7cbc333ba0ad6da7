"""The verifier of a Harbor folder that was written from a row says what SWE-bench says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from makers import make_task

from farm.harbor.write import write_tasks
from farm.types import ImageFiles, Limits

EVAL = """\
#!/bin/bash
set -uxo pipefail
: '>>>>> Start Test Output'
echo '=========== short test summary info ==========='
echo '{first} t.py::a'
echo 'PASSED t.py::b'
({code})
: '>>>>> End Test Output'
"""


@pytest.mark.parametrize(("first", "code", "reward"), [("PASSED", "exit 0", "1"), ("FAILED", "exit 1", "0")])
def test_the_written_verifier_gives_the_official_verdict(tmp_path: Path, first: str, code: str, reward: str) -> None:
    row = replace(
        make_task("o__r-1"),
        repo="astropy/astropy",
        version="1.0",
        dataset="swebench/rows@1",
        image="o/r:latest",
        fail_to_pass=("t.py::a",),
        pass_to_pass=("t.py::b",),
        eval_script=EVAL.format(first=first, code=code),
        log_parser="parse_log_pytest",
        eval_type="pass_and_fail",
        workspace=ImageFiles(),
    )
    write_tasks([row], tmp_path, limits=Limits())
    tests, logs = tmp_path / "o__r-1" / "tests", tmp_path / "logs"
    logs.mkdir()
    script = (tests / "grade.py").read_text().replace('"/logs/verifier"', repr(str(logs)))
    script = script.replace('"/tests/config.json"', repr(str(tests / "config.json")))
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (logs / "reward.txt").read_text() == reward, (logs / "test_output.txt").read_text()
    report = json.loads((logs / "report.json").read_text())
    assert report["patch_successfully_applied"]
