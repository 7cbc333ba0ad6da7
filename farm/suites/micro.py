"""The micro suite: SWE-bench rows over generated mini repositories, in four splits.

``generate`` makes a split from its seed, byte for byte the same everywhere; ``load`` reads the copy that is shipped in
``datasets/micro``. The benchmark's repositories (names of modules and functions) and the shapes of its code occur in no
other split. Problems for pretraining are never stored: ``problems("pretrain")`` draws as many as are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from farm.durable import write_json
from farm.errors import UsageError
from farm.suites.micro_problem import SIZES, Problem, draw_problem
from farm.suites.operators import KINDS
from farm.suites.repo import make_repo
from farm.types import InlineFiles, Task, content_digest

SEED = 20261129
COUNTS = {"sft": 600, "rl": 1000, "benchmark": 100}
PRETRAIN = "pretrain"
SPLITS = (PRETRAIN, *COUNTS)
FOLDER = Path(__file__).parents[2] / "datasets" / "micro"

_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"


def problems(split: str, *, seed: int = SEED) -> Iterator[Problem]:
    """The problems of a split in order, for ever; bug kinds and sizes take turns, no problem comes twice."""
    if split not in SPLITS:
        raise UsageError(f"micro split {split!r} is unknown; there are {', '.join(SPLITS)}")
    held_out = split == "benchmark"
    strata = [(kind, size) for size in SIZES for kind in KINDS]
    seen: set[tuple[str, str]] = set()
    number = 0
    while True:
        kind, size = strata[number % len(strata)]
        problem = draw_problem(Random(f"{seed} {split} {number}"), held_out=held_out, kind=kind, size=size)
        number += 1
        key = (problem.broken, problem.issue)
        if key not in seen:
            seen.add(key)
            yield problem


def generate(split: str, *, count: int | None = None, seed: int = SEED) -> list[Task]:
    """The tasks of a split (its whole size by default), in order. Raises UsageError on an unknown split."""
    count = COUNTS.get(split) if count is None else count
    if count is None:
        raise UsageError(f"split {split!r} has no size of its own: give count")
    drawn = [to_task(problem, split, n) for n, problem in enumerate(islice(problems(split, seed=seed), count))]
    dataset = f"micro/{split}@{content_digest([task.digest for task in drawn])[:12]}"
    weights = _weights([task.strata["kind"] + task.strata["size"] for task in drawn])
    return [replace(task, dataset=dataset, weight=weight) for task, weight in zip(drawn, weights, strict=True)]


def load(split: str, *, folder: Path = FOLDER) -> list[Task]:
    """The shipped tasks of a split. Raises UsageError when the split is unknown or its file can't be read."""
    import pyarrow
    from pyarrow import parquet

    if split not in COUNTS:
        raise UsageError(f"micro split {split!r} is unknown; shipped are {', '.join(COUNTS)}")
    path = folder / f"{split}.parquet"
    try:
        return [from_row(row) for row in parquet.read_table(path).to_pylist()]
    except (OSError, pyarrow.ArrowException, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"micro split {split!r}: {path} can't be read ({reason}); make it with `make datasets`"
        ) from error


