"""Nothing is left behind (Rule 7), whatever is killed or cancelled, and whenever."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farm.errors import SandboxLostError, SandboxStartError
from farm.protocols import SandboxSpec
from farm.sandbox import rootfs
from farm.sandbox.bubblewrap import BubblewrapProvider
from farm.sandbox.cgroup import find_cgroups
from farm.sandbox.state import Record, alive, read_record, read_records, record_path, start_time

_OWNER = """
import asyncio, contextlib, sys, time
from farm.protocols import SandboxSpec
from farm.sandbox.bubblewrap import BubblewrapProvider
async def main():
    provider = BubblewrapProvider()
    async with contextlib.AsyncExitStack() as stack:
        for n in range(3):
            spec = SandboxSpec(owner=f"owner-{n}", deadline_at_s=time.time() + 60)
            sandbox = await stack.enter_async_context(provider.open(spec))
            await sandbox.exec("setsid sleep 300 > /dev/null 2>&1 &", timeout_s=10)
        print(provider.launcher_pid, flush=True)
        await sandbox.exec("sleep 300", timeout_s=300)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory of our own, reachable by other users."""
    tmp_path_factory.getbasetemp()  # pytest's own folder must not come to lie in ours
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        Path(folder).chmod(0o755)
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder, f"rollout-farm-{os.getuid()}")


@pytest.fixture
def provider(directory: Path) -> Iterator[BubblewrapProvider]:
    made = BubblewrapProvider()
    assert directory.exists()
    yield made
    made.close()


def spec(**changes: object) -> SandboxSpec:
    return SandboxSpec(**{"owner": "faults", "deadline_at_s": time.time() + 60, **changes})  # type: ignore[arg-type]


def eventually(holds: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def groups(record_id: str) -> list[Path]:
    return [path for parent in find_cgroups().places.values() for path in Path(parent).glob(f"*-{record_id}")]


def gone(records: list[Record]) -> bool:
    return not any(alive(record.process) or groups(record.id) for record in records)


def clean(directory: Path) -> bool:
    return not list((directory / "sandboxes").iterdir())


@pytest.fixture
def owner(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int, list[Record]]]:
    """Another process with three sandboxes: it, its launcher's pid, their records."""
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        launcher = int(process.stdout.readline())
        records = [record for _, record in read_records(directory)]
        assert [record.owner for record in sorted(records, key=lambda r: r.owner)] == ["owner-0", "owner-1", "owner-2"]
        assert all(alive(record.process) for record in records)
        yield process, launcher, records
        process.kill()


def test_a_killed_owner_leaves_nothing(directory: Path, owner: tuple[subprocess.Popen[str], int, list[Record]]) -> None:
    process, launcher, records = owner
    process.kill()
    process.wait(timeout=10)
    assert eventually(lambda: gone(records) and clean(directory) and start_time(launcher) is None)


def test_owner_and_launcher_killed_at_once(
    provider: BubblewrapProvider, directory: Path, owner: tuple[subprocess.Popen[str], int, list[Record]]
) -> None:
    process, launcher, records = owner
    process.send_signal(signal.SIGSTOP)
    os.kill(launcher, signal.SIGKILL)
    process.kill()
    process.wait(timeout=10)
    assert eventually(lambda: not any(alive(record.process) for record in records))  # they die with the launcher
    assert asyncio.run(provider.sweep(now_s=time.time())) == 3
    assert gone(records)
    assert clean(directory)


def test_sweep_ends_overdue_sandboxes_of_a_living_owner(
    provider: BubblewrapProvider, directory: Path, owner: tuple[subprocess.Popen[str], int, list[Record]]
) -> None:
    process, _, records = owner
    assert asyncio.run(provider.sweep(now_s=time.time())) == 0
    assert asyncio.run(provider.sweep(now_s=time.time() + 100)) == 3
    assert gone(records)
    assert clean(directory)
    assert process.wait(timeout=20) == 1  # its exec raised SandboxLostError


def test_a_killed_sandbox_is_lost_and_the_next_one_works(provider: BubblewrapProvider, directory: Path) -> None:
    async def run() -> None:
        async with provider.open(spec()) as sandbox, provider.open(spec()) as other:
            record = read_record(record_path(directory, sandbox.id))
            assert record is not None
            task = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
            await asyncio.sleep(0.05)
            os.kill(record.process.pid, signal.SIGKILL)
            with pytest.raises(SandboxLostError):
                await task
            with pytest.raises(SandboxLostError):
                await sandbox.read_file("/x")
            assert (await other.exec("echo on", timeout_s=10)).output == "on\n"
            assert gone([record])

    asyncio.run(run())
    assert clean(directory)


def test_a_job_that_is_told_to_end_leaves_its_sandboxes_to_their_owner(
    provider: BubblewrapProvider, directory: Path
) -> None:
    """Slurm and systemd tell every process of a job, the launcher too, and the owner may go on for a while."""

    async def run() -> None:
        async with provider.open(spec()) as sandbox:
            assert provider.launcher_pid is not None
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                os.kill(provider.launcher_pid, number)
            assert (await sandbox.exec("echo on", timeout_s=10)).output == "on\n"
            told = await sandbox.exec("sh -c 'kill -TERM $$; echo ignored'", timeout_s=10)
            assert (told.exit_code, told.output) == (128 + signal.SIGTERM, ""), "commands hear signals as always"

    asyncio.run(run())
    assert clean(directory)


