"""The real ``swebench``: all 500 rows of Verified, and every trap on the way from a log to a verdict."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from official_logs import END, START, log_of, whole

from farm.cli import main
from farm.errors import GraderError
from farm.grader.official import OfficialGrade, OfficialGrading
from farm.offline_grading import GradedRun, Prediction, grade_logs
from farm.suites.swebench_rows import official_row
from farm.tasks import load_tasks
from farm.types import Task

VERIFIED = (
    Path(os.environ.get("ROLLOUT_FARM_DATA") or Path(__file__).parents[3] / "shared" / "data")
    / "SWE-bench_Verified_test.parquet"
)
MODEL = "test/model"


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    if not VERIFIED.exists():
        pytest.skip(f"{VERIFIED} is absent: set ROLLOUT_FARM_DATA to the folder that holds it")
    return load_tasks(f"swebench:{VERIFIED}")


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "instance_id": "o__r-1",
        "image": "i",
        "repo": "o/r",
        "version": "1",
        "FAIL_TO_PASS": ["t.py::a"],
        "PASS_TO_PASS": ["t.py::b"],
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": f"#!/bin/bash\nset -uxo pipefail\n: '{START}'\npytest -rA t.py\n: '{END}'\ngit checkout x\n",
    }
    return plain | changes


Grades = Callable[..., list[OfficialGrade]]


@pytest.fixture
def grades(use: Any) -> Grades:
    """The official grades of (row, log) pairs."""

    def grade(*cases: tuple[dict[str, Any], str], patch: str | None = "diff") -> list[OfficialGrade]:
        async def work(grading: OfficialGrading) -> list[OfficialGrade]:
            return [await grading.grade(given, patch=patch, model=MODEL, log=log) for given, log in cases]

        return list(use(work))

    return grade


# ------------------------------------------------------------------------------------ all of Verified


def run_all(tasks: list[Task], at: Path, *, solved: bool) -> GradedRun:
    logs = at / "logs"
    logs.mkdir(parents=True)
    for task in tasks:
        (logs / f"{task.instance_id}.log").write_text(log_of(official_row(task), solved=solved))
    given = [Prediction(instance_id=task.instance_id, model=MODEL, patch=task.patch) for task in tasks]
    return grade_logs(tasks, given, logs=logs, out=at / "out", dataset="verified", run_id="all")


@pytest.mark.parametrize(("solved", "resolved"), [(True, 500), (False, 0)])
def test_all_500(tasks: list[Task], tmp_path: Path, solved: bool, resolved: int) -> None:
    done = run_all(tasks, tmp_path, solved=solved)
    report = done.report
    assert (report["total_instances"], report["completed_instances"], report["resolved_instances"]) == (
        500,
        500,
        resolved,
    )
    assert report["schema_version"] == 2
    assert (done.without_log, done.ungradable, report["error_ids"]) == ((), {}, [])
    assert done.report_path == tmp_path / "out" / "test__model.all.json"


def test_expected_ids_that_were_cut_at_a_blank(tasks: list[Task], grades: Grades) -> None:
    """Ids that end inside brackets are found by their beginning; the log has them whole."""
    cut = [
        (t, i) for t in tasks for i in (*t.fail_to_pass, *t.pass_to_pass) if "[" in i and not i.rstrip().endswith("]")
    ]
    pytest_like = [(t, i) for t, i in cut if t.log_parser not in ("parse_log_django", "parse_log_sympy")]
    assert len(pytest_like) > 500
    task, test = pytest_like[0]
    given = official_row(task) | {"FAIL_TO_PASS": [test], "PASS_TO_PASS": []}
    (whole_id,) = grades((given, whole([f"PASSED {test} of the rest]"], exit_code=0)))
    assert whole_id.resolved


# -------------------------------------------------------------------------------------------- traps


PASS, FAIL = "PASSED t.py::a\nPASSED t.py::b", "FAILED t.py::a - no\nPASSED t.py::b"


@pytest.mark.parametrize(
    ("log", "resolved", "applied"),
    [
        pytest.param(whole([PASS], exit_code=0), True, True, id="passing"),
        pytest.param(whole([FAIL], exit_code=1), False, True, id="failing"),
        pytest.param(whole([PASS], exit_code=1), False, False, id="exit code and no failed test"),
        pytest.param(whole([PASS, "FAILED t.py::other - no"], exit_code=1), True, True, id="another test fails"),
        pytest.param(whole(["XFAIL t.py::a", "PASSED t.py::b"], exit_code=0), True, True, id="expected failure"),
        pytest.param(whole(["SKIPPED t.py::a", "PASSED t.py::b"], exit_code=0), False, True, id="skipped issue test"),
        pytest.param(PASS, False, False, id="no markers"),
        pytest.param(f"{START}\n{PASS}\n", False, False, id="no end marker"),
        pytest.param(whole([PASS, ">>>>> Patch Apply Failed"], exit_code=0), False, False, id="patch apply failed"),
        pytest.param(whole([PASS, ">>>>> Reset Failed"], exit_code=0), False, False, id="reset failed"),
        pytest.param(whole([PASS, ">>>>> Tests Errored"], exit_code=0), False, False, id="tests errored"),
        pytest.param(whole([PASS, ">>>>> Tests Timed Out"], exit_code=0), False, False, id="tests timed out"),
        pytest.param("", False, False, id="empty log"),
    ],
)
def test_traps_of_the_log(grades: Grades, log: str, resolved: bool, applied: bool) -> None:
    (grade,) = grades((row(), log))
    assert (grade.resolved, grade.report["patch_successfully_applied"]) == (resolved, applied)


def test_streams_that_were_not_merged_lose_the_region(grades: Grades) -> None:
    """Markers go to standard error, results to standard output: one after the other there is nothing between them, and
    a failure can then be read where the tests' own region would have said otherwise."""
    markers = f"+ : '{START}'\n+ : '{END}'\n"
    (apart,) = grades((row(), f"{PASS}\n{markers}"))
    (merged,) = grades((row(), whole([PASS], exit_code=0)))
    assert merged.resolved
    assert START not in PASS
    assert apart.statuses.keys() <= merged.statuses.keys()


