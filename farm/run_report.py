"""The official SWE-bench files of a run of the farm: its predictions, the logs and reports of their gradings, and the
run report that ``swebench`` itself makes of them.

The logs were kept when the attempts were graded (:mod:`farm.grader.kept_logs`); nothing is graded here. As in the
official harness, a patch that does not apply and tests that never come to their end have no report and count as errors,
which is as little a success as *not resolved*; an attempt that an infrastructure failure ended is no prediction.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.config import parse_config
from farm.errors import UsageError
from farm.grader.kept_logs import kept_log
from farm.grader.official import OfficialGrading, check_installed
from farm.offline_grading import Prediction, attempts_of, new_tree, write_predictions
from farm.run_folder import RunFolder
from farm.tasks import load_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """``report``: the official run report, ``path``: its file. ``failed``: attempts that an infrastructure failure
    ended; ``without_log``: instances whose tests were run, but whose log the run folder does not have."""

    report: Mapping[str, Any]
    path: Path
    failed: int
    without_log: tuple[str, ...]


def report_run(
    run_path: Path,
    *,
    model: str,
    out: Path,
    index: int = 0,
    run_id: str | None = None,
    grading: OfficialGrading | None = None,
    now: Callable[[], float] = time.time,
) -> RunReport:
    """Write the official files of attempt ``index`` of every task of a run below ``out``: the tree
    ``logs/run_evaluation/<run id>/<model>/<instance>/``, ``predictions.jsonl`` and the run report.

    ``grading``: another process than the default one; it is closed here. Raises UsageError, before anything is
    written."""
    run = RunFolder.open(run_path)
    config = parse_config(run.config(), where=str(run.path / "config.json"))
    if config.grader.name != "swebench":
        raise UsageError(
            f"{run_path}: was graded by {config.grader.name!r}; SWE-bench's own files can be had of runs on its rows, "
            "graded by 'swebench'"
        )
    rows, failed = attempts_of(run_path, index=index)
    tasks = [task.instance_id for task in load_tasks(config.rollout.tasks, limit=config.rollout.limit)]
    if grading is None:
        check_installed()
        grading = OfficialGrading()
    predictions = [Prediction(instance_id=row.instance_id, model=model, patch=row.patch) for row, _ in rows]
    run_id, tree = new_tree(out, run_id=run_id, model=model, dataset=config.rollout.tasks, now=now)
    write_predictions(out / "predictions.jsonl", predictions)
    without_log = []
    for row, evidence in rows:
        name = row.instance_id
        kept = kept_log(run.graded, instance_id=name, patch=row.patch, log_tail=evidence.log_tail)
        if kept.is_dir():
            shutil.copytree(kept, tree / name)
        elif row.patch and evidence.patch_applied:
            without_log.append(name)

    async def work() -> str:
        async with grading:
            return await grading.run_report(
                {prediction.instance_id: prediction.official for prediction in predictions},
                instance_ids=tasks,
                run_id=run_id,
                at=str(out.absolute()),
            )

    path = Path(asyncio.run(work()))
    return RunReport(report=json.loads(path.read_text()), path=path, failed=failed, without_log=tuple(without_log))
