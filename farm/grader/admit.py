"""What of an agent's diff may reach the grading sandbox.

The tests, and whatever decides how they are found, run and reported, stay as they are at the base commit. A path that
the gold patch touches is always let through, so a right solution is never lost to this filter.
"""

from __future__ import annotations

import re
import sys
from pathlib import PurePosixPath

from farm.grader.diffs import FileDiff, touched
from farm.types import Task

# Files that change how tests are found, run or reported, wherever they lie.
_TEST_SET_UP = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml",
        "sitecustomize.py", "usercustomize.py", ".gitattributes",
    }
)  # fmt: skip
_TEST_SET_UP_SUFFIXES = (".pth", ".egg-info", ".dist-info")  # of any part: entry points load pytest plugins

# A new file of such a name on an import root would be imported instead of the real module.
_TEST_TOOLS = frozenset(
    {
        "_pytest", "attr", "coverage", "exceptiongroup", "hypothesis", "iniconfig", "nose", "packaging",
        "pkg_resources", "pluggy", "py", "pygments", "pytest", "setuptools", "tomli", "xdist",
    }
)  # fmt: skip
_SHADOWED = sys.stdlib_module_names | _TEST_TOOLS
_SOURCE_ROOTS = ("", "src", "lib")


def admit(task: Task, parts: list[FileDiff]) -> tuple[list[FileDiff], tuple[str, ...]]:
    """The parts of an agent's diff that are graded, and the paths that were left at their base state.

    Left out: files of the test patch, files the eval script names, what sets up the test run, new modules that shadow
    the standard library or a test tool, links.
    """
    gold, tests = touched(task.patch), touched(task.test_patch)
    named = frozenset(re.findall(r"[\w./+-]+", task.eval_script.replace(f"{task.workdir}/", "")))
    named |= {name.removeprefix("./") for name in named}
    kept, left_out = [], []
    for part in parts:
        if part.link or (not part.paths <= gold and any(_guarded(p, part, tests, named) for p in part.paths)):
            left_out.extend(sorted(part.paths))
        else:
            kept.append(part)
    return kept, tuple(left_out)


def _guarded(path: str, part: FileDiff, tests: frozenset[str], named: frozenset[str]) -> bool:
    parts = PurePosixPath(path).parts
    return (
        path in tests
        or path in named
        or parts[-1] in _TEST_SET_UP
        or any(name.endswith(_TEST_SET_UP_SUFFIXES) for name in parts)
        or (part.old is None and _shadows(path, tests))
    )


def _shadows(path: str, tests: frozenset[str]) -> bool:
    """Whether an ``import`` could find the new file ``path`` in place of a known module."""
    roots = {*_SOURCE_ROOTS, *(str(folder) for test in tests for folder in PurePosixPath(test).parents)}
    for root in roots:
        prefix = "" if root in ("", ".") else f"{root}/"
        if path.startswith(prefix) and re.split(r"[./]", path[len(prefix) :])[0] in _SHADOWED:
            return True
    return False
