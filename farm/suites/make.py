"""Training tasks from any Python code base: break it in one place, see which of its tests notice, qualify the result.

1. Survey: every test file runs ``runs`` times in a sandbox, once traced. A test that fails without a bug is left out,
   so is one that does not pass every time (flaky); what is left says which functions the tests reach.
2. Trial: bugs (``farm.suites.operators``) in functions that tests reach, in an order drawn by the seed, at most one per
   function, modules and kinds as evenly as they occur. A bug is a task when a few tests fail because of it, others
   still pass, and the run comes to its end. The time the tests take without it gives the task its CPU limit.
3. Qualification (``farm.suites.qualify``): graded ``runs`` times with and without the gold patch, in fresh sandboxes,
   by the grader that rollouts use. What does not qualify is quarantined.
"""

from __future__ import annotations

import ast
import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import FarmError, UsageError
from farm.protocols import SandboxProvider
from farm.suites import made, qualify
from farm.suites.code_source import Code, open_source
from farm.suites.operators import Mutation, mutations
from farm.suites.overlap import RepoRef
from farm.suites.overlap_refs import compare, load_refs
from farm.suites.package_index import PackageIndexes
from farm.suites.pypi import compact, spread
from farm.suites.pypi_make import Run, make_row
from farm.suites.trials import Trials, open_trials

_FILE_S = 90.0  # of one test file; a longer one is left out
_MOST_FILES = 80  # test files that are looked at
_TARGETS_S = 6.0  # of the tests of one task, without a bug
_WHOLE_FILE = 60  # tests; of a longer file only what reaches the function is run
_WHOLE_FILE_S = 1.5
_CALLERS, _OTHERS = 12, 4  # tests taken from a longer file
_MOST_FAILING = 10
_MOST_PASSING = 40  # kept as pass_to_pass
_TRIES = 8  # trials per task that is looked for
_LIMIT_FACTOR, _LEAST_LIMIT_S = 10, 10  # CPU limit: so many times what the tests take, but at least this

_Function = tuple[str, int]  # path, first line


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """``tasks`` in the folder, ``qualified`` of them."""

    tasks: int
    qualified: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """``stable``: test -> its CPU seconds, of tests that passed every time; ``calls``: what each of them calls.
    ``slow`` are test files that did not come to an end."""

    stable: Mapping[str, float]
    calls: Mapping[str, frozenset[_Function]]
    failing: tuple[str, ...]
    flaky: tuple[str, ...]
    slow: tuple[str, ...]


def make_from(
    specs: Sequence[str],
    *,
    out: Path,
    count: int,
    runs: int,
    seed: int,
    bench: str | None = None,
    provider: str = "bubblewrap",
    indexes: PackageIndexes | None = None,
    say: Callable[[str], None] = print,
) -> Made:
    """At most ``count`` tasks from each of ``specs`` (see ``code_source.open_source``) into the folder ``out``.

    A source that gives none is told and passed over; one whose tasks are all there already is left as it is. Raises
    UsageError before any work, also for a source whose repository is in ``bench``."""
    from farm.sandbox import make_provider

    codes = [open_source(spec, indexes) for spec in specs]
    _check_names(codes)
    if bench is not None:
        _check_bench(codes, bench)
    out.mkdir(parents=True, exist_ok=True)
    for code in codes:
        name = code.source.package
        try:
            if not _is_done(out, code, count):
                asyncio.run(_make_one(code, out, count, runs, seed, make_provider(provider), say))
            qualify.qualify_source(f"made:{out}:{name}", runs=runs, provider=provider, say=say)
        except FarmError as error:
            say(f"{name}: no tasks: {error}")
    rows = made.read_rows(out)
    results = qualify.read(out / "qualification.jsonl")
    good = sum(row["instance_id"] in results and results[row["instance_id"]].qualified for row in rows)
    return Made(tasks=len(rows), qualified=good)


def _check_names(codes: Sequence[Code]) -> None:
    names = Counter(code.source.package for code in codes)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise UsageError(f"SOURCE: {', '.join(twice)} is given twice; a folder holds one version of each")


def _check_bench(codes: Sequence[Code], bench: str) -> None:
    refs = [RepoRef(name=code.source.repo, paths=code.modules) for code in codes]
    found = compare(refs, load_refs(bench)).findings
    if found:
        told = "; ".join(f"{finding.train} is {finding.bench} ({finding.reason})" for finding in found)
        raise UsageError(f"--bench {bench}: {told}; leave these sources out")


def _is_done(out: Path, code: Code, count: int) -> bool:
    known = made.read_sources(out).get(code.source.package)
    same = known is not None and known.source.sha256 == code.source.sha256
    return same and sum(row["package"] == code.source.package for row in made.read_rows(out)) >= count


async def _make_one(
    code: Code,
    out: Path,
    count: int,
    runs: int,
    seed: int,
    provider: SandboxProvider,
    say: Callable[[str], None],
) -> None:
    name = code.source.package
    async with open_trials(code, provider, now_s=time.time()) as trials:
        survey = await survey_tests(code, trials, runs=runs, seed=seed)
        say(
            f"{name}: {len(survey.stable)} tests pass every time, {len(survey.failing)} fail, {len(survey.flaky)} are "
            f"flaky, {len(survey.slow)} files do not end"
        )
        rows = [row async for row in find_tasks(code, trials, survey, count=count, seed=seed)]
    if not rows:
        raise FarmError("no bug in it is noticed by its tests", kind="no_tasks")
    known = made.Known(source=code.source, origin=code.origin, failing=survey.failing, flaky=survey.flaky)
    made.write_sources(out, made.read_sources(out) | {name: known})
    made.write_rows(out, name, rows)
    say(f"{name}: {len(rows)} tasks, {dict(Counter(row['mutation']['kind'] for row in rows))}")


