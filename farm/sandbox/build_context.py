"""Images that are built from a folder with a Dockerfile, and the names that such images go by.

A task names one ``dockerfile:DIGEST:FOLDER``. The digest is of the folder's files, so the image that was built from
them is known by it wherever the folder lies; a folder that has changed since is not built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCHEME = "dockerfile:"
_REPOSITORY = "rollout-farm/built"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """``image``: the name that the built image has at the daemon."""

    folder: Path
    digest: str

    @property
    def image(self) -> str:
        return f"{_REPOSITORY}:{self.digest}"

    @property
    def reference(self) -> str:
        """What a task's ``image`` says."""
        return f"{SCHEME}{self.digest}:{self.folder}"


def build_context(image: str) -> BuildContext | None:
    """The folder that ``image`` is built from; None when it is the name of a ready image."""
    if not image.startswith(SCHEME):
        return None
    digest, _, folder = image.removeprefix(SCHEME).partition(":")
    return BuildContext(folder=Path(folder), digest=digest)


def digest_of(folder: Path) -> str:
    """SHA-256 (first 32 hex digits) over the names, contents and execute permissions of all files below ``folder``, and
    the targets of its links. Raises ``OSError``."""
    digest = hashlib.sha256()
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix().encode()
        if path.is_symlink():
            kind, data = b"link", str(path.readlink()).encode()
        else:
            kind, data = b"program" if path.stat().st_mode & 0o100 else b"file", path.read_bytes()
        digest.update(b"%b %d %b %d\0" % (kind, len(name), name, len(data)))
        digest.update(data)
    return digest.hexdigest()[:32]


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path
