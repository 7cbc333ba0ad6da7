"""Grade stored test logs offline, and write what the official harness writes: no sandbox, no Docker, no network.

In: rows, predictions, one log per prediction. Out, below one folder: a folder
``logs/run_evaluation/<run id>/<model>/<instance>/`` with ``report.json``, ``test_output.txt``, ``patch.diff`` and
``eval.sh``; ``predictions.jsonl``; the official run report ``<model>.<run id>.json``. Reports and run report are made
by ``swebench`` itself.

A run id is never used twice: the official harness knows results by run id, model and instance, not by patch, and would
take an old result for a new patch's.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import FarmError, GraderError, UsageError
from farm.grader.kept_logs import LOG, PATCH, REPORT, SCRIPT
from farm.grader.official import OfficialGrading, check_installed
from farm.suites.swebench_rows import official_row
from farm.types import Cursor, Evidence, Graded, Task, Trajectory

MAX_LOG_BYTES = 64 << 20

_NAME = re.compile(r"(?!\.+$)[\w.+-]+")
_TREE = Path("logs") / "run_evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One line of a predictions file. ``patch`` "" or None: nothing was handed in, and nothing is graded."""

    instance_id: str
    model: str
    patch: str | None

    @property
    def official(self) -> dict[str, Any]:
        """As the official harness reads it."""
        return {"instance_id": self.instance_id, "model_name_or_path": self.model, "model_patch": self.patch}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedRun:
    """What came out. ``report``: the official run report, ``report_path``: its file. ``without_log``: predictions with
    a patch whose log was not found; ``ungradable``: instance -> why official grading refused its log. The official
    report counts both as errors."""

    report: Mapping[str, Any]
    report_path: Path
    predictions_path: Path
    without_log: tuple[str, ...]
    ungradable: Mapping[str, str]

    @property
    def infra_failures(self) -> int:
        """Runs that ended without an answer about the patch: by the machine's fault, or not gradable at all."""
        failed = {*self.report["error_ids"], *self.report.get("infra_failure_ids", ())}
        return len(failed - set(self.report["resolved_ids"]))


def load_rows(source: str) -> list[Task]:
    """``--dataset``: as in ``--tasks``, where "swebench:" may be left out. Raises UsageError."""
    from farm.tasks import load_tasks

    suite = source.partition(":")[0]
    if suite in ("swebench", "subset"):
        return load_tasks(source, quarantined=True)
    return load_tasks(f"swebench:{source}", quarantined=True)


def read_predictions(path: Path) -> list[Prediction]:
    """A ``.jsonl`` file, or a ``.json`` file with a list or an object by instance id. Raises UsageError."""
    where = f"--predictions {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"{where}: {reason}; give a readable .jsonl or .json file") from error
    try:
        if path.suffix == ".jsonl":
            found: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        elif path.suffix == ".json":
            found = json.loads(text)
            found = list(found.values()) if isinstance(found, dict) else found
        else:
            raise UsageError(f"{where}: unknown file type {path.suffix!r}; allowed are .jsonl and .json")
    except ValueError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(found, list) or not found:
        raise UsageError(f"{where}: holds no predictions: objects with instance_id, model_name_or_path, model_patch")
    return [_prediction(entry, f"{where}, prediction {number}") for number, entry in enumerate(found, 1)]


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """The official JSONL format, one line each."""
    path.write_text("".join(json.dumps(prediction.official) + "\n" for prediction in predictions))


def attempts_of(run_path: Path, *, index: int) -> tuple[list[tuple[Trajectory, Evidence]], int]:
    """Attempt ``index`` of every task of a run, as graded, by instance id; and how many of them failed and are left
    out. Raises UsageError."""
    from farm.run_folder import RunFolder
    from farm.trajectory_log import DirectoryLog

    log = DirectoryLog(RunFolder.open(run_path).trajectories, create=False)
    rows = [row for _, row in log.read(Cursor()) if row.index == index]
    last = {row.instance_id: (row, row.outcome.evidence) for row in rows if isinstance(row.outcome, Graded)}
    if not last:
        raise UsageError(f"{run_path}: no graded attempt {index} has landed; run one, or give another --index")
    return [last[name] for name in sorted(last)], sum(not isinstance(row.outcome, Graded) for row in rows)


def predictions_of(run_path: Path, *, model: str, index: int = 0) -> tuple[list[Prediction], int]:
    """What attempt ``index`` of every task of a run handed in, and how many of them failed and are left out. Raises
    UsageError."""
    rows, failed = attempts_of(run_path, index=index)
    return [Prediction(instance_id=row.instance_id, model=model, patch=row.patch) for row, _ in rows], failed


