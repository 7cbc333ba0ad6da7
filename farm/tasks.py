"""Task sources: from the name a person types to a list of tasks.

``micro:<split>`` and ``pypi[:<package>]`` are the project's own suites, ``made:FOLDER[:<package>]`` is what ``farm
make-tasks`` wrote. ``swebench:ROWS`` reads rows of the SWE-bench schema, whose repositories are in their images, from a
file or the Hugging Face Hub; ``subset:FILE`` is a sample of such rows that ``farm subset`` drew. ``harbor:FOLDER``
reads Harbor task folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from farm.errors import UsageError
from farm.suites import qualify
from farm.suites.swebench_rows import swebench_tasks
from farm.types import Task

KINDS_OF_SPEC = "micro:SPLIT, pypi[:PACKAGE], made:FOLDER[:PACKAGE], swebench:ROWS, subset:FILE, harbor:FOLDER"


def load_tasks(spec: str, *, limit: int | None = None, quarantined: bool = False) -> list[Task]:
    """The tasks that ``spec`` names, in their fixed order, at most ``limit`` of them.

    Tasks that failed their qualification are left out, unless ``quarantined`` asks for them too.

    Raises UsageError when the suite, split, package or file is unknown or unreadable.
    """
    suite, _, rest = spec.partition(":")
    if suite not in SUITES:
        raise UsageError(f"--tasks {spec!r}: unknown suite {suite!r}; allowed are {KINDS_OF_SPEC}")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: at least one task is needed; give 1 or more, or leave it out for all")
    tasks = SUITES[suite](rest)
    if not quarantined:
        results = qualify.read(qualify.results_path(spec))
        tasks = [task for task in tasks if task.instance_id not in results or results[task.instance_id].qualified]
    return tasks[:limit]


def _micro(split: str) -> list[Task]:
    from farm.suites import micro

    return list(micro.load(split))


def _pypi(package: str) -> list[Task]:
    from farm.suites import pypi

    return pypi.load(package or None)


def _made(rest: str) -> list[Task]:
    from farm.suites import made

    return made.load(rest)


def _subset(file: str) -> list[Task]:
    from farm.suites import subset

    return subset.load(file)


def _harbor(folder: str) -> list[Task]:
    from farm.harbor.tasks import harbor_tasks

    return harbor_tasks(folder)


SUITES: Mapping[str, Callable[[str], list[Task]]] = {
    "micro": _micro,
    "pypi": _pypi,
    "made": _made,
    "swebench": swebench_tasks,
    "subset": _subset,
    "harbor": _harbor,
}
