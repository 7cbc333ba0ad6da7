"""Harbor task folders as a task source: ``harbor:FOLDER``, where FOLDER is one task or holds tasks, at any depth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.harbor.folder import EXPECTED, ROW, TEST, TOML, Folder, read_folder, resolved
from farm.suites.repo import make_repo
from farm.suites.swebench_rows import row_task
from farm.types import FolderFiles, Machine, Task, content_digest

LOG_PARSER = "harbor"
_STRATA = ("difficulty", "category")


def harbor_tasks(source: str) -> list[Task]:
    """The tasks below the folder ``source``, by path. Raises UsageError on the first that can't be run as it asks."""
    root = Path(source)
    if not source or not root.is_dir():
        raise UsageError(f"--tasks harbor:{source}: no such folder; give a Harbor task, or a folder of them")
    found = [path.parent for path in sorted(root.rglob(TOML)) if not _inside_a_task(path.parent, root)]
    if not found:
        raise UsageError(f"--tasks harbor:{source}: no {TOML} in there; give a Harbor task, or a folder of them")
    tasks = [task_of(read_folder(path)) for path in found]
    _check_names(tasks, found)
    dataset = f"harbor/{root.resolve().name}@{content_digest([task.digest for task in tasks])[:12]}"
    return [replace(task, dataset=dataset) for task in tasks]


def task_of(folder: Folder) -> Task:
    """The task of one folder; ``dataset`` is left empty. Raises UsageError."""
    toml, own = folder.toml, folder.own
    where = str(folder.path / TOML)
    if "row" in own:
        return _of_row(folder)
    repository = str(own.get("repository", ""))
    base_commit = ""
    if repository:
        base_commit, _ = make_repo(folder.files(repository))
        if base_commit != own.get("base_commit"):
            raise UsageError(
                f"{where}: metadata.rollout_farm.base_commit is {own.get('base_commit')!r}, {repository} is "
                f"{base_commit}; write the task anew"
            )
    expected = _json(folder.path / EXPECTED) if repository else {}
    resolved(toml.verifier.env, where=f"{where}: verifier.env")  # now, not when the first episode is graded
    return Task(
        instance_id=str(own.get("instance_id") or folder.name.replace("/", "__")),
        dataset="",
        repo=str(own.get("repo") or folder.name),
        base_commit=base_commit,
        problem_statement=folder.instruction,
        patch=folder.text("solution/gold.patch") if repository else "",
        test_patch=folder.text("tests/test.patch") if repository else "",
        fail_to_pass=tuple(expected.get("fail_to_pass", ())),
        pass_to_pass=tuple(expected.get("pass_to_pass", ())),
        eval_script=folder.text("tests/eval.sh" if repository else TEST),
        log_parser=LOG_PARSER,
        workspace=FolderFiles(folder=str(folder.path), digest=folder.digest, repository=repository),
        image=folder.image,
        workdir=folder.workdir,
        strata=own.get("strata") or {name: str(toml.metadata[name]) for name in _STRATA if name in toml.metadata},
        weight=float(own.get("weight", 1.0)),
        own_limits=_limits(folder),
        machine=Machine(
            cpus=toml.environment.cpus,
            network=toml.environment.network_mode == "public",
            env=resolved(toml.environment.env, where=f"{where}: environment.env"),
        ),
    )


def _of_row(folder: Folder) -> Task:
    """The SWE-bench row that the farm wrote the folder from; it is graded as such."""
    file = folder.path / ROW
    task = row_task(_json(file), "", where=str(file))
    return replace(task, own_limits=_limits(folder), weight=float(folder.own.get("weight", 1.0)))


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: can't be read ({error}); write the task anew") from error
    return found


def _limits(folder: Folder) -> dict[str, float]:
    toml = folder.toml
    said: Mapping[str, float | None] = {
        "agent_s": toml.agent.timeout_sec,
        "grade_s": toml.verifier.timeout_sec,
        "memory_bytes": _bytes(toml.environment.memory_mb),
        "disk_bytes": _bytes(toml.environment.storage_mb),
    }
    return {name: value for name, value in said.items() if value is not None}


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes << 20


def _inside_a_task(path: Path, root: Path) -> bool:
    """Is it part of another task (a fixture of its tests, say)?"""
    above = [parent for parent in path.parents if parent == root or root in parent.parents]
    return any((parent / TOML).is_file() for parent in above)


def _check_names(tasks: Iterable[Task], folders: Iterable[Path]) -> None:
    seen: dict[str, Path] = {}
    for task, folder in zip(tasks, folders, strict=True):
        if task.instance_id in seen:
            raise UsageError(
                f"{folder / TOML}: the task's name {task.instance_id!r} is {seen[task.instance_id]}'s, too; rename one"
            )
        seen[task.instance_id] = folder
