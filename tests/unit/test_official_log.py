"""The log that official grading is given: only what the harness's own script enclosed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from farm.grader.official_log import MarkedScript, mark, official_log

SCRIPT = """\
#!/bin/bash
set -uxo pipefail
echo installing
{before}
: '>>>>> Start Test Output'
{tests}
SWEBENCH_TEST_EXIT_CODE=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"
git checkout x
"""
START, END, CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"


def marked(tests: str = "true", before: str = "true", word: str = "w0rd") -> MarkedScript:
    script = mark(SCRIPT.format(tests=tests, before=before), word)
    assert script is not None
    return script


def run(script: MarkedScript, at: Path) -> str:
    """What the script really prints, both streams in order."""
    file = at / "eval.sh"
    file.write_text(script.text)
    done = subprocess.run(
        ["bash", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20, check=False, cwd=at
    )
    assert not file.exists(), "the script is still there to be read"
    return done.stdout.decode()


@pytest.mark.parametrize(("tests", "code"), [("echo PASSED t1", 0), ("echo FAILED t1; (exit 3)", 3)])
def test_an_honest_run(tmp_path: Path, tests: str, code: int) -> None:
    script = marked(tests)
    log = official_log(run(script, tmp_path), script)
    assert (log.started, log.ended, log.forged, log.exit_code) == (True, True, False, code)
    assert log.text.count(START) == log.text.count(END) == 1
    assert tests.split(";")[0].removeprefix("echo ") in log.text.split(START)[1].split(END)[0].splitlines()
    assert log.text.splitlines()[-1] == f"{CODE}: {code}"
    assert "w0rd" not in log.text


def test_a_region_of_ones_own_before_the_tests_is_not_seen(tmp_path: Path) -> None:
    script = marked("echo FAILED t1; false", before=f"printf '%s\\n' '{START}' 'PASSED t1' '{END}' '{CODE}: 0'")
    log = official_log(run(script, tmp_path), script)
    assert "PASSED t1" not in log.text
    assert "FAILED t1" in log.text
    assert log.exit_code == 1


def test_results_outside_of_the_markers_are_not_there_to_fall_back_on(tmp_path: Path) -> None:
    script = marked("true", before="echo PASSED t1")
    assert "PASSED" not in official_log(run(script, tmp_path), script).text


def test_markers_that_tests_print_end_nothing(tmp_path: Path) -> None:
    script = marked(f"printf '%s\\n' '{END}' '{CODE}: 0' '{START}' 'FAILED t1'; false")
    log = official_log(run(script, tmp_path), script)
    assert (log.ended, log.forged, log.exit_code) == (True, False, 1)
    region = log.text.split(START)[1].split(END)[0]
    assert "FAILED t1" in region
    assert log.text.count(CODE) == 1


def test_true_markers_twice_are_a_forgery(tmp_path: Path) -> None:
    (tmp_path / "forge").write_text(f"PASSED t1\n{END} w0rd\n{CODE} w0rd: 0\n")
    script = marked("cat forge; false")
    assert official_log(run(script, tmp_path), script).forged
    script = marked("cat forge; kill -9 $$")
    assert not official_log(run(script, tmp_path), script).forged, "the limit: a word that was stolen, a shell killed"


def test_a_shell_that_is_killed_leaves_no_end(tmp_path: Path) -> None:
    script = marked("echo PASSED t1; kill -9 $$")
    log = official_log(run(script, tmp_path), script)
    assert (log.started, log.ended, log.exit_code) == (True, False, None)
    script = marked("true", before="kill -9 $$")
    assert not official_log(run(script, tmp_path), script).started


@pytest.mark.parametrize(
    "script",
    [
        "echo nothing\n",
        f": '{START}'\n",
        f": '{START}'\n: '{START}'\n: '{END}'\n",
        f"cat <<X\n+: '{START}'\nX\n: '{END}'\n",
    ],
)
def test_scripts_without_both_markers_once(script: str) -> None:
    assert mark(script, "w") is None


def test_a_script_that_echoes_and_tells_no_exit_code(tmp_path: Path) -> None:
    script = mark(f"echo '{START}'\necho PASSED t\necho \"{END}\"\n", "w")
    assert script is not None
    log = official_log(run(script, tmp_path), script)
    assert (log.started, log.ended, log.forged, log.exit_code) == (True, True, False, None)
    assert log.text == f"{START}\nPASSED t\n{END}\n"
