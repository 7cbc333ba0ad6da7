"""Tasks from real packages: a pinned source distribution with one injected bug, graded by the package's own tests.

``datasets/pypi`` holds only facts (which release, where the bug is, which tests notice it). The code itself is fetched
at set-up from the index that pip is configured for, checked against the pinned digest, and runs in sandboxes only.

``python -m farm.suites.pypi fetch`` fills the cache; ``... make`` makes the rows anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from farm.errors import FarmError, UsageError
from farm.suites import sdist
from farm.suites.operators import Mutation, source_lines
from farm.suites.package_index import PackageIndexes
from farm.suites.patch import unified
from farm.types import SdistFiles, Task

DATASET = Path(__file__).parents[2] / "datasets" / "pypi"
WORKDIR = "/testbed"
_TEST, _WORD = re.compile(rb"^\s*(?:async\s+)?def test", re.MULTILINE), re.compile(rb"\w+")
_MAX_SUPPORT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A pinned release, or another archive of files by its digest. ``tasks`` and ``modules`` (path -> test files that
    cover it) say what ``make`` is to look for."""

    package: str
    version: str
    sha256: str
    repo: str
    remove: tuple[str, ...]  # path prefixes the agent must not see
    tasks: int = 0
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    python_path: str = "."  # folders to import from, as in pytest's setting; "." is none: it is that of no ini-file


def sources() -> dict[str, Source]:
    """All pinned packages by name, from ``requirements.txt`` (in pip's hash-checking form) and ``sources.json``."""
    pins = re.findall(
        r"^(\S+)==(\S+) --hash=sha256:(\w{64})$", (DATASET / "requirements.txt").read_text(), re.MULTILINE
    )
    facts = json.loads((DATASET / "sources.json").read_text())
    found = {}
    for package, version, sha256 in pins:
        fact = facts[package]
        found[package] = Source(
            package=package,
            version=version,
            sha256=sha256,
            repo=fact["repo"],
            remove=tuple(fact["remove"]),
            tasks=fact["tasks"],
            modules={path: tuple(tests) for path, tests in fact["modules"].items()},
        )
    return found


