"""What a sandbox costs on this machine: time and CPU of a start with its first command, and of a further command."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from farm.protocols import Sandbox, SandboxProvider, SandboxSpec
from farm.sandbox.bubblewrap import BubblewrapProvider
from farm.sandbox.state import read_record, record_path, state_directory

_EXECS = 5  # commands measured in each sandbox


def measure(n: int, *, concurrent: int = 1) -> dict[str, list[float]]:
    """Start at least ``n`` sandboxes, ``concurrent`` at once (after some that are not counted).

    ``start_ms``: from ``open`` until the first command is done, wall clock; ``start_cpu_ms``: CPU of this process, the
    launcher, bwrap and the sandbox for it; ``exec_ms``: one further ``true``; ``stop_ms``: until all of it is gone.
    """
    return asyncio.run(_measure(n, concurrent))


async def measure_any(provider: SandboxProvider, n: int, *, concurrent: int = 1) -> dict[str, list[float]]:
    """``start_ms``, ``exec_ms`` and ``stop_ms`` as :func:`measure` has them, of any provider. ``start_ms`` ends with
    the first finished command; ``stop_ms`` is of one after the other."""
    found: dict[str, list[float]] = {"start_ms": [], "exec_ms": [], "stop_ms": []}
    while len(found["start_ms"]) < n:
        stacks = [contextlib.AsyncExitStack() for _ in range(concurrent)]
        try:
            started = await asyncio.gather(*(_start(provider, stack) for stack in stacks))
            found["start_ms"] += [start_s * 1e3 for _, start_s in started]
            for sandbox, _ in started:
                found["exec_ms"] += [await _exec_ms(sandbox) for _ in range(_EXECS)]
        finally:
            for stack in stacks:
                before = time.perf_counter()
                await stack.aclose()
                found["stop_ms"].append((time.perf_counter() - before) * 1e3)
    return found


async def _measure(n: int, concurrent: int) -> dict[str, list[float]]:
    provider = BubblewrapProvider()
    found: dict[str, list[float]] = {"start_ms": [], "start_cpu_ms": [], "exec_ms": [], "stop_ms": []}
    try:
        await _batch(provider, concurrent)
        while len(found["start_ms"]) < n:
            for name, values in (await _batch(provider, concurrent)).items():
                found[name] += values
    finally:
        provider.close()
    return found


async def _batch(provider: BubblewrapProvider, size: int) -> dict[str, list[float]]:
    """``size`` sandboxes started at once, then used and stopped one after the other."""
    stacks = [contextlib.AsyncExitStack() for _ in range(size)]
    shared_s = _shared_cpu_s(provider)
    started = await asyncio.gather(*(_start(provider, stack) for stack in stacks))
    shared_s = (_shared_cpu_s(provider) - shared_s) / size
    found: dict[str, list[float]] = {
        "start_ms": [start_s * 1e3 for _, start_s in started],
        "start_cpu_ms": [(shared_s + await _inside_cpu_s(sandbox)) * 1e3 for sandbox, _ in started],
        "exec_ms": [],
        "stop_ms": [],
    }
    for (sandbox, _), stack in zip(started, stacks, strict=True):
        found["exec_ms"] += [await _exec_ms(sandbox) for _ in range(_EXECS)]
        before = time.perf_counter()
        await stack.aclose()
        found["stop_ms"].append((time.perf_counter() - before) * 1e3)
    return found


async def _exec_ms(sandbox: Sandbox) -> float:
    before = time.perf_counter()
    await sandbox.exec("true", timeout_s=10)
    return (time.perf_counter() - before) * 1e3


async def _start(provider: SandboxProvider, stack: contextlib.AsyncExitStack) -> tuple[Sandbox, float]:
    spec = SandboxSpec(owner="bench", deadline_at_s=time.time() + 300)
    before = time.perf_counter()
    sandbox = await stack.enter_async_context(provider.open(spec))
    await sandbox.exec("true", timeout_s=60)
    return sandbox, time.perf_counter() - before


async def _inside_cpu_s(sandbox: Sandbox) -> float:
    """CPU seconds of the sandbox and of bwrap outside it."""
    bwrap = read_record(record_path(state_directory(), sandbox.id))
    return await sandbox.cpu_s() + (_process_cpu_s(bwrap.process.pid) if bwrap is not None else 0.0)


def _shared_cpu_s(provider: BubblewrapProvider) -> float:
    """CPU seconds of this process and the launcher."""
    launcher = provider.launcher_pid
    return time.process_time() + (_process_cpu_s(launcher) if launcher is not None else 0.0)


def _process_cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
