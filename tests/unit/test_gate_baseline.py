"""The baseline file, and every wrong one: one clear line, exit code 2, nothing started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farm.errors import UsageError
from farm.tasks import load_tasks
from harness import cli
from harness.gate import baseline as baselines
from harness.gate import run as gate_run
from harness.gate.baseline import Baseline, Run
from harness.gate.evidence import Counts
from harness.provenance import ROOT

TASKS = load_tasks("micro:benchmark", limit=6)


def made(*, passed: int = 2, seed: int = 0, commit: str = "HEAD") -> Baseline:
    ids = [task.instance_id for task in TASKS]
    counts = Counts(graded=dict.fromkeys(ids, 4), passed=dict.fromkeys(ids, passed), failures=1)
    return Baseline(
        commit=commit,
        machine=baselines.machine_kind(),
        processor="some",
        tasks="micro:benchmark",
        dataset=TASKS[0].dataset,
        limit=6,
        policy="datasets/micro/base-policy",
        policy_digest="d",
        weights={task.instance_id: task.weight for task in TASKS},
        runs=(Run(commit=commit, seed=seed, counts=counts),),
    )


def refused(path: Path, *arguments: str) -> str:
    with pytest.raises(UsageError) as error:
        cli.cli(["gate", "--baseline", str(path), *arguments], standalone_mode=False)
    return str(error.value)


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ci" / "baseline.json"
    baselines.save(path, made())
    assert baselines.load(path) == made()
    assert baselines.load(path).attempts == 4


def test_runs_of_the_same_subject_are_pooled_and_old_ones_let_go() -> None:
    known = made()
    for seed in range(1, 7):
        known = baselines.with_run(known, made(seed=seed, passed=3))
    assert [run.seed for run in known.runs] == [3, 4, 5, 6]
    assert known.attempts == 16
    other = replace(made(seed=9), policy_digest="another")
    assert baselines.with_run(known, other) == other
    assert baselines.with_run(None, other) == other


def test_the_same_run_is_not_counted_twice() -> None:
    assert len(baselines.with_run(made(), made()).runs) == 1


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        baselines.save(path, made())
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return write


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.unlink(missing_ok=True), "no such file"),
    (lambda path: path.write_text("{"), "not readable JSON"),
    (lambda path: path.write_text("[]"), "not a rollout-farm gate baseline"),
    (broken(lambda d: d.update(schema=99)), "schema 99"),
    (broken(lambda d: d.pop("runs")), "not whole (KeyError"),
    (broken(lambda d: d["weights"].update(more=1.0)), "every task needs graded attempts"),
    (broken(lambda d: d["runs"][0]["passed_of_graded"].update({TASKS[0].instance_id: "9/4"})), "at least as many"),
    (broken(lambda d: d["weights"].update({TASKS[0].instance_id: 0.0})), "weights must be positive"),
    (broken(lambda d: d["weights"].update({TASKS[0].instance_id: float("nan")})), "NaN is no JSON number"),
    (
        broken(lambda d: d["machine"].update(kind="linux-other-64cores")),
        "made on a machine of kind linux-other-64cores",
    ),
    (broken(lambda d: d["suite"].update(dataset="micro/benchmark@old")), "scores on other tasks don't compare"),
    (broken(lambda d: d["suite"].update(limit=5)), "scores on other tasks don't compare"),
    (broken(lambda d: d["suite"].update(tasks="nowhere")), "unknown suite 'nowhere'"),
    (broken(lambda d: d["policy"].update(path="nothing/here")), "nothing/here"),
    (broken(lambda d: d.update(commit="0" * 40)), "is not in this repository"),
]


@pytest.mark.parametrize(("write", "told"), WRONG)
def test_wrong_baselines(tmp_path: Path, write: Callable[[Path], object], told: str) -> None:
    path = tmp_path / "baseline.json"
    write(path)
    assert told in refused(path)


def test_a_baseline_that_can_t_lose_the_margin(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baselines.save(path, made(passed=0))
    assert "the gate could never fail" in refused(path)


def test_wrong_options(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baselines.save(path, made())
    assert "--limit belongs to" in refused(path, "--limit", "3")
    assert "--base has no meaning" in refused(path, "--base", "HEAD", "--update-baseline")
    assert "'no-such-commit'" in refused(path, "--base", "no-such-commit")
    assert "no such folder" in refused(path, "--policy", str(tmp_path / "none"))
    assert "must lie in" in refused(path, "--update-baseline", "--policy", str(_outside(tmp_path)))


def _outside(folder: Path) -> Path:
    """The shipped policy under a path that no checkout has."""
    (folder / "policy").mkdir()
    for file in (ROOT / "datasets" / "micro" / "base-policy").iterdir():
        (folder / "policy" / file.name).write_bytes(file.read_bytes())
    return folder / "policy"


def test_a_run_that_lost_to_the_baseline_does_not_become_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="points worse than the baseline"):
        gate_run._check_trusted(made(passed=4), made(passed=3, seed=1), tmp_path)
    gate_run._check_trusted(made(passed=3), made(passed=4, seed=1), tmp_path)
    failing = made()
    counts = replace(failing.runs[0].counts, failures=20)
    failing = replace(failing, runs=(replace(failing.runs[0], counts=counts),))
    with pytest.raises(UsageError, match="can't be trusted"):
        gate_run._check_trusted(None, failing, tmp_path)


def test_the_command_has_help_and_its_exit_codes() -> None:
    result = CliRunner().invoke(cli.cli, ["gate", "--help"])
    assert result.exit_code == 0
    assert "inconclusive" in result.output
