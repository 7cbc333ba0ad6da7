"""What ``farm overlap`` compares: the repositories of a task source, of a data set's rows, or of a plain list.

Training sets have other columns than benchmarks, so rows are read leniently here: whatever names a repository will do,
and base commit and gold patch are used where they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.suites.overlap import Overlap, RepoRef, canonical, overlap
from farm.suites.swebench_rows import read_rows
from farm.types import Task

_NAMES = ("repo", "repo_name", "mirror", "repo_url", "image", "docker_image", "image_name", "instance_id")
_COMMITS = ("base_commit", "commit", "commit_hash", "base_sha")
_PATCHES = ("patch", "gold_patch", "model_patch")
_OWN_SUITES = ("micro", "pypi", "made", "subset")
_FORMATS = (
    "a task source (micro:SPLIT, pypi, made:FOLDER, subset:FILE, swebench:ROWS), a .parquet or .jsonl file of rows, a "
    ".json file with a list (FILE#KEY.KEY for one inside), or a .txt file with one repository a line"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``tasks`` training tasks whose repository is spelled ``train`` share ``bench`` with the benchmark."""

    train: str
    bench: str
    reason: str
    detail: str
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``train_repos``, ``bench_repos``: how many different ones, by canonical name."""

    findings: tuple[Finding, ...]
    train_tasks: int
    train_repos: int
    bench_repos: int


def compare(train: Sequence[RepoRef], bench: Sequence[RepoRef]) -> Comparison:
    """All overlaps, same spelling and reason together, most tasks first."""
    found: dict[tuple[str, str, str], Overlap] = {}
    counts = Counter[tuple[str, str, str]]()
    for match in overlap(train, bench):
        key = (match.train.name if match.reason not in ("commit", "paths", "vendored") else canonical(match.train.name),
               match.bench, match.reason)  # fmt: skip
        found.setdefault(key, match)
        counts[key] += 1
    findings = [
        Finding(train=name, bench=repo, reason=reason, detail=found[name, repo, reason].detail, tasks=count)
        for (name, repo, reason), count in counts.most_common()
    ]
    return Comparison(
        findings=tuple(findings),
        train_tasks=len(train),
        train_repos=len({canonical(ref.name) for ref in train}),
        bench_repos=len({canonical(ref.name) for ref in bench}),
    )


def load_refs(source: str) -> list[RepoRef]:
    """One reference per task, row or line of ``source``. Raises UsageError."""
    from farm.tasks import load_tasks

    if source.partition(":")[0] in _OWN_SUITES:
        refs = [ref_of(task) for task in load_tasks(source, quarantined=True)]
    else:
        refs = _from_file(source)
    if not refs:
        raise UsageError(f"{source}: holds no repositories; give {_FORMATS}")
    return refs


def ref_of(task: Task) -> RepoRef:
    return RepoRef(name=task.repo, base_commit=task.base_commit, paths=patch_paths(task.patch))


def patch_paths(patch: str) -> tuple[str, ...]:
    """The files that a diff changes, new and deleted ones included."""
    lines = [line.split("\t")[0] for line in patch.splitlines()]
    paths = [line[6:] for line in lines if line.startswith(("+++ b/", "--- a/"))]
    return tuple(dict.fromkeys(paths))


def _from_file(source: str) -> list[RepoRef]:
    path, _, key = source.partition("#")
    suffix = Path(path).suffix
    if suffix == ".txt":
        lines = (line.partition("#")[0].strip() for line in _text(path, source).splitlines())
        return [RepoRef(name=line) for line in lines if line]
    if suffix == ".json":
        return _from_json(_text(path, source), key, source)
    rows = read_rows(source.removeprefix("swebench:"))
    return [_ref(row, f"{source}, row {number}") for number, row in enumerate(rows.rows, 1)]


def _text(path: str, source: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{source}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}; give {_FORMATS}"
        ) from error


def _from_json(text: str, key: str, source: str) -> list[RepoRef]:
    try:
        value: Any = json.loads(text)
        for part in filter(None, key.split(".")):
            value = value[part]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{source}: {type(error).__name__}: {error}; give {_FORMATS}") from error
    if isinstance(value, Mapping):
        value = list(value)  # an object by repository
    if not isinstance(value, list):
        raise UsageError(f"{source}: a list is needed, this is {type(value).__name__}; name one inside by FILE#KEY.KEY")
    return [
        RepoRef(name=entry) if isinstance(entry, str) else _ref(entry, f"{source}, entry {number}")
        for number, entry in enumerate(value, 1)
    ]


def _ref(row: Any, where: str) -> RepoRef:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: a name or an object is needed, this is {type(row).__name__}")
    owner, repo = _first(row, ("owner",)), _first(row, ("repo",))
    name = f"{owner}/{repo}" if owner and repo and "/" not in repo else _first(row, _NAMES)
    if not name:
        raise UsageError(f"{where}: nothing in it names a repository; looked for {', '.join(_NAMES)}")
    return RepoRef(name=name, base_commit=_first(row, _COMMITS), paths=patch_paths(_first(row, _PATCHES)))


def _first(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    """The first of ``columns`` that holds text, or ""."""
    return next((row[column] for column in columns if isinstance(row.get(column), str) and row[column].strip()), "")
