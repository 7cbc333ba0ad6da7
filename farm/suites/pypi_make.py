"""Find the tasks of ``datasets/pypi``: break a package in one place and see which of its own tests notice.

A bug becomes a task when at least one test fails because of it, at least one other still passes, and the run stays
short. Bugs are taken in an order drawn by the seed, one per function, the kinds as evenly as they occur.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import resource
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from farm.grader.parsers import parse_pytest
from farm.suites import pypi, sdist
from farm.suites.operators import Mutation, mutations
from farm.suites.pypi import Source
from farm.suites.repo import make_repo
from farm.types import content_digest

_RUN_CPU_S = 3  # the limit of one run of tests: an endless loop is no task
_RUN_S = 40.0  # the wall limit of a run that waits for ever
_MEMORY_KIB = 2 << 20
_CPU_S = 2.0  # of a task that is kept
_WHOLE_FILE = 60  # tests; of a longer file only what mentions the function is run
_MAX_FAILING = 8
_TEST_NAME = re.compile(r"^test|^Test|Tests?$")
_ODD = re.compile(r"[^!-\[\]-~]")  # in the name of a test: blanks, backslashes and non-ASCII don't survive every log
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|/tmp/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``messages`` is the one-line reason of each failed test, as pytest's summary gives it."""

    statuses: Mapping[str, str]
    messages: Mapping[str, str]
    cpu_s: float


def make(*, seed: int, packages: Sequence[str]) -> None:
    """Make the rows of ``packages`` anew in ``tasks.jsonl``. Takes some five minutes a package on one core."""
    for package in packages:
        found: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            for row in _tasks_of(pypi.sources()[package], Path(folder), seed):
                found.append(row)
                _save(package, found)
        print(f"{package}: {len(found)} tasks, {dict(Counter(row['mutation']['kind'] for row in found))}", flush=True)


