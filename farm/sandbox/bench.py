"""What a sandbox costs on this machine: time and CPU of a start with its first command, and of a further command."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox.bubblewrap import BubblewrapProvider
from farm.sandbox.state import read_record, record_path, state_directory

_EXECS = 5  # commands measured in each sandbox


def measure(n: int) -> dict[str, list[float]]:
    """Start ``n`` sandboxes one after the other (after one that is not counted).

    ``start_ms``: from ``open`` until the first command is done, wall clock; ``start_cpu_ms``: CPU of this process, the
    launcher, bwrap and the sandbox for it; ``exec_ms``: one further ``true``; ``stop_ms``: until all of it is gone.
    """
    return asyncio.run(_measure(n))


async def _measure(n: int) -> dict[str, list[float]]:
    provider = BubblewrapProvider()
    found: dict[str, list[float]] = {"start_ms": [], "start_cpu_ms": [], "exec_ms": [], "stop_ms": []}
    for number in range(n + 1):
        spec = SandboxSpec(owner="bench", deadline_at_s=time.time() + 60)
        cpu, started = _cpu_s(provider), time.perf_counter()
        async with provider.open(spec) as sandbox:
            await sandbox.exec("true", timeout_s=10)
            start_ms = (time.perf_counter() - started) * 1e3
            bwrap = read_record(record_path(state_directory(), sandbox.id))
            inside_s = await sandbox.cpu_s() + (_process_cpu_s(bwrap.process.pid) if bwrap else 0.0)
            cpu_ms = (_cpu_s(provider) - cpu + inside_s) * 1e3
            execs = [await _exec_ms(sandbox) for _ in range(_EXECS)]
            stopping = time.perf_counter()
        if number:
            found["start_ms"].append(start_ms)
            found["start_cpu_ms"].append(cpu_ms)
            found["exec_ms"] += execs
            found["stop_ms"].append((time.perf_counter() - stopping) * 1e3)
    return found


async def _exec_ms(sandbox: Sandbox) -> float:
    started = time.perf_counter()
    await sandbox.exec("true", timeout_s=10)
    return (time.perf_counter() - started) * 1e3


def _cpu_s(provider: BubblewrapProvider) -> float:
    """CPU seconds of this process and the launcher."""
    launcher = provider.launcher_pid
    return time.process_time() + (_process_cpu_s(launcher) if launcher is not None else 0.0)


def _process_cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