def ship(folder: Path = FOLDER) -> None:
    """Generate the shipped splits into ``folder``, with the manifest that describes them (``make datasets``)."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for split in COUNTS:
        tasks = generate(split)
        table = pyarrow.Table.from_pylist([to_row(task) for task in tasks])
        parquet.write_table(table, folder / f"{split}.parquet", compression="zstd", compression_level=19)
        entries[split] = {
            "count": len(tasks),
            "dataset": tasks[0].dataset,
            "digest": content_digest([task.digest for task in tasks]),
            "repositories": len({task.repo for task in tasks}),
            "weights": {f"{t.strata['kind']}/{t.strata['size']}": t.weight for t in tasks},
        }
    write_json(folder / "manifest.json", {"seed": SEED, "splits": entries})


def to_task(problem: Problem, split: str, number: int) -> Task:
    """The SWE-bench row of a problem. ``dataset`` is left empty: it names the digest of the whole split."""
    base_commit, _ = make_repo(problem.files)
    return Task(
        instance_id=f"{problem.repo.replace('/', '__')}-{split}-{number:04d}",
        dataset="",
        repo=problem.repo,
        base_commit=base_commit,
        problem_statement=problem.issue,
        patch=_line_patch(problem),
        test_patch=_new_file_patch(problem.test_path, problem.test_script),
        fail_to_pass=problem.fail_to_pass,
        pass_to_pass=problem.pass_to_pass,
        eval_script=(f"#!/bin/bash\ncd /testbed\necho '{_START}'\npython3 -IS {problem.test_path}\necho '{_END}'\n"),
        log_parser="micro",
        workspace=InlineFiles(files=problem.files),
        strata={"kind": problem.kind, "size": problem.size},
    )


def to_row(task: Task) -> dict[str, Any]:
    """The task as a SWE-bench row; what the schema lacks (files, strata, weight, dataset) has columns of its own."""
    if not isinstance(task.workspace, InlineFiles):
        raise TypeError(f"{task.instance_id} carries no files")
    return {
        "instance_id": task.instance_id,
        "repo": task.repo,
        "base_commit": task.base_commit,
        "problem_statement": task.problem_statement,
        "patch": task.patch,
        "test_patch": task.test_patch,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "eval_script": task.eval_script,
        "log_parser": task.log_parser,
        "image": task.image,
        "version": task.version,
        "dataset": task.dataset,
        "files": json.dumps(dict(task.workspace.files)),
        "strata": json.dumps(dict(task.strata)),
        "weight": task.weight,
    }


def from_row(row: dict[str, Any]) -> Task:
    """The inverse of :func:`to_row`."""
    return Task(
        instance_id=row["instance_id"],
        dataset=row["dataset"],
        repo=row["repo"],
        base_commit=row["base_commit"],
        problem_statement=row["problem_statement"],
        patch=row["patch"],
        test_patch=row["test_patch"],
        fail_to_pass=tuple(row["FAIL_TO_PASS"]),
        pass_to_pass=tuple(row["PASS_TO_PASS"]),
        eval_script=row["eval_script"],
        log_parser=row["log_parser"],
        image=row["image"],
        version=row["version"],
        workspace=InlineFiles(files=json.loads(row["files"])),
        strata=json.loads(row["strata"]),
        weight=row["weight"],
    )


def _weights(strata: list[str]) -> list[float]:
    """What each task counts so that every stratum counts the same, 1 on average."""
    kinds = sorted(set(strata))
    return [round(len(strata) / len(kinds) / strata.count(stratum), 6) for stratum in strata]


def _line_patch(problem: Problem) -> str:
    """The unified diff of the gold edit: one line, up to three lines around it."""
    before, after = problem.broken.splitlines(), problem.fixed.splitlines()
    at = next(n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    first, last = max(0, at - 3), min(len(before), at + 4)
    body = [f" {line}" for line in before[first:at]]
    body += [f"-{before[at]}", f"+{after[at]}"]
    body += [f" {line}" for line in before[at + 1 : last]]
    span = f"{first + 1},{last - first}"
    name = problem.module
    head = [f"diff --git a/{name} b/{name}", f"--- a/{name}", f"+++ b/{name}", f"@@ -{span} +{span} @@"]
    return "\n".join([*head, *body]) + "\n"


def _new_file_patch(path: str, text: str) -> str:
    lines = text.splitlines()
    head = [f"diff --git a/{path} b/{path}", "new file mode 100644", "--- /dev/null", f"+++ b/{path}"]
    return "\n".join([*head, f"@@ -0,0 +1,{len(lines)} @@", *(f"+{line}" for line in lines)]) + "\n"


if __name__ == "__main__":
    ship()