def _save(package: str, found: Sequence[dict[str, Any]]) -> None:
    """Put ``found`` in the place of the package's rows; the others stay."""
    path = pypi.DATASET / "tasks.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = sorted([*(r for r in rows if r["package"] != package), *found], key=lambda row: row["instance_id"])
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _tasks_of(source: Source, at: Path, seed: int) -> Iterator[dict[str, Any]]:
    """At most ``source.tasks`` rows, one per function, no module with much more than its share."""
    whole = sdist.files(source.sha256)
    for path, data in whole.items():
        (at / path).parent.mkdir(parents=True, exist_ok=True)
        (at / path).write_bytes(data)
    baseline = cache(partial(run_tests, at))
    functions: set[tuple[str, str]] = set()
    kinds: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    most = -(-2 * source.tasks // len(source.modules))
    for tried, (path, mutation) in enumerate(_candidates(source, whole, seed), 1):
        if len(functions) == source.tasks:
            break
        full = kinds[mutation.kind] > min(kinds.values(), default=0) + 1 or modules[path] == most
        if full or (path, mutation.function) in functions:
            continue
        row = _row(source, at, path, mutation, seed, baseline)
        if row:
            functions.add((path, mutation.function))
            kinds[mutation.kind] += 1
            modules[path] += 1
            print(
                f"{tried} tried, {len(functions)} of {source.tasks}: {row['instance_id']} {mutation.kind}", flush=True
            )
            yield row


def _candidates(source: Source, whole: Mapping[str, bytes], seed: int) -> Iterator[tuple[str, Mutation]]:
    """Every bug inside a function, drawn so that each module and each kind has its turn early."""
    draw = random.Random(f"{seed} {source.package}")
    keyed = []
    for path in source.modules:
        turns: Counter[str] = Counter()
        for mutation in sorted(mutations(whole[path].decode()), key=lambda _: draw.random()):
            if mutation.function:
                turns[mutation.kind] += 1
                keyed.append((turns[mutation.kind], draw.random(), path, mutation))
    for _, _, path, mutation in sorted(keyed):
        yield path, mutation


def _row(
    source: Source,
    at: Path,
    path: str,
    mutation: Mutation,
    seed: int,
    baseline: Callable[[tuple[str, ...]], Run | None],
) -> dict[str, Any] | None:
    whole = sdist.files(source.sha256)
    targets = [t for file in source.modules[path] for t in _targets(file, whole[file].decode(), mutation.function)]
    if not targets:
        return None
    before = baseline(tuple(targets))
    if before is None or before.cpu_s > _CPU_S:
        return None
    (at / path).write_text(mutation.apply(whole[path].decode()))
    try:
        after = run_tests(at, targets)
    finally:
        (at / path).write_bytes(whole[path])
    if after is None or after.cpu_s > _CPU_S:
        return None
    return make_row(source, path, mutation, targets, before, after, seed=seed)


def make_row(
    source: Source,
    path: str,
    mutation: Mutation,
    targets: Sequence[str],
    before: Run,
    after: Run,
    *,
    seed: int,
    most_failing: int = _MAX_FAILING,
    unstable: frozenset[str] = frozenset(),
) -> dict[str, Any] | None:
    """The row of a bug, from the runs of ``targets`` without and with it; None when it is no task: no test or too many
    fail because of it, or none still passes. Tests in ``unstable`` count for nothing."""
    passed = [
        test
        for test, status in before.statuses.items()
        if status == "PASSED" and not _ODD.search(test) and test not in unstable
    ]
    broken = [test for test in passed if after.statuses.get(test) in ("FAILED", "ERROR")]
    kept = [test for test in passed if after.statuses.get(test) == "PASSED"]
    if not broken or not kept or len(broken) > most_failing:
        return None
    commit, _ = make_repo(sdist.work_tree(pypi.workspace(source, path, mutation)))
    facts = asdict(mutation)
    name = content_digest([source.sha256, path, facts])[:8]
    return {
        "instance_id": f"{source.package}__{path.rpartition('/')[2][:-3]}-{name}",
        "package": source.package,
        "path": path,
        "mutation": facts,
        "base_commit": commit,
        "targets": list(targets),
        "fail_to_pass": pypi.compact(broken),
        "pass_to_pass": pypi.compact(kept),
        "problem_statement": statement(path, mutation.function, broken, after.messages),
        "seed": seed,
    }


def _targets(file: str, text: str, function: str) -> list[str]:
    """What of a test file to run: all of it, or the classes and functions that mention ``function``, and one more."""
    tree = ast.parse(text)
    tests = sum(node.name.startswith("test") for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    if tests <= _WHOLE_FILE:
        return [file]
    word = re.compile(rf"\b{re.escape(function)}\b")
    nodes = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and _TEST_NAME.search(n.name)]
    told = [bool(word.search(ast.get_source_segment(text, node) or "")) for node in nodes]
    others = [node for node, tells in zip(nodes, told, strict=True) if not tells]
    chosen = [node for node, tells in zip(nodes, told, strict=True) if tells][:4]
    return [f"{file}::{node.name}" for node in (*chosen, *others[:1])] if chosen else []


def run_tests(at: Path, targets: Sequence[str]) -> Run | None:
    """Run the eval script of ``targets`` in the folder ``at``; None when it has to be killed."""
    script = f"ulimit -v {_MEMORY_KIB} -t {_RUN_CPU_S}\n{pypi.eval_script(targets, workdir=str(at))}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(["bash", "-c", script], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(_RUN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        log.seek(0)
        text = log.read().decode(errors="replace")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return read_run(text, cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def read_run(log: str, *, cpu_s: float) -> Run:
    """What the log of an eval script says."""
    messages = dict(re.findall(r"^(?:FAILED|ERROR) (\S+) - (.+)$", log, re.MULTILINE))
    return Run(statuses=parse_pytest(log), messages=messages, cpu_s=cpu_s)


def statement(path: str, function: str, broken: Sequence[str], messages: Mapping[str, str]) -> str:
    """The issue: where the fault is, and how the first tests that notice it fail."""
    lines = [f"Since a recent change, `{function}` in `{path}` gives wrong results.", ""]
    lines += ["Seen in the project's tests (they are not part of this checkout):", ""]
    for test in broken[:3]:
        reason = messages.get(test, "")
        shown = "" if _ADDRESS.search(reason) or not reason else f": {reason[:140]}"
        lines.append(f"- `{test.partition('::')[2].replace('::', '.')}`{shown}")
    lines += ["", f"Find the mistake in `{path}` and correct it."]
    return "\n".join(lines) + "\n"