async def survey_tests(code: Code, trials: Trials, *, runs: int, seed: int) -> Survey:
    """Run every test file ``runs`` times, once traced."""
    files = sorted(code.tests)
    if len(files) > _MOST_FILES:
        files = sorted(random.Random(f"{seed} {code.source.package}").sample(files, _MOST_FILES))
    stable: dict[str, float] = {}
    calls: dict[str, frozenset[_Function]] = {}
    failing, flaky, slow = [], [], []
    for file in files:
        traced = await trials.trace([file], timeout_s=_FILE_S)
        if traced is None:
            slow.append(file)
            continue
        first, trace = traced
        seen: list[Run | None] = [first]
        while len(seen) < runs and "PASSED" in first.statuses.values() and seen[-1] is not None:
            seen.append(await trials.run([file], timeout_s=_FILE_S))
        if seen[-1] is None:
            slow.append(file)
            continue
        statuses = [run.statuses for run in seen if run is not None]
        for test in sorted({test for found in statuses for test in found}):
            passed = sum(found.get(test) == "PASSED" for found in statuses)
            if passed == len(statuses) and test in trace.calls:
                stable[test], calls[test] = trace.cpu_s[test], trace.calls[test]
            elif not passed:
                failing.append(test)
            else:
                flaky.append(test)
    return Survey(stable=stable, calls=calls, failing=tuple(failing), flaky=tuple(flaky), slow=tuple(slow))


async def find_tasks(
    code: Code, trials: Trials, survey: Survey, *, count: int, seed: int
) -> AsyncIterator[dict[str, Any]]:
    """Rows of tasks as they are found, at most ``count``: one per function, no module with much more than its share."""
    baselines: dict[tuple[str, ...], Run | None] = {}
    unstable = frozenset((*survey.failing, *survey.flaky))
    candidates = list(_candidates(code, survey, seed))
    share = math.ceil(2 * count / max(1, len({path for path, _, _ in candidates})))
    functions: set[_Function] = set()
    modules, kinds = Counter[str](), Counter[str]()
    tried = 0
    for path, mutation, function in candidates:
        if len(functions) == count or tried == _TRIES * count:
            return
        full = kinds[mutation.kind] > min(kinds.values(), default=0) + 1 + count // 10 or modules[path] >= share
        if full or function in functions:
            continue
        targets = choose_targets(survey, function)
        if targets not in baselines:
            baselines[targets] = await trials.run(targets, timeout_s=10 * _TARGETS_S)
        before = baselines[targets]
        if before is None or before.cpu_s > _TARGETS_S:
            continue
        tried += 1
        text = {path: mutation.apply(code.files[path].decode())}
        after = await trials.run(targets, timeout_s=max(10.0, 5 * before.cpu_s), broken=text)
        if after is None:  # an endless loop is no task
            continue
        row = make_row(
            code.source, path, mutation, targets, before, after,
            seed=seed, most_failing=_MOST_FAILING, unstable=unstable,
        )  # fmt: skip
        if row is not None:
            functions.add(function)
            modules[path] += 1
            kinds[mutation.kind] += 1
            row["pass_to_pass"] = compact(spread(row["pass_to_pass"])[:_MOST_PASSING])
            row["cpu_limit_s"] = max(_LEAST_LIMIT_S, math.ceil(_LIMIT_FACTOR * before.cpu_s))
            yield row


def choose_targets(survey: Survey, function: _Function) -> tuple[str, ...]:
    """What to run for a bug in ``function``: the two test files with the most tests that call it, whole where they are
    short, else the quickest of those tests and a few that don't call it."""
    callers = [test for test in survey.stable if function in survey.calls[test]]
    by_file = Counter(_file(test) for test in callers)
    targets: list[str] = []
    for file, _ in sorted(by_file.items(), key=lambda item: (-item[1], item[0]))[:2]:
        inside = sorted((test for test in survey.stable if _file(test) == file), key=lambda t: (survey.stable[t], t))
        if len(inside) <= _WHOLE_FILE and sum(survey.stable[test] for test in inside) <= _WHOLE_FILE_S:
            targets.append(file)
            continue
        told = [test for test in inside if function in survey.calls[test]][:_CALLERS]
        others = [test for test in inside if function not in survey.calls[test]][:_OTHERS]
        targets += dict.fromkeys(test.partition("[")[0] for test in (*told, *others))
    return tuple(targets)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _candidates(code: Code, survey: Survey, seed: int) -> Iterator[tuple[str, Mutation, _Function]]:
    """Every bug in a function that a stable test calls, drawn so that each module and kind has its turn early."""
    reached = frozenset[_Function]().union(*survey.calls.values())
    paths = {path for path, _ in reached}
    draw = random.Random(f"{seed} {code.source.package}")
    keyed = []
    for path in code.modules:
        if path not in paths:
            continue
        text = code.files[path].decode()
        lines = _first_lines(ast.parse(text))
        turns = Counter[str]()
        for mutation in sorted(mutations(text), key=lambda _: draw.random()):
            function = (path, lines.get(mutation.line, 0))
            if mutation.function and function in reached:
                turns[mutation.kind] += 1
                keyed.append((turns[mutation.kind], draw.random(), path, mutation, function))
    for _, _, path, mutation, function in sorted(keyed):
        yield path, mutation, function


def _first_lines(tree: ast.Module) -> dict[int, int]:
    """Line -> the first line, decorators included, of the innermost function it is in."""
    found: dict[int, int] = {}
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), first))
    return found