def test_a_killed_launcher_takes_all_along_and_is_replaced(provider: BubblewrapProvider, directory: Path) -> None:
    async def run() -> None:
        async with provider.open(spec()) as sandbox:
            assert provider.launcher_pid is not None
            os.kill(provider.launcher_pid, signal.SIGKILL)
            with pytest.raises(SandboxLostError):
                await sandbox.exec("sleep 60", timeout_s=60)
        async with provider.open(spec()) as sandbox:
            assert (await sandbox.exec("echo on", timeout_s=10)).output == "on\n"
        assert await provider.sweep(now_s=time.time()) == 1

    asyncio.run(run())
    assert clean(directory)


def test_a_launcher_without_work_ends_and_is_started_again(provider: BubblewrapProvider) -> None:
    async def run() -> int:
        async with provider.open(spec()) as sandbox:
            assert (await sandbox.exec("echo on", timeout_s=10)).output == "on\n"
        assert provider.launcher_pid is not None
        return provider.launcher_pid

    first = asyncio.run(run())
    assert eventually(lambda: start_time(first) is None)
    assert asyncio.run(run()) != first


@pytest.mark.parametrize("grouped", [False, True])
def test_a_first_process_that_is_killed_while_it_makes_the_second(tmp_path: Path, grouped: bool) -> None:
    """As bwrap may be: its child does not yet die with it, and waits for it for ever."""
    (tmp_path / "sandboxes").mkdir()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end, sandbox_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "from farm.sandbox.launcher import main; main()"
    session = "setsid" if grouped else ""  # then only the cgroup knows it
    parent = find_cgroups().places.get("pids") if grouped else None
    if grouped and parent is None:
        pytest.skip("no cgroup may be made here")
    request = {
        "id": "x",
        "owner": "faults",
        "deadline_at_s": time.time() + 60,
        "argv": ["/bin/sh", "-c", f"sleep 1; {session} sleep 300 & echo $! > {tmp_path}/pid; sleep 1; kill -9 $$"],
        "uid": None,
        "seccomp": "/dev/null",
        "groups": [{"parent": parent, "settings": {}}] if parent else [],
    }
    with (
        ours,
        end,
        subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid()), str(tmp_path)],
            pass_fds=[theirs.fileno()],
        ) as launcher,
    ):
        theirs.close()
        socket.send_fds(ours, [json.dumps(request).encode()], [sandbox_end.fileno()])
        sandbox_end.close()
        end.settimeout(20)
        while end.recv(4096):  # until nothing of it is left
            pass
        left = int((tmp_path / "pid").read_text())
        assert eventually(lambda: start_time(left) is None)
        ours.close()
        assert launcher.wait(timeout=20) == 0


@pytest.mark.parametrize("lifetime_s", [0.0, 0.01, 0.02, 1.0])
def test_a_sandbox_ends_at_its_deadline_by_itself(
    provider: BubblewrapProvider, directory: Path, lifetime_s: float
) -> None:
    async def run() -> None:
        async with provider.open(spec(deadline_at_s=time.time() + lifetime_s)) as sandbox:
            await sandbox.exec("sleep 60", timeout_s=60)

    with pytest.raises((SandboxLostError, SandboxStartError)) as caught:  # the start may take as long
        asyncio.run(run())
    assert "deadline" in str(caught.value) or caught.value.kind == "deadline"
    assert clean(directory)


def test_cancelled_in_every_phase(provider: BubblewrapProvider, directory: Path) -> None:
    async def use(reached: dict[str, asyncio.Event]) -> None:
        reached["start"].set()
        async with provider.open(spec()) as sandbox:
            reached["open"].set()
            await sandbox.write_files({f"/testbed/{n}": b"x" * 50_000 for n in range(40)})
            reached["written"].set()
            await sandbox.read_file("/testbed/1")
            await sandbox.exec("sleep 0.02; setsid sleep 60 &", timeout_s=10)
            reached["done"].set()

    async def run() -> None:
        phases = ("start", "open", "written", "done")
        for phase in phases:
            for delay_s in (0.0, 0.003, 0.015):
                reached = {name: asyncio.Event() for name in phases}
                task = asyncio.create_task(use(reached))
                await asyncio.wait_for(reached[phase].wait(), 60)
                await asyncio.sleep(delay_s)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert clean(directory), (phase, delay_s)

    asyncio.run(run())


def test_cancelled_twice_while_closing(provider: BubblewrapProvider, directory: Path) -> None:
    async def run() -> None:
        async def use() -> None:
            async with provider.open(spec()):
                await asyncio.sleep(60)

        task = asyncio.create_task(use())
        await asyncio.sleep(0.2)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        assert task.cancelled()

    asyncio.run(run())
    assert clean(directory)


def test_the_loop_may_end_with_a_sandbox_open(provider: BubblewrapProvider, directory: Path) -> None:
    async def run() -> None:
        async def use() -> None:
            async with provider.open(spec()) as sandbox:
                await sandbox.exec("sleep 60", timeout_s=60)

        task = asyncio.create_task(use())
        await asyncio.sleep(0.2)
        assert not task.done()

    asyncio.run(run())
    assert clean(directory)


def test_a_start_that_fails_leaves_nothing_and_says_why(provider: BubblewrapProvider, directory: Path) -> None:
    async def attempt() -> str:
        with pytest.raises(SandboxStartError) as caught:
            async with provider.open(spec(workdir="/proc/none")):
                raise AssertionError("started")
        return str(caught.value)

    assert "bwrap: " in asyncio.run(attempt())
    assert clean(directory)


def test_a_missing_binary_is_a_start_error(
    provider: BubblewrapProvider, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rootfs.bwrap_argv
    monkeypatch.setattr(rootfs, "bwrap_argv", lambda *a, **k: ["/none", *real(*a, **k)[1:]])

    async def attempt() -> str:
        with pytest.raises(SandboxStartError) as caught:
            async with provider.open(spec()):
                raise AssertionError("started")
        return str(caught.value)

    assert "/none" in asyncio.run(attempt())
    assert clean(directory)
