"""Start an embedded engine as a process of its own, and stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from farm.errors import EngineError, UsageError

_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to start one embedded engine; None leaves the server's default. ``version`` is the name its weights answer by
    (``step-NNNNNN`` when they are a published policy)."""

    model: str
    version: str = "default"
    host: str = "127.0.0.1"
    port: int = 0
    max_total_tokens: int | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    chunked_prefill_size: int | None = None
    clip_new_tokens: int | None = None

    def arguments(self) -> list[str]:
        """The server's command line, without the interpreter."""
        arguments = ["-m", "farm.engine.embedded", "--model", self.model, "--weight-version", self.version]
        arguments += ["--host", self.host, "--port", str(self.port)]
        for name in (
            "max_total_tokens", "context_length", "max_running_requests", "max_queued_requests", "chunked_prefill_size",
            "clip_new_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                arguments += [f"--{name.replace('_', '-')}", str(value)]
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A running embedded engine. It ends with this process, or by :meth:`stop`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after ``grace_s``. Safe to call twice."""
        await _stop(self.process, grace_s)


def start_engine(options: EngineOptions, *, run_folder: Path, name: str) -> tuple[subprocess.Popen[bytes], Path, Path]:
    """Spawn without waiting; returns (process, url file, log). Its log is ``run_folder/name.log``."""
    run_folder.mkdir(parents=True, exist_ok=True)
    url_file = run_folder / f"{name}.url"
    url_file.unlink(missing_ok=True)
    log = run_folder / f"{name}.log"
    command = [
        sys.executable, *options.arguments(), "--url-file", str(url_file), "--parent-pid", str(os.getpid()),
    ]  # fmt: skip
    with log.open("ab") as stream:
        # Its own session: a Ctrl-C meant for the farm, which drains first, must not end the engine under it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return process, url_file, log


async def launch_engine(
    options: EngineOptions, *, run_folder: Path, name: str = "engine", timeout_s: float = 60.0
) -> EngineProcess:
    """Start an embedded engine and wait until it serves.

    Raises UsageError when the server refuses its options (bad model folder, port in use) and EngineError (``start``)
    when it dies or is not up in time; nothing is left running then, nor when cancelled."""
    process, url_file, log = start_engine(options, run_folder=run_folder, name=name)
    deadline = time.monotonic() + timeout_s
    try:
        while not url_file.exists():
            code = process.poll()
            if code == 2:
                raise UsageError(_last_line(log))
            if code is not None:
                raise EngineError(f"engine ended with {code} at start: {_last_line(log)} (log: {log})", kind="start")
            if time.monotonic() > deadline:
                raise EngineError(f"engine not up within {timeout_s:g} s (log: {log})", kind="start")
            await asyncio.sleep(_POLL_S)
        return EngineProcess(url=url_file.read_text(), process=process, log=log)
    except BaseException:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise


async def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    deadline = time.monotonic() + grace_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            return
        await asyncio.sleep(_POLL_S)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
