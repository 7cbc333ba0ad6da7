"""Any task of the farm as a Harbor task folder (schema 1.4) that Harbor runs, and that ``harbor:FOLDER`` reads back.

The repository's files are the build context of a Dockerfile; the gold patch is the solution; the tests and what judges
them are hidden in ``tests/``, with the farm's own parsers, so that a reward in Harbor is what the farm's grader says.
What the farm's grader keeps out of an agent's diff, Harbor lets stand: there the agent's whole machine is judged, and
only the files of the tests are put back.

A row of SWE-bench builds on its own image, from which the history that shows the future is removed; Harbor judges it
with the package ``swebench``, which needs a network. Reading it back gives the row.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.grader import parsers, verdict
from farm.grader.diffs import apply_plain, read
from farm.harbor import templates
from farm.harbor.folder import EXPECTED, INSTRUCTION, OWN, REPOSITORY, ROW, SOLVE, TEST, TOML
from farm.harbor.task_toml import SCHEMA_VERSION, dump
from farm.history import strip_script
from farm.suites.swebench_rows import official_row
from farm.types import FolderFiles, ImageFiles, Limits, Task
from farm.workspace import base_tree

SWEBENCH_VERSION = "5.0.2"  # the release whose grading the farm was tested with
_LEAST_STORAGE_MB = 2_048  # of a machine that holds Python and git besides
_WORD_VARIABLE = "FARM_TEST_WORD"


def write_tasks(tasks: Iterable[Task], out: Path, *, limits: Limits) -> int:
    """A folder below ``out`` for each task; how many. ``limits``: what the tasks get in Harbor, where they don't say it
    themselves. Raises UsageError for a task that can't be written, and for a folder that is there already."""
    count = 0
    for task in tasks:
        folder = out / _slug(task.instance_id)
        if folder.exists():
            raise UsageError(f"{folder}: exists already; give another --out, or remove it")
        files = asyncio.run(_files(task, limits))
        try:
            for name, content in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                path.chmod(0o755 if name in (TEST, SOLVE) else 0o644)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise UsageError(f"{folder}: can't be written ({error})") from error
        count += 1
    return count


async def _files(task: Task, limits: Limits) -> dict[str, str | bytes]:
    """Relative path -> content. Raises UsageError."""
    if isinstance(task.workspace, FolderFiles):
        raise UsageError(f"{task.instance_id}: is a Harbor task already, in {task.workspace.folder}; copy that folder")
    files = await (_row_files(task) if isinstance(task.workspace, ImageFiles) else _repository_files(task))
    return {
        TOML: dump(_toml(task, limits)),
        INSTRUCTION: task.problem_statement,
        "solution/gold.patch": task.patch,
        SOLVE: templates.SOLVE_SH.format(workdir=shlex.quote(task.workdir)),
        **files,
    }


async def _repository_files(task: Task) -> dict[str, str | bytes]:
    if task.log_parser not in parsers.PARSERS or verdict.marked(task.eval_script, "x") is None:
        raise UsageError(f"{task.instance_id}: its log parser or eval script is not one that the grader 'tests' knows")
    tree = await base_tree(task)
    assert tree is not None
    try:
        tests = apply_plain(read(task.test_patch), tree)
    except ValueError as error:
        raise UsageError(f"{task.instance_id}: its test patch: {error}") from error
    if tests is None:
        raise UsageError(f"{task.instance_id}: its test patch does more than change text files, which can't be written")
    workdir = shlex.quote(task.workdir)
    gone = [name for name, content in tests.items() if content is None]
    expected = {
        "fail_to_pass": task.fail_to_pass,
        "pass_to_pass": task.pass_to_pass,
        "log_parser": task.log_parser,
        "checked": _WORD_VARIABLE in task.test_patch or _WORD_VARIABLE in task.eval_script,
    }
    pytest = templates.PYTEST.format(version=importlib.metadata.version("pytest"))
    dockerfile = templates.DOCKERFILE.format(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        tools=pytest if task.image == "host-pytest" else "",
        workdir=task.workdir,
        commit=templates.COMMIT,
    )
    return {
        "environment/Dockerfile": dockerfile,
        **{f"{REPOSITORY}/{name}": content for name, content in tree.items()},
        TEST: templates.TEST_SH.format(
            workdir=workdir, remove=f"rm -f {' '.join(map(shlex.quote, gone))}\n" if gone else ""
        ),
        "tests/grade.py": templates.GRADE_PY,
        "tests/parsers.py": _source(parsers.__file__),
        "tests/verdict.py": _source(verdict.__file__).replace("from farm.grader.parsers import", "from parsers import"),
        "tests/eval.sh": task.eval_script,
        "tests/test.patch": task.test_patch,
        EXPECTED: json.dumps(expected, indent=1),
        "tests/files/.keep": "",
        **{f"tests/files/{name}": content for name, content in tests.items() if content is not None},
    }


async def _row_files(task: Task) -> dict[str, str | bytes]:
    row = official_row(task) | {
        name: getattr(task, name) for name in ("base_commit", "patch", "test_patch", "problem_statement")
    }
    return {
        "environment/Dockerfile": templates.ROW_DOCKERFILE.format(image=task.image, workdir=task.workdir),
        "environment/strip.sh": strip_script(task),
        TEST: templates.ROW_TEST_SH.format(version=SWEBENCH_VERSION),
        "tests/grade.py": templates.ROW_GRADE_PY,
        ROW: json.dumps(row | dict(task.strata), indent=1),
    }


def _toml(task: Task, limits: Limits) -> Mapping[str, Any]:
    has_repository = not isinstance(task.workspace, ImageFiles)
    limits = task.limits(limits)
    own: dict[str, Any] = {"instance_id": task.instance_id, "dataset": task.dataset, "weight": task.weight}
    if has_repository:
        own |= {
            "repo": task.repo,
            "base_commit": task.base_commit,
            "image": task.image,
            "repository": REPOSITORY,
            "strata": dict(task.strata),
        }
    else:
        own["row"] = ROW
    return {
        "schema_version": SCHEMA_VERSION,
        "task": {
            "name": f"{_slug(task.dataset.partition('/')[0].partition('@')[0]) or 'farm'}/{_slug(task.instance_id)}",
            "description": next(iter(task.problem_statement.strip().splitlines()), "")[:200],
            "keywords": [task.repo],
        },
        "metadata": {name: task.strata[name] for name in ("difficulty",) if name in task.strata} | {OWN: own},
        "agent": {"timeout_sec": float(limits.agent_s)},
        "verifier": {"timeout_sec": float(limits.grade_s)},
        "environment": {
            "workdir": task.workdir,
            "cpus": max(1, round(task.machine.cpus or 1)),
            "memory_mb": max(1, int(limits.memory_bytes) >> 20),
            "storage_mb": max(_LEAST_STORAGE_MB, int(limits.disk_bytes) >> 20),
            "network_mode": "no-network" if has_repository else "public",
        },
    }


def _source(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "task"