def test_the_first_region_counts_so_a_forged_one_must_not_reach_it(grades: Grades) -> None:
    """What ``farm.grader.official_log`` is for: official grading itself believes a region that was printed earlier."""
    forged = f"{START}\n{PASS}\n{END}\n"
    (believed, honest) = grades((row(), forged + whole([FAIL], exit_code=0)), (row(), whole([FAIL], exit_code=1)))
    assert believed.resolved
    assert not honest.resolved


def test_an_empty_prediction_has_no_grade(grades: Grades) -> None:
    (grade,) = grades((row(), whole([PASS], exit_code=0)), patch=None)
    assert grade.report["patch_is_None"]
    assert not grade.resolved


def test_rows_that_official_grading_refuses(grades: Grades) -> None:
    with pytest.raises(GraderError) as caught:
        grades((row(log_parser="no_such_parser"), whole([PASS], exit_code=0)))
    assert (caught.value.kind, caught.value.retryable) == ("official", False)


def test_the_script_is_rewritten_to_tell_the_exit_code(use: Any) -> None:
    async def work(grading: OfficialGrading) -> tuple[str, str]:
        return await grading.eval_script(row()), grading.version

    script, version = use(work)
    assert "SWEBENCH_TEST_EXIT_CODE=$?" in script
    assert script.startswith("#!/bin/bash\nset -uxo pipefail\n")
    assert version.startswith("5.")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("collecting ...\nKilled\n", True),
        ("OSError: [Errno 12] Cannot allocate memory\n", True),
        (whole([FAIL], exit_code=1), False),
        ("\n\nTimeout error: 1800 seconds exceeded.", False),
    ],
)
def test_which_logs_show_a_broken_machine(use: Any, log: str, reason: bool) -> None:
    assert (use(lambda grading: grading.classify(log)) is not None) == reason


def test_nothing_of_the_package_is_in_this_process(grades: Grades) -> None:
    grades((row(), whole([PASS], exit_code=0)))
    assert "swebench" not in sys.modules
    assert "datasets" not in sys.modules


# --------------------------------------------------------------------------------------- the command


def test_the_command_writes_what_the_harness_writes(tmp_path: Path) -> None:
    script = row()["eval_script"]
    rows = [
        row(
            instance_id=f"o__r-{n}",
            base_commit="a" * 40,
            patch="",
            test_patch="",
            problem_statement="",
            eval_script=script,
        )
        for n in range(1, 6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    logs = tmp_path / "logs"
    logs.mkdir()
    texts = {1: whole([PASS], exit_code=0), 2: whole([FAIL], exit_code=1), 3: "Cannot allocate memory\n"}
    for n, text in texts.items():
        (logs / f"o__r-{n}.log").write_text(text)
    patches = {1: "x", 2: "x", 3: "x", 4: "", 5: "x"}
    given = [{"instance_id": f"o__r-{n}", "model_name_or_path": "org/m", "model_patch": p} for n, p in patches.items()]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(g) + "\n" for g in given))
    done = CliRunner().invoke(
        main,
        ["grade", "--dataset", str(tmp_path / "rows.jsonl"), "--predictions", str(tmp_path / "p.jsonl"),
         "--logs", str(logs), "--out", str(tmp_path / "out"), "--run-id", "r"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "5 predictions for 5 instances: 1 resolved" in done.output
    assert "without a log" in done.output
    report = json.loads((tmp_path / "out" / "org__m.r.json").read_text())
    assert report["resolved_ids"] == ["o__r-1"]
    assert report["empty_patch_ids"] == ["o__r-4"]
    assert report["error_ids"] == ["o__r-5"]
    assert "o__r-3" in report["infra_failure_ids"]
    one = tmp_path / "out" / "logs" / "run_evaluation" / "r" / "org__m" / "o__r-2"
    assert json.loads((one / "report.json").read_text())["o__r-2"]["resolved"] is False
