"""What bubblewrap sandboxes keep in: isolation, limits, and commands that want out or want to lie."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import farm
from farm.protocols import ExecResult, Sandbox, SandboxSpec
from farm.sandbox import cgroup, seccomp
from farm.sandbox.bench import measure
from farm.sandbox.bubblewrap import BubblewrapProvider
from farm.sandbox.doctor import checks
from farm.sandbox.state import read_record, record_path, state_directory

SPEC = SandboxSpec(owner="isolation", deadline_at_s=0.0, memory_bytes=128 << 20, disk_bytes=16 << 20, pids=32)
COUNTED = cgroup.find_cgroups().counts_memory


@pytest.fixture
def provider() -> Iterator[BubblewrapProvider]:
    made = BubblewrapProvider()
    yield made
    made.close()


def run(provider: BubblewrapProvider, *commands: str, timeout_s: float = 20, **changes: object) -> list[ExecResult]:
    """The results of ``commands`` in one sandbox."""

    async def body() -> list[ExecResult]:
        spec = replace(SPEC, deadline_at_s=time.time() + 60, **changes)  # type: ignore[arg-type]
        async with provider.open(spec) as sandbox:
            return [await sandbox.exec(command, timeout_s=timeout_s) for command in commands]

    return asyncio.run(body())


def output(provider: BubblewrapProvider, command: str, **changes: object) -> str:
    return run(provider, command, **changes)[0].output  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ isolation


def test_no_privileges(provider: BubblewrapProvider) -> None:
    status = output(provider, "id -u; id -g; grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")
    lines = status.splitlines()
    assert lines[:2] == ["1000", "1000"]
    facts = dict(line.split(":\t") for line in lines[2:])
    assert {facts[name] for name in facts if name.startswith("Cap")} == {"0" * 16}
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give sandboxes users of their own")
def test_under_root_a_sandbox_is_another_user_on_the_host(provider: BubblewrapProvider) -> None:
    async def body() -> None:
        async with provider.open(replace(SPEC, deadline_at_s=time.time() + 60)) as sandbox:
            record = read_record(record_path(state_directory(), sandbox.id))
            assert record is not None
            status = Path(f"/proc/{record.process.pid}/status").read_text()
            uids = {int(uid) for uid in status.split("Uid:")[1].split("\n")[0].split()}
            assert uids
            assert 0 not in uids

    asyncio.run(body())


def test_the_host_is_not_visible(provider: BubblewrapProvider) -> None:
    here = Path(__file__).resolve()
    commands = [
        f"ls {here}",
        f"ls {Path.home()}/.ssh",
        "ls /sys",
        "ls /run",
        "ls /etc/shadow",
        f"kill -0 {os.getpid()}",
    ]
    assert all(result.exit_code != 0 for result in run(provider, *commands))
    assert (
        output(provider, "ls -A /home /tmp /testbed /home/agent")
        == "/home:\nagent\n\n/home/agent:\n\n/testbed:\n\n/tmp:\n"
    )
    assert output(provider, "hostname; ls /proc | grep -c '^[0-9]'").splitlines()[0] == "sandbox"
    assert output(provider, "echo /proc/[0-9]*") in {f"/proc/1 /proc/{n}\n" for n in range(2, 9)}


def test_the_environment_of_the_host_stays_outside(
    provider: BubblewrapProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    assert "SECRET" not in output(provider, "env; tr '\\0' '\\n' < /proc/self/environ")


def test_nothing_of_the_host_is_open(provider: BubblewrapProvider) -> None:
    leak = os.open("/", os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        assert output(provider, "ls /proc/self/fd").split() == ["0", "1", "2", "3"]  # 3 is the folder that ls reads
    finally:
        os.close(leak)


def test_system_folders_are_read_only(provider: BubblewrapProvider) -> None:
    folders = ("/usr", "/etc", "/bin", sys.base_prefix, "/proc/sys/kernel")
    for result in run(provider, *(f"touch {folder}/x" for folder in folders)):
        assert result.exit_code != 0
    assert run(provider, "chmod 777 /etc/passwd; rm -rf /usr/bin /etc 2>/dev/null; ls /usr/bin/env")[0].exit_code == 0


def test_no_network(provider: BubblewrapProvider) -> None:
    assert "unreachable" in output(provider, "echo > /dev/tcp/192.0.2.1/80")
    assert output(provider, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n"
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    assert run(provider, f'python3 -c "{script}"')[0].exit_code == 0


def test_hypervisor_sockets_are_refused(provider: BubblewrapProvider) -> None:
    for family in (40, 38, 17):  # vsock, alg, packet
        assert "Error" in output(provider, f"python3 -c 'import socket; socket.socket({family}, 1)' 2>&1 | tail -1")


def test_namespaces_can_not_be_made(provider: BubblewrapProvider) -> None:
    for command in (
        "unshare -U true",
        "unshare -r true",
        "unshare -n true",
        "mount -t tmpfs none /tmp",
        "umount /proc",
    ):
        assert run(provider, command)[0].exit_code != 0


def test_dangerous_system_calls_are_denied(provider: BubblewrapProvider) -> None:
    column = 0 if platform.machine() == "x86_64" else 1
    tables = dict(seccomp.DENIED) if COUNTED else {**seccomp.DENIED, **seccomp.UNCOUNTED}
    numbers = {name: pair[column] for name, pair in tables.items() if pair[column] is not None}
    script = f"""
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
def error(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return ctypes.get_errno() if result == -1 else 0
answers = {{name: error(number, *[-1] * 6) for name, number in {numbers!r}.items()}}
answers["clone of a user namespace"] = error({(56, 220)[column]}, 0x10000000 | 17, 0, 0, 0, 0)
answers["clone3"] = 1 if error(435, 0, 0) == 38 else 0
print(json.dumps(answers))
"""

    async def body() -> str:
        async with provider.open(replace(SPEC, deadline_at_s=time.time() + 60)) as sandbox:
            await sandbox.write_files({"/tmp/calls.py": script.encode()})
            return (await sandbox.exec("python3 /tmp/calls.py", timeout_s=20)).output

    answers = json.loads(asyncio.run(body()))
    assert {name for name, error in answers.items() if error != 1} == set()
    assert len(answers) == len(numbers) + 2


def test_the_tools_of_the_host_image(provider: BubblewrapProvider) -> None:
    done = run(
        provider,
        "git init -q; echo a > f; git add f && git commit -qm 1 && sed -i s/a/b/ f && git diff --stat | tail -1",
        "python3 -c 'import sys, ssl, sqlite3, json; print(sys.version_info[:2])'; python --version",
        "python3 -c 'import pytest'; python3 -c 'import numpy'",
        "python3 -c 'import multiprocessing as m; print(sum(m.Pool(2).map(abs, [-1, -2])))'",
    )
    assert done[0].output == " 1 file changed, 1 insertion(+), 1 deletion(-)\n"
    assert done[1].output.startswith(f"{sys.version_info[:2]}\nPython 3.")
    assert done[2].output.count("ModuleNotFoundError") == 2
    assert done[3].output == "3\n"


def test_the_pytest_image(provider: BubblewrapProvider) -> None:
    test = "printf 'def test_a(): assert 1\\ndef test_b(): assert 0\\n' > test_x.py; python -m pytest -q test_x.py"
    done = run(provider, test, "python3 -c 'import numpy'", "python3 -c 'import pluggy'", image="host-pytest")
    assert done[0].exit_code == 1
    assert "1 failed, 1 passed" in done[0].output
    assert [result.exit_code for result in done[1:]] == [1, 0]


# --------------------------------------------------------------------------------------------- limits


def test_memory(provider: BubblewrapProvider) -> None:
    grab = "python3 -c 'b = bytearray(300 << 20); print(len(b))'"
    done = run(provider, grab, "echo on")
    assert done[0].exit_code in (1, 137)
    assert "314572800" not in done[0].output
    assert done[1].output == "on\n"


@pytest.mark.skipif(not COUNTED, reason="needs a memory cgroup")
def test_memory_of_many_processes_together(provider: BubblewrapProvider) -> None:
    one = "(python3 -c 'import time; b = bytearray(40 << 20); time.sleep(0.5)'; echo $?)"
    done = run(provider, " & ".join([one] * 6) + " & wait", "echo on")
    assert "137" in done[0].output
    assert done[1].output == "on\n"


def test_processes(provider: BubblewrapProvider) -> None:
    done = run(provider, "for i in {1..100}; do sleep 9 & done", "echo on", timeout_s=0.8)
    assert "fork: " in done[0].output
    assert done[1].output == "on\n"


def test_a_fork_bomb(provider: BubblewrapProvider) -> None:
    done = run(provider, ":(){ :|:& };: ; sleep 60", "echo on", timeout_s=0.8)
    assert done[0].timed_out
    assert (done[1].output, done[1].exit_code) == ("on\n", 0)


def test_a_fork_bomb_in_the_background(provider: BubblewrapProvider) -> None:
    done = run(provider, "(bomb() { bomb | bomb & }; bomb) 2> /dev/null & echo left", "echo on", timeout_s=20)
    assert done[1].output == "on\n"


def test_disk(provider: BubblewrapProvider) -> None:
    fill = "for d in /testbed /tmp /home/agent /dev/shm /var/tmp; do head -c 10M /dev/zero > $d/x || echo full; done"
    done = run(provider, fill, "rm /testbed/x; echo on > /testbed/y && cat /testbed/y")
    assert done[0].output.count("full") == 4
    assert done[1].output == "on\n"

    async def write() -> None:
        async with provider.open(replace(SPEC, deadline_at_s=time.time() + 60)) as sandbox:
            with pytest.raises(OSError, match="No space left"):
                await sandbox.write_files({f"/testbed/{n}": bytes(1 << 20) for n in range(20)})

    asyncio.run(write())


def test_output_for_ever(provider: BubblewrapProvider) -> None:
    flood, after = run(provider, "yes", "echo on", timeout_s=0.5, output_bytes=5000)
    assert (len(flood.output), flood.truncated, flood.timed_out) == (5000, True, True)
    assert after.output == "on\n"


def test_a_background_flood_does_not_hold_up_the_end(provider: BubblewrapProvider) -> None:
    done = run(provider, "yes & echo on; exit 3", "pkill -9 yes; echo on", timeout_s=20)
    assert (done[0].exit_code, done[0].timed_out) == (3, False)
    assert done[1].output == "on\n"


def test_all_descendants_die_at_the_deadline(provider: BubblewrapProvider) -> None:
    stubborn = "(trap '' TERM HUP INT; sleep 93 & sleep 94)"
    brood = f"setsid sleep 91 & nohup sleep 92 & {stubborn} & (sleep 95 & disown) ; sleep 96"
    done = run(provider, brood, "pgrep -c sleep; ls /proc | grep -c '^[0-9]'", timeout_s=0.4)
    assert done[0].timed_out
    assert done[1].output.splitlines()[0] == "0"


def test_background_processes_live_until_a_deadline(provider: BubblewrapProvider) -> None:
    done = run(provider, "sleep 90 > /dev/null 2>&1 & echo started", "pgrep -cf 'sleep 9[0]'")
    assert [result.output for result in done] == ["started\n", "1\n"]


def test_closed_streams_are_not_the_end(provider: BubblewrapProvider) -> None:
    done = run(provider, "exec >&- 2>&-; sleep 0.2; exit 5", "exec >&- 2>&-; sleep 60", timeout_s=0.6)
    assert (done[0].exit_code, done[0].timed_out) == (5, False)
    assert done[1].timed_out


# ------------------------------------------------------------------------------------------- hostile


def test_the_command_server_can_not_be_touched(provider: BubblewrapProvider) -> None:
    attacks = [
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1; echo done",
        "cat /proc/1/environ /proc/1/mem; ls -l /proc/1/fd /proc/1/cwd/; exit 0",
        "for n in 0 1 2 3 4 5; do echo E > /proc/1/fd/$n; done; exit 0",
        'python3 -c \'import os; os.write(os.open("/proc/1/mem", os.O_RDWR), b"x")\'',
    ]
    done = run(provider, *attacks, "echo on")
    assert done[-1].output == "on\n"
    assert "Permission denied" in done[1].output
    assert done[2].output.count("Permission denied") == 6
    assert "PermissionError" in done[3].output


def test_a_left_over_process_can_not_speak_for_later_commands(provider: BubblewrapProvider) -> None:
    lie = "(trap '' PIPE; while :; do echo 'lie'; sleep 0.01; done) & disown; echo first"
    done = run(provider, lie, "sleep 0.1; echo second; exit 9", "sleep 0.1; echo third")
    assert done[0].output.replace("lie\n", "") == "first\n"
    assert [(result.output, result.exit_code) for result in done[1:]] == [("second\n", 9), ("third\n", 0)]


def test_output_that_looks_like_a_frame_is_output(provider: BubblewrapProvider) -> None:
    forged = "printf 'E\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0ok'; printf 'X{\"status\": 0}'; printf 'R'; exit 8"
    done = run(provider, forged, "echo on")
    assert done[0].exit_code == 8
    assert done[0].output == "E" + "\0" * 14 + 'okX{"status": 0}R'
    assert done[1].output == "on\n"


def test_links_can_not_lead_writes_out(provider: BubblewrapProvider, tmp_path: Path) -> None:
    async def body() -> None:
        async with provider.open(replace(SPEC, deadline_at_s=time.time() + 60)) as sandbox:
            await sandbox.exec(f"ln -s {tmp_path} out; ln -s /etc/passwd in", timeout_s=10)
            with pytest.raises(OSError, match="in: "):
                await sandbox.write_files({"/testbed/in": b"x"})
            await _written(sandbox, "/testbed/out/x")
        assert list(tmp_path.iterdir()) == []

    asyncio.run(body())


async def _written(sandbox: Sandbox, path: str) -> None:
    """Either refused, or written to a folder of that name inside."""
    try:
        await sandbox.write_files({path: b"x"})
    except OSError:
        return
    assert await sandbox.read_file(path) == b"x"


# ------------------------------------------------------------------------------------- without root

_UNPRIVILEGED = """
import asyncio, time
from farm.protocols import SandboxSpec
from farm.sandbox.bench import measure
from farm.sandbox.bubblewrap import BubblewrapProvider
async def main():
    provider = BubblewrapProvider()
    spec = SandboxSpec(owner="nobody", deadline_at_s=time.time() + 60, memory_bytes=256 << 20, pids=32)
    async with provider.open(spec) as sandbox:
        for command, timeout_s in (
            ("id -u; grep CapEff /proc/self/status", 10),
            ("python3 -c 'bytearray(1 << 30)' 2>&1 | tail -1", 10),
            ("for i in {1..100}; do sleep 9 & done", 0.8),
            ("sleep 60", 0.3),
            ("cat /proc/1/environ; python3 -c 'import os; os.memfd_create(str(1))' 2>&1 | tail -1; ls -A /tmp", 10),
        ):
            result = await sandbox.exec(command, timeout_s=timeout_s)
            print(repr((result.exit_code, result.timed_out, result.output)))
        print(await sandbox.cpu_s() > 0)
    provider.close()
asyncio.run(main())
"""

_AS_NOBODY = r"""
set -e
state=$1 python=$2 code=$3; shift 3
work=$state/work; mkdir "$work"
mount -t tmpfs -o mode=755 none "$work"
for folder in "$@"; do mkdir -p "$work$folder"; mount --bind "$folder" "$work$folder"; done
mount -t tmpfs -o mode=755 none /root
for folder in "$@"; do mkdir -p "$folder"; mount --bind "$work$folder" "$folder"; done
exec setpriv --reuid 65534 --regid 65534 --clear-groups \
    env -i PATH="$PATH" TMPDIR="$state" "$python" -W error -c "$code"
"""


@pytest.mark.skipif(os.getuid() != 0, reason="all the other tests are this test already")
def test_without_root() -> None:
    """In a mount namespace where the project and its Python are reachable by all, even if they are below /root."""
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs to make a mount namespace")
    project = Path(farm.__file__).parents[1]
    folders = [path for path in (project, sys.prefix, sys.base_prefix) if str(path).startswith("/root/")]
    with tempfile.TemporaryDirectory() as state:
        Path(state).chmod(0o777)
        arguments = [state, sys.executable, _UNPRIVILEGED, *map(str, folders)]
        command = ["unshare", "-m", "--propagation", "private", "bash", "-c", _AS_NOBODY, "bash", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=project, check=False)
        assert done.stderr == ""
        results = [ast.literal_eval(line) for line in done.stdout.splitlines()]
        assert list(Path(state).glob("rollout-farm-*/sandboxes/*")) == []
    assert results[0] == (0, False, "1000\nCapEff:\t0000000000000000\n")
    assert results[1] == (0, False, "MemoryError\n")
    assert "fork: " in results[2][2]
    assert results[3] == (124, True, "")
    assert "Permission denied" in results[4][2]
    assert "PermissionError" in results[4][2]
    assert results[5] is True


# --------------------------------------------------------------------------------------------- doctor


def test_the_doctor_finds_nothing_missing() -> None:
    found = {check.name: check for check in checks()}
    assert {check.name for check in found.values() if check.status == "missing"} == set()
    assert found["self-test"].status == "ok"
    assert {"user namespaces", "cgroups", "seccomp", "bwrap", "python", "git", "overlay"} <= set(found)
    assert all(check.advice for check in found.values() if check.status != "ok")


@pytest.mark.parametrize("concurrent", [1, 3])
def test_costs_are_measured(concurrent: int) -> None:
    found = measure(concurrent, concurrent=concurrent)
    expected = {"start_ms": 1, "start_cpu_ms": 1, "exec_ms": 5, "stop_ms": 1}
    assert {name: len(values) for name, values in found.items()} == {k: n * concurrent for k, n in expected.items()}
    assert all(value > 0 for values in found.values() for value in values)
