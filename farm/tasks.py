"""Task sources: from the name a person types to a list of tasks.

``micro:<split>`` and ``pypi[:<package>]`` are the project's own suites; ``swebench:PATH`` reads rows of the SWE-bench
schema, whose repositories are in their images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.suites import qualify
from farm.types import ImageFiles, Task

_TEXT = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "version")
_GRADING = ("eval_script", "log_parser", "image")
_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_COLUMNS = (*_TEXT, *_GRADING, *_LISTS)


def load_tasks(spec: str, *, limit: int | None = None, quarantined: bool = False) -> list[Task]:
    """The tasks that ``spec`` names, in their fixed order, at most ``limit`` of them.

    Tasks that failed their qualification are left out, unless ``quarantined`` asks for them too.

    Raises UsageError when the suite, split, package or file is unknown or unreadable.
    """
    suite, _, rest = spec.partition(":")
    if suite not in SUITES:
        raise UsageError(
            f"--tasks {spec!r}: unknown suite {suite!r}; allowed are micro:SPLIT, pypi[:PACKAGE], swebench:PATH"
        )
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: at least one task is needed; give 1 or more, or leave it out for all")
    tasks = SUITES[suite](rest)
    if not quarantined:
        results = qualify.read(qualify.results_path(spec))
        tasks = [task for task in tasks if task.instance_id not in results or results[task.instance_id].qualified]
    return tasks[:limit]


def swebench_tasks(path: str) -> list[Task]:
    """Rows of a ``.parquet`` or ``.jsonl`` file in the SWE-bench schema."""
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise UsageError(f"--tasks swebench:{path}: {reason}; give a readable .parquet or .jsonl file") from error
    rows = _rows(file, data)
    dataset = f"swebench/{file.stem}@{hashlib.sha256(data).hexdigest()[:12]}"
    tasks = [_task(row, dataset, where=f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    if not tasks:
        raise UsageError(f"--tasks swebench:{path}: the file holds no rows")
    return tasks


def _rows(file: Path, data: bytes) -> list[Mapping[str, Any]]:
    if file.suffix == ".parquet":
        return _parquet(file, data)
    if file.suffix == ".jsonl":
        return [_json(line, where=f"{file}, line {n}") for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    raise UsageError(f"--tasks swebench:{file}: unknown file type {file.suffix!r}; allowed are .parquet and .jsonl")


def _parquet(file: Path, data: bytes) -> list[Mapping[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[Mapping[str, Any]] = parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
    except pyarrow.ArrowException as error:
        raise UsageError(
            f"--tasks swebench:{file}: not a readable Parquet file ({str(error).splitlines()[0]})"
        ) from error
    return rows


def _json(line: bytes, *, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a JSON object is needed, this is {type(row).__name__}")
    return row


def _task(row: Mapping[str, Any], dataset: str, *, where: str) -> Task:
    missing = [name for name in _COLUMNS if row.get(name) is None]
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}; a row needs {', '.join(_COLUMNS)}")
    wrong = [name for name in (*_TEXT, *_GRADING) if not isinstance(row[name], str)]
    if wrong:
        raise UsageError(f"{where}: {', '.join(wrong)} must be text")
    strata = {"repo": row["repo"]}
    if row.get("difficulty"):
        strata["difficulty"] = str(row["difficulty"])
    return Task(
        **{name: row[name] for name in (*_TEXT, *_GRADING)},
        dataset=dataset,
        fail_to_pass=_ids(row, "FAIL_TO_PASS", where),
        pass_to_pass=_ids(row, "PASS_TO_PASS", where),
        workspace=ImageFiles(),
        strata=strata,
    )


def _ids(row: Mapping[str, Any], column: str, where: str) -> tuple[str, ...]:
    """Test ids, given as a list or as a JSON list in a string (both occur in published sets)."""
    value = row[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if (
        not isinstance(value, Iterable)
        or isinstance(value, str | Mapping)
        or not all(isinstance(v, str) for v in value)
    ):
        raise UsageError(f"{where}: {column} must be a list of test ids")
    return tuple(value)


def _micro(split: str) -> list[Task]:
    from farm.suites import micro

    return list(micro.load(split))


def _pypi(package: str) -> list[Task]:
    from farm.suites import pypi

    return pypi.load(package or None)


SUITES: Mapping[str, Callable[[str], list[Task]]] = {"micro": _micro, "pypi": _pypi, "swebench": swebench_tasks}