def load(package: str | None = None) -> list[Task]:
    """The tasks of one package or of all. Raises UsageError on an unknown one, or when its source was not fetched."""
    known = sources()
    if package is not None and package not in known:
        raise UsageError(f"--tasks pypi:{package}: unknown package; allowed are {', '.join(sorted(known))}")
    path = DATASET / "tasks.jsonl"
    try:
        data = path.read_bytes()
        rows = [json.loads(line) for line in data.splitlines()]
        dataset = f"pypi@{hashlib.sha256(data).hexdigest()[:12]}"
        return [task_of(known[row["package"]], row, dataset) for row in rows if package in (None, row["package"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} can't be read ({type(error).__name__}: {error}): restore it, or make it with "
            "`python -m farm.suites.pypi make`"
        ) from error


def task_of(source: Source, row: Mapping[str, Any], dataset: str) -> Task:
    """The whole task that a row of facts stands for."""
    path, mutation = row["path"], Mutation(**row["mutation"])
    whole = sdist.files(source.sha256)[path].decode()
    broken = mutation.apply(whole)
    targets = tuple(row["targets"])
    return Task(
        instance_id=row["instance_id"],
        dataset=dataset,
        repo=source.repo,
        base_commit=row["base_commit"],
        problem_statement=row["problem_statement"],
        patch=unified(path, broken, whole),
        test_patch=_test_patch(
            source.sha256, source.remove, tuple(dict.fromkeys(t.partition("::")[0] for t in targets))
        ),
        fail_to_pass=spread(row["fail_to_pass"]),
        pass_to_pass=spread(row["pass_to_pass"]),
        eval_script=eval_script(targets, python_path=source.python_path, cpu_limit_s=row.get("cpu_limit_s")),
        log_parser="pytest",
        workspace=workspace(source, path, mutation),
        image="host-pytest",
        version=source.version,
        workdir=WORKDIR,
        strata={"package": source.package, "kind": mutation.kind},
    )


def workspace(source: Source, path: str, mutation: Mutation) -> SdistFiles:
    """The release with the bug: the changed line, with as many lines around it as make it the only such place."""
    lines = source_lines(sdist.files(source.sha256)[path].decode())
    text, at = "".join(lines), mutation.line - 1
    for around in range(len(lines)):
        first = max(at - around, 0)
        old = "".join(lines[first : at + around + 1])
        if text.count(old) == 1:
            break
    inside = Mutation(
        line=mutation.line - first,
        column=mutation.column,
        kind=mutation.kind,
        old=mutation.old,
        new=mutation.new,
        function=mutation.function,
    )
    return SdistFiles(
        package=source.package,
        version=source.version,
        sha256=source.sha256,
        remove=source.remove,
        edit=(path, old, inside.apply(old)),
    )


def eval_script(
    targets: Iterable[str], *, workdir: str = WORKDIR, python_path: str = ".", cpu_limit_s: int | None = None
) -> str:
    """Run the tests ``targets`` (files or node ids) and print one summary line per test. ``cpu_limit_s``: CPU time
    after which the kernel ends the tests.

    Nothing of the work tree is imported before pytest itself (``-P``), its configuration is not read (``-c``), and what
    tests or code print is not shown, so that it can't be taken for a result.
    """
    limit = "" if cpu_limit_s is None else f"ulimit -t {cpu_limit_s}\n"
    return (
        f"#!/bin/bash\ncd {workdir}\n{limit}"
        "export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE=1 COLUMNS=200\n"
        "echo '>>>>> Start Test Output'\n"
        f"python -P -m pytest -c /dev/null --rootdir=. -o {shlex.quote(f'pythonpath={python_path}')} "
        "-p no:cacheprovider -q --color=no --tb=no "
        f"--show-capture=no -rfEsp {' '.join(shlex.quote(target) for target in targets)}\n"
        "code=$?\necho '>>>>> End Test Output'\nexit $code\n"
    )


def compact(tests: Sequence[str]) -> dict[str, list[str]]:
    """Test ids by what stands before their last ``::``."""
    grouped: dict[str, list[str]] = {}
    for test in tests:
        head, _, name = test.rpartition("::")
        grouped.setdefault(head, []).append(name)
    return grouped


def spread(grouped: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The reverse of :func:`compact`."""
    return tuple(f"{head}::{name}" for head, names in grouped.items() for name in names)


@lru_cache(maxsize=64)
def _test_patch(sha256: str, folders: tuple[str, ...], tests: tuple[str, ...]) -> str:
    """Adds the test files, and whatever else of their folders is small text and not itself a test."""
    files = sdist.files(sha256)
    words = frozenset(_WORD.findall(b" ".join(files[path] for path in tests)))
    parts = []
    for path, data in files.items():
        if path in tests or (path.startswith(folders) and _is_support(path, data, words)):
            parts.append(unified(path, None, data.decode()))
    return "".join(parts)


def _is_support(path: str, data: bytes, words: frozenset[bytes]) -> bool:
    """``words``: those of the test files. A module called test_util.py is none itself where they name it and it has no
    tests."""
    name = path.rpartition("/")[2]
    helper = name.removesuffix(".py").encode() in words and name.endswith(".py") and not _TEST.search(data)
    if (name.startswith(("test_", "fuzz_")) and not helper) or len(data) > _MAX_SUPPORT_BYTES or b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def fetch(indexes: PackageIndexes | None = None) -> int:
    """Download what is missing; how many were. ``indexes``: default: as pip is configured here.

    Nothing of a package is run. Raises FarmError when one can't be had."""
    return fetch_releases(sources().values(), indexes)


def fetch_releases(releases: Iterable[Source], indexes: PackageIndexes | None = None) -> int:
    """As :func:`fetch`, of any releases."""
    missing = [source for source in releases if not sdist.is_cached(source.sha256)]
    if not missing:
        return 0
    indexes = indexes or PackageIndexes.from_pip()
    for source in missing:
        sdist.store(source.sha256, indexes.fetch(source.package, source.version, source.sha256))
    return len(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m farm.suites.pypi", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="fetch the pinned source distributions into the cache")
    make = commands.add_parser("make", help="make the rows of the dataset anew")
    make.add_argument("--seed", type=int, default=20261129)
    make.add_argument("--package", choices=sorted(sources()), action="append", help="only this one; may be repeated")
    chosen = parser.parse_args(arguments)
    try:
        count = fetch()
        print(f"{count} source distributions fetched, {len(sources()) - count} at hand, in {sdist.cache_dir()}")
        if chosen.command == "make":
            from farm.suites import pypi_make

            pypi_make.make(seed=chosen.seed, packages=chosen.package or sorted(sources()))
    except (FarmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