def _prediction(entry: Any, where: str) -> Prediction:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: a JSON object is needed, this is {type(entry).__name__}")
    name, model, patch = (entry.get(key) for key in ("instance_id", "model_name_or_path", "model_patch"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}: instance_id must be a name of letters, digits and _ . + -, given {name!r}")
    if not isinstance(model, str) or not all(_NAME.fullmatch(part) for part in model.split("/")):
        raise UsageError(f"{where}: model_name_or_path must be a name, given {model!r}")
    if patch is not None and not isinstance(patch, str):
        raise UsageError(f"{where}: model_patch must be text or null, given {type(patch).__name__}")
    return Prediction(instance_id=name, model=model, patch=patch)


def grade_logs(
    tasks: Sequence[Task],
    predictions: Sequence[Prediction],
    *,
    logs: Path,
    out: Path,
    dataset: str,
    run_id: str | None = None,
    grading: OfficialGrading | None = None,
    now: Callable[[], float] = time.time,
) -> GradedRun:
    """Grade the log of every prediction in the folder ``logs`` and write the official files below ``out``.

    A log is ``<instance>/test_output.txt``, ``<model>/<instance>/test_output.txt`` (the official tree of one run),
    ``<instance>.log`` or ``<instance>.txt``. ``run_id``: default: made of the time. Raises UsageError, before anything
    is written, and GraderError when the grading process can't be had. ``grading``: another process than the default
    one; it is closed here."""
    rows = {task.instance_id: official_row(task) for task in tasks}
    model = _check(rows, predictions)
    if not logs.is_dir():
        raise UsageError(f"--logs {logs}: no such folder; give the one with the test logs")
    if grading is None:
        check_installed()
        grading = OfficialGrading()
    run_id, tree = new_tree(out, run_id=run_id, model=model, dataset=dataset, now=now)
    predictions_path = out / "predictions.jsonl"
    write_predictions(predictions_path, predictions)
    work = _grade(rows, predictions, logs, out, tree, run_id, grading)
    return asyncio.run(work)


def new_tree(out: Path, *, run_id: str | None, model: str, dataset: str, now: Callable[[], float]) -> tuple[str, Path]:
    """Begin the official tree of one run and one model below ``out``: its run id, made of the time where none is given,
    and the folder for its instances. Raises UsageError when the run id is not a new one."""
    run_id = run_id or time.strftime("farm-%Y%m%d-%H%M%S", time.gmtime(now()))
    if not _NAME.fullmatch(run_id):
        raise UsageError(f"--run-id {run_id!r}: only letters, digits and _ . + -")
    tree = out / _TREE / run_id
    if tree.exists():
        raise UsageError(
            f"--run-id {run_id}: {tree} is there already; results are known by run id, so give a fresh one (or another "
            "--out)"
        )
    instances = tree / _folder(model)
    instances.mkdir(parents=True)
    facts = {"dataset": dataset, "split": None, "task_repo": None, "created_at": now()}
    (tree / "run.json").write_text(json.dumps(facts, indent=4))
    return run_id, instances


def _check(rows: Mapping[str, Any], predictions: Sequence[Prediction]) -> str:
    """The one model of all predictions. Raises UsageError."""
    unknown = sorted({p.instance_id for p in predictions} - rows.keys())
    if unknown:
        raise UsageError(f"--predictions: not in the data set: {', '.join(unknown)[:300]}; correct one of them")
    names = [prediction.instance_id for prediction in predictions]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(f"--predictions: more than one for {', '.join(twice)[:300]}; give one each")
    models = sorted({prediction.model for prediction in predictions})
    if len(models) != 1:
        raise UsageError(f"--predictions: {len(models)} models ({', '.join(models)[:200]}); a run report is of one")
    return models[0]


async def _grade(
    rows: Mapping[str, Mapping[str, Any]],
    predictions: Sequence[Prediction],
    logs: Path,
    out: Path,
    tree: Path,
    run_id: str,
    grading: OfficialGrading,
) -> GradedRun:
    without_log, ungradable = [], {}
    async with grading:
        for prediction in predictions:
            if not prediction.patch:
                continue
            found = _log_of(logs, prediction)
            if found is None:
                without_log.append(prediction.instance_id)
                continue
            row = rows[prediction.instance_id]
            try:
                await _grade_one(grading, row, prediction, found, tree / prediction.instance_id)
            except GraderError as error:
                if error.retryable:
                    raise
                ungradable[prediction.instance_id] = str(error)
        path = Path(
            await grading.run_report(
                {prediction.instance_id: prediction.official for prediction in predictions},
                instance_ids=list(rows),
                run_id=run_id,
                at=str(out.absolute()),
            )
        )
    return GradedRun(
        report=json.loads(path.read_text()),
        report_path=path,
        predictions_path=out / "predictions.jsonl",
        without_log=tuple(without_log),
        ungradable=ungradable,
    )


async def _grade_one(
    grading: OfficialGrading, row: Mapping[str, Any], prediction: Prediction, log: Path, folder: Path
) -> None:
    if log.stat().st_size > MAX_LOG_BYTES:
        raise GraderError(f"{log} is longer than {MAX_LOG_BYTES} bytes", kind="log_size", retryable=False)
    try:
        text = log.read_bytes().decode(errors="replace")
    except OSError as error:
        raise FarmError(f"{log} can't be read: {error}", kind="storage") from error
    script = await grading.eval_script(row)
    grade = await grading.grade(row, patch=prediction.patch, model=prediction.model, log=text)
    folder.mkdir(parents=True)
    (folder / LOG).write_text(text)
    (folder / PATCH).write_text(prediction.patch or "")
    (folder / SCRIPT).write_text(script)
    (folder / REPORT).write_text(json.dumps({prediction.instance_id: grade.report}, indent=4))


def _log_of(logs: Path, prediction: Prediction) -> Path | None:
    name = prediction.instance_id
    places = (
        logs / name / LOG,
        logs / _folder(prediction.model) / name / LOG,
        logs / f"{name}.log",
        logs / f"{name}.txt",
    )
    return next((place for place in places if place.is_file()), None)


def _folder(model: str) -> str:
    """The official spelling of a model in paths."""
    return model.replace("/", "__")
