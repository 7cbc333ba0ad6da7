"""A folder of tasks that ``farm make-tasks`` made: facts only, no code.

``sources.json`` (which archives, by digest, and what of them the agent must not see), ``tasks.jsonl`` (where the bugs
are and which tests notice them), ``qualification.jsonl`` (what grading them again and again gave). The code itself is
in the cache, by digest.

``python -m farm.suites.made fetch FOLDER`` fills the cache again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm.durable import write_json
from farm.errors import FarmError, UsageError
from farm.suites import sdist
from farm.suites.code_source import Code, open_source
from farm.suites.package_index import PackageIndexes
from farm.suites.pypi import Source, task_of
from farm.types import Task

_FETCHES = 4  # at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One source of a folder. ``failing`` and ``flaky`` are tests that fail, or do not always pass, without a bug; no
    task counts them."""

    source: Source
    origin: str
    failing: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()


def read_sources(folder: Path) -> dict[str, Known]:
    """By package; none when the folder has none yet. Raises UsageError."""
    path = folder / "sources.json"
    if not path.exists():
        return {}
    try:
        return {name: _known(name, facts) for name, facts in json.loads(path.read_text()).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error


def write_sources(folder: Path, known: Mapping[str, Known]) -> None:
    content = {}
    for name, one in sorted(known.items()):
        facts = asdict(one.source)
        content[name] = {key: facts[key] for key in ("version", "sha256", "repo", "remove", "python_path")}
        content[name] |= {"origin": one.origin, "failing": one.failing, "flaky": one.flaky}
    write_json(folder / "sources.json", content)


def _known(name: str, facts: Mapping[str, Any]) -> Known:
    source = Source(
        package=name,
        version=facts["version"],
        sha256=facts["sha256"],
        repo=facts["repo"],
        remove=tuple(facts["remove"]),
        python_path=facts["python_path"],
    )
    return Known(source=source, origin=facts["origin"], failing=tuple(facts["failing"]), flaky=tuple(facts["flaky"]))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all packages; none when there are none yet."""
    path = folder / "tasks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(folder: Path, package: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Put ``rows`` in the place of the package's; the others stay."""
    all_rows = [*(row for row in read_rows(folder) if row["package"] != package), *rows]
    fresh = folder / "tasks.jsonl.new"
    ordered = sorted(all_rows, key=lambda row: str(row["instance_id"]))
    fresh.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered))
    fresh.replace(folder / "tasks.jsonl")


def load(spec: str) -> list[Task]:
    """``FOLDER`` or ``FOLDER:PACKAGE``. Raises UsageError on an unknown one, or when its code is not in the cache."""
    name, _, package = spec.partition(":")
    folder = Path(name)
    known = read_sources(folder)
    if not known:
        raise UsageError(
            f"--tasks made:{spec}: no tasks in {folder}: `farm make-tasks SOURCE --out {folder}` makes some"
        )
    if package and package not in known:
        raise UsageError(f"--tasks made:{spec}: unknown package; allowed are {', '.join(sorted(known))}")
    wanted = {package} if package else known.keys()
    absent = sorted(name for name in wanted if not sdist.is_cached(known[name].source.sha256))
    if absent:
        raise UsageError(
            f"--tasks made:{spec}: the code of {', '.join(absent)[:200]} is not in {sdist.cache_dir()}: run "
            f"`python -m farm.suites.made fetch {folder}`",
            kind="no_sdist",
        )
    path = folder / "tasks.jsonl"
    try:
        dataset = f"made/{folder.resolve().name}@{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        rows = [row for row in read_rows(folder) if row["package"] in wanted]
        return [task_of(known[row["package"]].source, row, dataset) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} can't be read ({type(error).__name__}: {error}): restore it, or make it anew")


def fetch(folder: Path, indexes: PackageIndexes | None = None) -> int:
    """Put the code of a folder's tasks into the cache, several at once; how much of it was not there. Raises
    FarmError."""
    known = read_sources(folder)
    if not known:
        raise UsageError(f"{folder}: holds no sources.json; give a folder that `farm make-tasks` wrote")
    missing = [one for one in known.values() if not sdist.is_cached(one.source.sha256)]
    if missing:
        asked = indexes or PackageIndexes.from_pip()
        with ThreadPoolExecutor(_FETCHES, thread_name_prefix="fetch") as threads:
            for _ in threads.map(lambda one: _fetch(one, asked), missing):
                pass
    return len(missing)


def _fetch(one: Known, indexes: PackageIndexes) -> None:
    found: Code = open_source(one.origin, indexes)
    if found.source.sha256 != one.source.sha256:
        raise FarmError(f"{one.origin} is not what the tasks were made from: its digest differs", kind="no_sdist")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m farm.suites.made", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="fetch the code of a folder's tasks into the cache")
    fetching.add_argument("folder", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        count = fetch(chosen.folder)
    except (FarmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} sources fetched, in {sdist.cache_dir()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
