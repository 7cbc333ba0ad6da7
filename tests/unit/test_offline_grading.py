"""Stored logs, graded offline: what is read, refused and written. The grading process is a stand-in."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from makers import row

from farm import offline_grading
from farm.cli import main
from farm.config import load_config
from farm.errors import UsageError
from farm.grader.kept_logs import keep, kept_log
from farm.grader.official import OfficialGrading
from farm.offline_grading import grade_logs, read_predictions
from farm.run_folder import RunFolder
from farm.run_report import report_run
from farm.start import open_run
from farm.trajectory_log import DirectoryLog
from farm.types import Boundary, Cursor, Failed, Graded, ImageFiles, Task

STUB = Path(__file__).parents[1] / "support" / "official_stub.py"
GOOD = {"instance_id": "o__r-1", "model_name_or_path": "org/model", "model_patch": "good"}


def task(name: str) -> Task:
    return Task(
        instance_id=name,
        dataset="d",
        repo="o/r",
        base_commit="",
        problem_statement="",
        patch="",
        test_patch="",
        fail_to_pass=("t",),
        pass_to_pass=(),
        eval_script="the script",
        log_parser="p",
        workspace=ImageFiles(),
    )


class Grading(OfficialGrading):
    """The stand-in process, and a run report that only counts reports."""

    def __init__(self) -> None:
        super().__init__(command=(sys.executable, str(STUB)))

    async def run_report(self, predictions: Any, *, instance_ids: Any, run_id: str, at: str) -> str:
        reports = sorted(path.parent.name for path in Path(at).glob(f"logs/run_evaluation/{run_id}/*/*/report.json"))
        path = Path(at) / f"org__model.{run_id}.json"
        path.write_text(json.dumps({"completed_ids": reports, "error_ids": [], "resolved_ids": []}))
        return str(path)


def predictions(at: Path, *entries: object, name: str = "p.jsonl") -> Path:
    path = at / name
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def grade(at: Path, *entries: dict[str, Any], run_id: str = "r1") -> offline_grading.GradedRun:
    given = read_predictions(predictions(at, *entries))
    tasks = [task(f"o__r-{n}") for n in range(1, 7)]
    return grade_logs(tasks, given, logs=at / "logs", out=at / "out", dataset="d", run_id=run_id, grading=Grading())


def test_the_official_files_are_written(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "o__r-1").mkdir(parents=True)
    (logs / "o__r-1" / "test_output.txt").write_bytes(b"log one \xff")
    (logs / "org__model" / "o__r-2").mkdir(parents=True)
    (logs / "org__model" / "o__r-2" / "test_output.txt").write_text("log two")
    (logs / "o__r-3.log").write_text("log three")
    (logs / "o__r-5.txt").write_text("log five")
    entries = [GOOD | {"instance_id": f"o__r-{n}"} for n in (1, 2, 3)]
    entries += [GOOD | {"instance_id": "o__r-4", "model_patch": None}]
    entries += [GOOD | {"instance_id": "o__r-5", "model_patch": "refuse"}, GOOD | {"instance_id": "o__r-6"}]
    done = grade(tmp_path, *entries)
    assert done.report["completed_ids"] == ["o__r-1", "o__r-2", "o__r-3"]
    assert done.without_log == ("o__r-6",)
    assert list(done.ungradable) == ["o__r-5"]
    folder = tmp_path / "out" / "logs" / "run_evaluation" / "r1" / "org__model" / "o__r-1"
    assert json.loads((folder / "report.json").read_text())["o__r-1"]["resolved"] is True
    assert (folder / "test_output.txt").read_text() == "log one \ufffd"
    assert (folder / "patch.diff").read_text() == "good"
    assert (folder / "eval.sh").read_text() == "the script"
    written = read_predictions(done.predictions_path)
    assert [entry.official for entry in written] == entries
    assert json.loads((folder.parents[1] / "run.json").read_text())["dataset"] == "d"


def test_a_run_id_is_never_used_twice(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    grade(tmp_path, GOOD)
    with pytest.raises(UsageError, match="is there already; results are known by run id"):
        grade(tmp_path, GOOD | {"model_patch": "another"})
    grade(tmp_path, GOOD, run_id="r2")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([GOOD, GOOD], "more than one for o__r-1"),
        ([GOOD, GOOD | {"instance_id": "o__r-2", "model_name_or_path": "b"}], "2 models"),
        ([GOOD | {"instance_id": "x__y-1"}], "not in the data set: x__y-1"),
        ([GOOD | {"instance_id": "../up"}], "instance_id must be a name"),
        ([{"instance_id": "o__r-1", "model_patch": ""}], "model_name_or_path must be a name"),
        ([GOOD | {"model_name_or_path": "a/../../b c"}], "model_name_or_path must be a name"),
        ([GOOD | {"model_patch": 3}], "model_patch must be text or null"),
        (["x"], "a JSON object is needed"),
    ],
)
def test_predictions_that_are_refused(tmp_path: Path, entries: list[Any], message: str) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(UsageError, match=message):
        grade(tmp_path, *entries)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", None, "No such file"),
        ("p.jsonl", "{", "not JSON"),
        ("p.jsonl", "", "holds no predictions"),
        ("p.csv", "x", "allowed are .jsonl and .json"),
        ("p.json", "3", "holds no predictions"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        read_predictions(tmp_path / name)


def test_lists_and_objects_by_instance_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([GOOD]))
    (tmp_path / "b.json").write_text(json.dumps({"o__r-1": GOOD}))
    assert read_predictions(tmp_path / "a.json") == read_predictions(tmp_path / "b.json")


def fill(log: DirectoryLog) -> None:
    """Two attempts at each of three tasks; the third one's fail."""
    for number, outcome in enumerate([1.0, 0.0, Failed(boundary=Boundary.ENGINE, kind="x", message="")]):
        for index in (0, 1):
            log.append(replace(row(f"g{number}", index, outcome), instance_id=f"o__r-{number}", patch=f"patch {index}"))
    log.seal()


