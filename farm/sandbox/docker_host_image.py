"""The images ``host`` and ``host-pytest`` on Docker: the root that bubblewrap sandboxes have, from this host's files.

A container gets the host's ``/usr`` and Python as read-only binds; the image itself holds only what has to lie around
them (links, ``/etc``, a few directories) and is made in a tenth of a second, without a registry. So these images need a
daemon on this very machine. The root is read-only; what commands write goes to tmpfs of limited size.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.sandbox.rootfs import ENVIRONMENT, HOME, IMAGES, PYTEST, SYSTEM, UID, Bind, etc_files, hidden_packages

REPOSITORY = "rollout-farm/host"
NAMES = IMAGES
USER = f"{UID}:{UID}"
_HARBOR = ("/logs", "/tests", "/solution")  # where tasks of Harbor put their own (farm.harbor.machine)
_SCRATCH = ("/tmp", "/var/tmp", HOME, *_HARBOR)
_EMPTY = (
    "dev", "proc", "sys", "run", "usr", "opt", "testbed", "home", HOME.strip("/"), "var",
    *(path.strip("/") for path in _HARBOR),
)  # fmt: skip


def image_tar() -> bytes:
    """The image as a tar archive, the same bytes for the same host."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in _EMPTY:
            _add(archive, name, kind=tarfile.DIRTYPE, mode=0o755)
        for name in ("tmp", "var/tmp"):
            _add(archive, name, kind=tarfile.DIRTYPE, mode=0o1777)
        for name in SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                _add(archive, name, kind=tarfile.SYMTYPE, target=str(path.readlink()))
            elif path.is_dir():
                _add(archive, name, kind=tarfile.DIRTYPE, mode=0o755)
        for name, content in sorted(etc_files().items()):
            if isinstance(content, str):
                _add(archive, f"etc/{name}", kind=tarfile.SYMTYPE, target=content)
            else:
                _add(archive, f"etc/{name}", content=content)
        interpreter = str(Path(sys.executable).resolve())
        for name, target in (("python3", interpreter), ("python", "python3")):
            _add(archive, f"opt/bin/{name}", kind=tarfile.SYMTYPE, target=target)
    return data.getvalue()


def image_name(tar: bytes) -> str:
    return f"{REPOSITORY}:{hashlib.sha256(tar).hexdigest()[:16]}"


def image_changes() -> list[str]:
    """What an import adds to the files: environment and user."""
    return [*(f"ENV {name}={value}" for name, value in ENVIRONMENT.items()), f"USER {USER}"]


def binds(state: Path, pytest: Bind | None) -> list[str]:
    """What a container of the image has of the host, as Docker writes it."""
    python = Path(sys.base_prefix)
    shown = [Bind(source="/usr", target="/usr")]
    shown += [Bind(source=f"/{n}", target=f"/{n}") for n in SYSTEM if Path("/", n).is_dir() and not _is_link(n)]
    if not python.is_relative_to("/usr"):
        shown.append(Bind(source=str(python), target=str(python)))
    shown += hidden_packages(state)
    shown += [pytest] if pytest is not None else []
    return [f"{bind.source}:{bind.target}:ro" for bind in shown]


def environment(pytest: Bind | None) -> dict[str, str]:
    return {"PYTHONPATH": PYTEST} if pytest is not None else {}


def scratch(workdir: str, *, disk_bytes: int) -> Mapping[str, str]:
    """Where commands may write: mount point -> options."""
    own = f"exec,nosuid,nodev,size={disk_bytes}"
    found = dict.fromkeys(_SCRATCH, f"{own},mode=1777")
    return {**found, workdir: f"{own},mode=755,uid={UID},gid={UID}"}


def _is_link(name: str) -> bool:
    return Path("/", name).is_symlink()


def _add(
    archive: tarfile.TarFile, name: str, *, kind: Any = tarfile.REGTYPE, mode: int = 0o644, target: str = "",
    content: bytes = b"",
) -> None:  # fmt: skip
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, len(content)
    archive.addfile(entry, io.BytesIO(content) if content else None)
