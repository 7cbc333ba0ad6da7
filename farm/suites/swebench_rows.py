"""Rows of the SWE-bench schema, version 5, and the tasks they stand for.

A row carries all that grading needs: the image with the repository, the eval script, the parser of its log. Rows come
from a local ``.parquet`` or ``.jsonl`` file or from the Hugging Face Hub. Rows of SWE-bench 4 and before lack those
columns; nothing here looks them up elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.grader.parsers import END_MARKER, START_MARKER
from farm.types import ImageFiles, Task

EVAL_TYPES = ("pass_and_fail", "fail_only")

_TEXT = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "version")
_GRADING = ("eval_script", "log_parser", "image")
_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_COLUMNS = (*_TEXT, *_GRADING, *_LISTS)
_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>[\w.-]+))?")
_HUB_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """``dataset`` names the content: "swebench/<file>@<digest>" or "<owner>/<set>:<split>@<commit>"."""

    dataset: str
    rows: tuple[Mapping[str, Any], ...]
    where: str


def swebench_tasks(source: str) -> list[Task]:
    """The tasks of ``source``: a ``.parquet`` or ``.jsonl`` file, or ``OWNER/SET[@REVISION][:SPLIT]`` of the Hugging
    Face Hub (default split: test). Raises UsageError, naming the row, before anything is done with any of them."""
    read = read_rows(source)
    tasks = [
        row_task(row, read.dataset, where=f"{read.where}, row {number}") for number, row in enumerate(read.rows, 1)
    ]
    if not tasks:
        raise UsageError(f"--tasks swebench:{source}: the file holds no rows")
    seen: set[str] = set()
    for number, task in enumerate(tasks, 1):
        if task.instance_id in seen:
            raise UsageError(f"{read.where}, row {number}: instance_id {task.instance_id!r} is there twice: remove one")
        seen.add(task.instance_id)
    return tasks


def read_rows(source: str) -> Rows:
    """The rows of ``source`` as they are, unchecked. Raises UsageError."""
    file = Path(source)
    hub = _HUB.fullmatch(source)
    if hub and file.suffix not in (".parquet", ".jsonl") and not file.exists():
        return _from_hub(hub["repo"], hub["revision"], hub["split"] or "test")
    try:
        data = file.read_bytes()
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise UsageError(
            f"--tasks swebench:{source}: {reason}; give a readable .parquet or .jsonl file, or OWNER/SET[:SPLIT] of "
            "the Hugging Face Hub"
        ) from error
    digest = hashlib.sha256(data).hexdigest()[:12]
    return Rows(dataset=f"swebench/{file.stem}@{digest}", rows=tuple(_rows(file, data)), where=source)


def official_row(task: Task) -> dict[str, Any]:
    """What ``swebench.harness.utils.make_test_spec`` needs of a task."""
    return {
        "instance_id": task.instance_id,
        "image": task.image,
        "repo": task.repo,
        "version": task.version,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "log_parser": task.log_parser,
        "eval_type": task.eval_type,
        "eval_script": task.eval_script,
    }


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


def _from_hub(repo: str, revision: str | None, split: str) -> Rows:
    """The Parquet files of one split, at the commit that ``revision`` names now, by way of the Hub's own cache."""
    from huggingface_hub import HfApi

    where = f"{repo}:{split}"
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    wanted = re.compile(rf"(?:.*/)?{re.escape(split)}(?:-\d+-of-\d+)?\.parquet")
    try:
        info = api.dataset_info(repo, revision=revision, timeout=_HUB_S)
        names = sorted(file.rfilename for file in info.siblings or ())
        found = [name for name in names if wanted.fullmatch(name)]
        paths = [Path(api.hf_hub_download(repo, name, repo_type="dataset", revision=info.sha)) for name in found]
    except Exception as error:  # the client raises its own, httpx's and the system's errors
        raise UsageError(
            f"--tasks swebench:{where}: the Hugging Face Hub does not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no reason'}); check the "
            "name, the network and HF_TOKEN, or give a local .parquet or .jsonl file"
        ) from error
    if not paths:
        raise UsageError(
            f"--tasks swebench:{where}: no Parquet file of split {split!r}; files: {', '.join(names)[:300] or 'none'}"
        )
    rows = [row for path in paths for row in _parquet(path, path.read_bytes())]
    return Rows(dataset=f"{where}@{(info.sha or '')[:12]}", rows=tuple(rows), where=where)


def row_task(row: Mapping[str, Any], dataset: str, *, where: str) -> Task:
    """The task of one row. Raises UsageError, beginning with ``where``."""
    missing = [name for name in _COLUMNS if row.get(name) is None]
    if set(missing) & set(_GRADING) and not set(missing) - set(_GRADING):
        raise UsageError(
            f"{where}: missing {', '.join(missing)}: a row of SWE-bench 4 or before; give rows of version 5 (they "
            "carry eval_script, log_parser and image)"
        )
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}; a row needs {', '.join(_COLUMNS)}")
    wrong = [name for name in (*_TEXT, *_GRADING) if not isinstance(row[name], str)]
    if wrong:
        raise UsageError(f"{where}: {', '.join(wrong)} must be text")
    empty = [name for name in ("instance_id", "repo", "base_commit", *_GRADING) if not row[name].strip()]
    if empty:
        raise UsageError(f"{where}: {', '.join(empty)} must not be empty")
    eval_type = row.get("eval_type") or EVAL_TYPES[0]
    if eval_type not in EVAL_TYPES:
        raise UsageError(f"{where}: eval_type {eval_type!r} is unknown; allowed are {', '.join(EVAL_TYPES)}")
    lacks = [marker for marker in (START_MARKER, END_MARKER) if marker not in row["eval_script"]]
    if lacks:
        raise UsageError(f"{where}: eval_script never writes {lacks[0]!r}, so no log of it can be graded")
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
        eval_type=eval_type,
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