def test_what_a_run_handed_in(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", load_config(None))
    with DirectoryLog(run.trajectories) as log:
        fill(log)
    out = tmp_path / "p.jsonl"
    done = CliRunner().invoke(main, ["predictions", str(run.path), "--model", "a/b", "--index", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "2 predictions of a/b; 1 attempts failed" in done.output
    assert [(p.instance_id, p.patch) for p in read_predictions(out)] == [("o__r-0", "patch 1"), ("o__r-1", "patch 1")]
    none = CliRunner().invoke(main, ["predictions", str(run.path), "--model", "a/b", "--index", "7"])
    assert none.exit_code == 2
    assert "no graded attempt 7" in none.stderr


def evaluated(tmp_path: Path) -> RunFolder:
    """A run on three rows: one graded with its log kept, one whose log is gone, one that failed."""
    lines = [
        {
            **dict.fromkeys(("repo", "base_commit", "patch", "test_patch", "problem_statement", "version"), "x"),
            "eval_script": ": '>>>>> Start Test Output'\n: '>>>>> End Test Output'\n",
            "log_parser": "p",
            "image": "i",
            "FAIL_TO_PASS": ["t"],
            "PASS_TO_PASS": [],
            "instance_id": f"o__r-{number}",
        }
        for number in range(3)
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = open_run(tmp_path / "run", load_config(overrides={"rollout": {"tasks": f"swebench:{rows}"}}))
    failed = Failed(boundary=Boundary.ENGINE, kind="x", message="", retryable=True)
    with DirectoryLog(run.trajectories) as log:
        for number, outcome in enumerate((1.0, 0.0, failed)):
            log.append(replace(row(f"g{number}", 0, outcome), instance_id=f"o__r-{number}", patch="a patch"))
        log.seal()
    (kept,) = (
        kept_log(run.graded, instance_id=r.instance_id, patch=r.patch, log_tail=r.outcome.evidence.log_tail)
        for _, r in DirectoryLog(run.trajectories, create=False).read(Cursor())
        if isinstance(r.outcome, Graded) and r.outcome.reward
    )
    keep(kept, instance_id="o__r-0", patch="a patch", script="eval", log="all of it", report={"resolved": True})
    return run


def test_a_run_of_the_farm_has_its_official_files(tmp_path: Path) -> None:
    run, out = evaluated(tmp_path), tmp_path / "official"
    done = report_run(run.path, model="org/model", out=out, run_id="r1", grading=Grading())
    assert done.report["completed_ids"] == ["o__r-0"]
    assert (done.failed, done.without_log) == (1, ("o__r-1",))
    tree = out / "logs" / "run_evaluation" / "r1"
    assert (tree / "org__model" / "o__r-0" / "test_output.txt").read_text() == "all of it"
    assert (tree / "run.json").exists()
    assert [p.instance_id for p in read_predictions(out / "predictions.jsonl")] == ["o__r-0", "o__r-1"]
    with pytest.raises(UsageError, match="--run-id r1"):
        report_run(run.path, model="org/model", out=out, run_id="r1", grading=Grading())


def test_official_files_are_of_runs_on_rows(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", load_config(None))
    with pytest.raises(UsageError, match="was graded by 'tests'"):
        report_run(run.path, model="m", out=tmp_path / "out")
    alone = CliRunner().invoke(main, ["predictions", str(run.path), "--model", "m", "--run-id", "r"])
    assert alone.exit_code == 2
    assert "--report FOLDER" in alone.stderr


def test_no_logs_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--logs .*: no such folder"):
        grade(tmp_path, GOOD)


def test_the_command_reports_bad_input_in_one_line(tmp_path: Path) -> None:
    path = predictions(tmp_path, GOOD)
    arguments = ["grade", "--dataset", "none.parquet", "--predictions", str(path), "--logs", str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "none.parquet: No such file" in done.stderr
