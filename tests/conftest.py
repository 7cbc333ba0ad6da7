"""Nothing is left behind (Rule 7): a test that leaks a process, a socket, a pipe or a file of its folder fails."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Python's own helpers live as long as the interpreter.
_INTERPRETER_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_MARK = "ROLLOUT_FARM_TEST_SESSION"


def _children(pid: int) -> set[int]:
    """All living descendants of ``pid`` by /proc, without the interpreter's helpers and zombies."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(p) for p in task.read_text().split()]
        except OSError:
            continue
        for child in direct:
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if command and not any(helper in command for helper in _INTERPRETER_HELPERS):
                found |= {child} | _children(child)
    return found


def _open_files(folder: str) -> set[str]:
    """Sockets, and files below ``folder``, that this process holds open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(("socket:", folder)):
            found.add(target)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    processes, files = _children(os.getpid()), _open_files(str(tmp_path))
    yield
    gc.collect()
    give_up_at = time.monotonic() + 3.0
    while (leaked := _children(os.getpid()) - processes) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    for pid in leaked:
        os.kill(pid, signal.SIGKILL)
    assert not leaked, f"left processes running: {sorted(leaked)}"
    opened = _open_files(str(tmp_path)) - files
    assert not opened, f"left open: {sorted(opened)}"


def pytest_configure() -> None:
    os.environ.setdefault(_MARK, str(os.getpid()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:  # noqa: ARG001 - pytest passes both by name
    """Daemonised processes have another parent; their environment still tells whose they are."""
    if hasattr(session.config, "workerinput"):
        return
    mark = f"{_MARK}={os.environ.get(_MARK)}".encode()
    strays = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        expected = ("execnet", "xdist", *_INTERPRETER_HELPERS)
        if mark in environment and command and not any(word in command for word in expected):
            strays.append(f"{folder.name}: {command[:100]}")
    if strays:
        session.exitstatus = 1
        print("\nleft running after the tests:\n  " + "\n  ".join(strays))


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, tuple[str, str]]]:
    """A real SGLang server, one for the session: its URL, and two policies' folders. Only where ci/sglang.sh has
    installed it."""
    import real_sglang

    folder = tmp_path_factory.mktemp("sglang")
    policies = tuple(real_sglang.write_model(folder / name, seed=seed) for seed, name in enumerate(("one", "two")))
    with real_sglang.real_server(policies[0], folder) as process:
        yield process.url, (policies[0], policies[1])
