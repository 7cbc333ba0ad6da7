"""One Harbor task folder, read and checked: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/`` and
``solution/``.

A folder that the farm wrote itself (``farm.harbor.write``) says more in ``metadata.rollout_farm``: the repository's
base commit and where its files are, so that the agent's change is graded in a fresh sandbox, and an image of the farm's
own that does in place of the Dockerfile.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from farm.errors import FarmError, UsageError
from farm.harbor.task_toml import TaskToml, parse
from farm.sandbox.build_context import BuildContext, digest_of

TOML, INSTRUCTION = "task.toml", "instruction.md"
TEST, SOLVE = "tests/test.sh", "solution/solve.sh"
REPOSITORY = "environment/repo"  # where the farm writes a repository's files
OWN = "rollout_farm"  # the farm's table in [metadata]
EXPECTED = "tests/expected.json"  # which tests must pass, in a folder that the farm wrote
ROW = "tests/config.json"  # the row of SWE-bench that the farm wrote the folder from

_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)\s*$", re.IGNORECASE)
_FROM = re.compile(r"^\s*FROM\s", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """``path`` is absolute; ``digest`` is of everything in it."""

    path: Path
    digest: str
    toml: TaskToml
    instruction: str

    @property
    def name(self) -> str:
        """``ORG/NAME`` of the task, or the folder's name."""
        return self.toml.task.name if self.toml.task is not None else self.path.name

    @property
    def own(self) -> Mapping[str, Any]:
        """What the farm wrote about it; empty in a folder of others."""
        found = self.toml.metadata.get(OWN)
        return found if isinstance(found, Mapping) else {}

    @property
    def image(self) -> str:
        """As a task says it. An image of the farm's own wins over one to pull, and that over the Dockerfile."""
        named = self.own.get("image") or self.toml.environment.docker_image
        if named:
            return str(named)
        context = self.path / "environment"
        return BuildContext(folder=context, digest=digest_of(context)).reference

    @property
    def workdir(self) -> str:
        """Where commands run; "" when only the image knows."""
        return self.toml.environment.workdir or dockerfile_workdir(self.text("environment/Dockerfile"))

    def text(self, name: str) -> str:
        """The content of a file of it; "" when there is none."""
        path = self.path / name
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def files(self, name: str) -> dict[str, bytes]:
        """All files below the folder ``name``: relative path -> content."""
        return files_below(self.path / name)

    def programs(self, name: str) -> list[str]:
        """Those of :meth:`files` that may be executed."""
        root = self.path / name
        return [path.relative_to(root).as_posix() for path in _regular(root) if path.stat().st_mode & 0o111]


def read_folder(path: Path) -> Folder:
    """Raises UsageError with the file or key that is missing, wrong, or can't be honoured."""
    where = path / TOML
    try:
        toml = parse(where.read_text(encoding="utf-8"), where=str(where))
        instruction = (path / INSTRUCTION).read_text(encoding="utf-8")
        for name in ("tests", "solution"):
            _check_links(path / name)
        found = Folder(path=path.resolve(), digest=digest_of(path), toml=toml, instruction=instruction)
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename}: no such file; a Harbor task has task.toml and instruction.md") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read ({error})") from None
    if not (path / TEST).is_file():
        raise UsageError(f"{path / TEST}: no such file; it is what writes the reward of a Harbor task")
    compose = [name for name in _COMPOSE if (path / "environment" / name).exists()]
    if compose:
        raise UsageError(f"{path / 'environment' / compose[0]}: a task of several containers can't be honoured")
    if (path / "trajectory.json").exists():
        raise UsageError(f"{path / 'trajectory.json'}: agents here start without a history; leave the task out")
    if not found.own.get("image") and not (path / "environment" / "Dockerfile").is_file():
        if not toml.environment.docker_image:
            raise UsageError(f"{where}: environment.docker_image is not said, and there is no environment/Dockerfile")
        if found.files("environment"):
            raise UsageError(
                f"{path / 'environment'}: files beside environment.docker_image are not taken into the sandbox; build "
                "them into the image"
            )
    return found


@lru_cache(maxsize=256)
def unchanged(path: str, digest: str) -> Folder:
    """The folder that a task was read from, on whatever host this runs. Raises FarmError when it is not there, or holds
    something else by now."""
    try:
        found = read_folder(Path(path))
    except UsageError as error:
        raise FarmError(f"the task's folder can't be read here: {error}", kind="task", retryable=False) from error
    if found.digest != digest:
        raise FarmError(f"{path}: changed since its tasks were read", kind="task", retryable=False)
    return found


def files_below(root: Path) -> dict[str, bytes]:
    """Relative path -> content, of all regular files; none where there is no such folder."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in _regular(root)}


def own_facts(path: Path) -> Mapping[str, Any]:
    """What the farm wrote about the task in ``path``, whatever else its ``task.toml`` says; empty where it wrote
    nothing."""
    try:
        found = tomllib.loads((path / TOML).read_text(encoding="utf-8")).get("metadata", {}).get(OWN, {})
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, Mapping) else {}


def resolved(env: Mapping[str, str], *, where: str) -> dict[str, str]:
    """``${NAME}`` and ``${NAME:-DEFAULT}`` replaced by this process's environment. Raises UsageError."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in os.environ:
            return os.environ[name]
        if default is None:
            raise UsageError(f"{where}: ${{{name}}} is not set; export {name}, or give it a default: ${{{name}:-...}}")
        return str(default)

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}


def dockerfile_workdir(text: str) -> str:
    """The working directory that a Dockerfile's last stage says; "" when it is left to the image it builds on."""
    workdir = ""
    for line in text.splitlines():
        match = _WORKDIR.match(line)
        if _FROM.match(line):
            workdir = ""
        elif match and "$" not in match[1]:
            said = match[1].strip("\"'")
            workdir = said if said.startswith("/") else f"{workdir.rstrip('/')}/{said}" if workdir else ""
        elif match:
            workdir = ""
    return workdir


def _regular(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (path for path in sorted(root.rglob("*")) if path.is_file())


def _check_links(root: Path) -> None:
    links = [path for path in root.rglob("*") if path.is_symlink()] if root.is_dir() else []
    if links:
        raise UsageError(f"{links[0]}: a link can't be taken into a sandbox; put the file in its place")
