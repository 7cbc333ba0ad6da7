"""What a worker's host must have, looked at on that host before it takes an attempt (Rule 11).

Each finding is one ``UsageError`` line that names the host. The storage is tried for what the trajectory log needs of
it: the same path, the same content, writable, hard links.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import socket
import time
import urllib.request
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from farm.cluster.ticket import Expected
from farm.errors import FarmError, UsageError
from farm.sandbox import make_provider

# What must be equal for Dask's messages, and for what is sent by pickle, to mean the same on both sides.
_PACKAGES = ("cloudpickle", "dask", "distributed", "msgpack", "pyarrow")
_SHARED_S = 15.0  # NFS may show a new file some seconds late
_LOOK_S = 0.5
_PROBE_S = 10.0


@cache
def software() -> dict[str, str]:
    """Name -> version of what the hosts of one farm must have in common; ``rollout-farm`` with a digest of its code,
    for two checkouts have the same version."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    try:
        release = version("rollout-farm")
    except PackageNotFoundError:  # run from a checkout
        release = "unreleased"
    found["rollout-farm"] = f"{release} (code {digest.hexdigest()[:12]})"
    return found


def check_software(farm: Mapping[str, str], here: Mapping[str, str], *, where: str) -> None:
    """Raises ``UsageError`` for the first name whose version differs. Of Python, major and minor version count."""
    for name, wanted in farm.items():
        found = here.get(name, "none")
        if name == "python":
            found = ".".join(found.split(".")[:2])
        if found != wanted:
            raise UsageError(
                f"{where}: has {name} {found}, the farm has {wanted}; install the same on both (cluster.python names "
                "the interpreter of a worker's host)"
            )


def examine(expected: Expected, *, patience_s: float = _SHARED_S) -> None:
    """Everything, on this host. Raises ``UsageError``. Blocks, at most about a minute; ``patience_s`` of it for a
    shared file to show."""
    where = socket.gethostname()
    check_software(expected.software, software(), where=where)
    _check_storage(expected, where, patience_s)
    _check_sandboxes(expected, where)
    check_engines(expected.engines)


def check_engines(urls: tuple[str, ...]) -> None:
    """From this host, something answers at each of ``urls`` as SGLang would."""
    for url in urls:
        try:
            with urllib.request.urlopen(url.rstrip("/") + "/model_info", timeout=_PROBE_S) as answer:
                json.loads(answer.read())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{socket.gethostname()}: reaches no engine at {url} ({error}); engines that the farm starts listen on "
                "engine.host, which must be an address of their machine that workers reach"
            ) from None


def _check_storage(expected: Expected, where: str, patience_s: float) -> None:
    probe = Path(expected.probe)
    give_up_at = time.monotonic() + patience_s
    while (text := _read(probe)) != expected.probe_text:
        if time.monotonic() > give_up_at:
            what = "does not see" if text is None else "sees another file at"
            raise UsageError(
                f"{where}: {what} {probe}, which the farm has just written; the run folder must be on storage that all "
                "hosts mount under the same path"
            )
        time.sleep(_LOOK_S)
    mine = probe.with_name(f"{probe.name}.{where}.{os.getpid()}")
    link = mine.with_name(mine.name + ".link")
    try:
        mine.write_text("")
        os.link(mine, link)
    except OSError as error:
        raise UsageError(
            f"{where}: can't write and hard-link in {probe.parent} as uid {os.getuid()} ({error.strerror}); workers "
            "need the run folder writable, on storage with hard links (a local file system, NFS, Lustre, CephFS)"
        ) from None
    finally:
        for path in (mine, link):
            with contextlib.suppress(OSError):
                path.unlink()


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        os.listdir(path.parent)  # noqa: PTH208 - makes NFS look again
        return path.read_text()
    return None


def _check_sandboxes(expected: Expected, where: str) -> None:
    """The back end can work here, and what earlier workers of this host left in it is swept (Rule 7)."""
    try:
        provider = make_provider(expected.provider, **expected.provider_options)
        asyncio.run(provider.sweep(now_s=time.time()))
    except FarmError as error:
        raise UsageError(f"{where}: {error}") from None
