"""The two trees of code that are compared, each run with the same interpreter and its own PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from farm.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A checkout. ``name`` is for people."""

    name: str
    path: Path

    @property
    def policy(self) -> Path:
        """The policy that this tree ships."""
        return self.path / "datasets" / "micro" / "base-policy"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.path)}

    def command(self, program: str, *arguments: str) -> list[str]:
        """``farm``, ``trainer`` or ``harness`` of this tree."""
        return [sys.executable, "-m", f"{program}.cli", *arguments]

    def check(self) -> None:
        """Raises UsageError when Python would import another tree's code."""
        code = "import farm, trainer; print(farm.__file__); print(trainer.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd="/", env=self.environment, capture_output=True, text=True, check=False
        )
        found = [Path(line).resolve() for line in done.stdout.splitlines()]
        if done.returncode != 0 or not found or not all(p.is_relative_to(self.path.resolve()) for p in found):
            told = done.stderr.strip().splitlines()[-1:] or [str(found)]
            raise UsageError(
                f"{self.path}: its own code can't be imported from there ({told[0]}); choose another --base"
            )


def resolve(root: Path, revision: str) -> str:
    """The commit that ``revision`` names in the repository at ``root``. Raises UsageError when there is none."""
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if done.returncode != 0:
        raise UsageError(
            f"base commit {revision!r} is not in this repository; give --base COMMIT, or fetch it (a shallow clone has "
            "no history: git fetch --unshallow)"
        )
    return done.stdout.strip()


def head(root: Path) -> str:
    return resolve(root, "HEAD")


def is_clean(root: Path) -> bool:
    """Whether no tracked file differs from the commit."""
    done = _git(root, "status", "--porcelain", "--untracked-files=no")
    return done.returncode == 0 and not done.stdout.strip()


@contextmanager
def worktree(root: Path, commit: str, folder: Path) -> Iterator[Tree]:
    """A checkout of ``commit`` at ``folder``, removed in the end. Raises UsageError when git can't make it."""
    _remove(root, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = _git(root, "worktree", "add", "--quiet", "--detach", str(folder), commit)
    if done.returncode != 0:
        raise UsageError(f"{folder}: git can't check {commit[:12]} out there ({done.stderr.strip().splitlines()[-1]})")
    try:
        yield Tree(name=commit[:12], path=folder)
    finally:
        _remove(root, folder)


def _remove(root: Path, folder: Path) -> None:
    """Also what a killed run left behind."""
    _git(root, "worktree", "remove", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    _git(root, "worktree", "prune")


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=120, check=False)
