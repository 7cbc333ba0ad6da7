"""Start an engine as a process of its own, and stop it: an embedded one, or any server that speaks SGLang's API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.engine.sglang import SGLangEngine
from farm.errors import EngineError, UsageError

_POLL_S = 0.05
_ASK_S = 0.5  # between two questions whether a server that does not announce itself is up
_HEALTH_S = 30.0
_REFUSED = 2  # exit code of a server that can't serve what it was given

# Log-probs are to be the policy's own; without it SGLang's are of the distribution that temperature and top_p leave.
_SGLANG_ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}

# What a command may have in braces.
PLACEHOLDERS = frozenset(
    {"model", "version", "host", "port", "context_length", "max_total_tokens", "max_running_requests"}
)


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
        """The server's command line."""
        arguments = [sys.executable, "-m", "farm.engine.embedded"]
        arguments += ["--model", self.model, "--weight-version", self.version]
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
class CommandOptions:
    """How to start one engine by a command of the user's. ``command`` may hold the names of :data:`PLACEHOLDERS` in
    braces. ``gpus``: what the process gets as ``CUDA_VISIBLE_DEVICES``; None leaves that as it is."""

    command: tuple[str, ...]
    model: str
    version: str
    port: int
    host: str = "127.0.0.1"
    max_total_tokens: int
    context_length: int
    max_running_requests: int
    gpus: tuple[str, ...] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def arguments(self) -> list[str]:
        """The command with its placeholders filled in."""
        values = {name: str(getattr(self, name)) for name in PLACEHOLDERS}
        return [part.format_map(values) for part in self.command]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A running engine. It ends with this process, or by :meth:`stop`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after ``grace_s`` to it and all its children. Safe to call twice."""
        await _stop(self.process, grace_s)


async def launch_engine(
    options: EngineOptions | CommandOptions, *, run_folder: Path, name: str = "engine", timeout_s: float = 60.0
) -> EngineProcess:
    """Start an engine and wait until it serves; its log is ``run_folder/name.log``.

    Raises UsageError when the server refuses its options (bad model folder, port in use, no such command) and
    EngineError (``start``) when it dies or is not up in time; nothing is left running then, nor when cancelled."""
    run_folder.mkdir(parents=True, exist_ok=True)
    log = run_folder / f"{name}.log"
    deadline = time.monotonic() + timeout_s
    if isinstance(options, EngineOptions):
        url_file = run_folder / f"{name}.url"
        url_file.unlink(missing_ok=True)
        command = [*options.arguments(), "--url-file", str(url_file), "--parent-pid", str(os.getpid())]
        process = _spawn(command, log, {"OMP_NUM_THREADS": "1"})
        announced = _announced(url_file)
    else:
        command = [sys.executable, "-m", "farm.engine.tether", str(os.getpid()), *options.arguments()]
        more = {} if options.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(options.gpus)}
        process = _spawn(command, log, more | _SGLANG_ENVIRONMENT)
        announced = _answering(options.url)
    waiting = asyncio.create_task(announced)
    try:
        while not waiting.done():
            code = process.poll()
            if code == _REFUSED:
                raise UsageError(_last_line(log))
            if code is not None:
                raise EngineError(f"engine ended with {code} at start: {_last_line(log)} (log: {log})", kind="start")
            if time.monotonic() > deadline:
                raise EngineError(f"engine not up within {timeout_s:g} s (log: {log})", kind="start")
            await asyncio.wait({waiting}, timeout=_POLL_S)
        return EngineProcess(url=waiting.result(), process=process, log=log)
    except BaseException:
        _kill(process)
        process.wait()
        raise
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Somebody else may take it before it is used: then the start fails and is repeated."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def share_out_gpus(visible: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, ...] | None]:
    """Which of the ``visible`` devices each engine gets, by its size; None for an engine of size 0 (on the CPU).

    Raises UsageError when there are too few."""
    if sum(sizes) > len(visible):
        raise UsageError(
            f"the engines to launch need {sum(sizes)} GPUs, this machine shows {len(visible)}; launch fewer, or set "
            "engine.gpus_per_engine = 0 for engines that run on the CPU"
        )
    shares: list[tuple[str, ...] | None] = []
    at = 0
    for size in sizes:
        shares.append(tuple(visible[at : at + size]) if size else None)
        at += size
    return shares


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES leaves of this machine's NVIDIA devices."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip()]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(found, key=int)


def _spawn(command: list[str], log: Path, more: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as stream:
        # Its own session: a Ctrl-C meant for the farm, which drains first, must not end the engine under it.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**os.environ, **more},
        )


async def _announced(url_file: Path) -> str:
    while not url_file.exists():  # noqa: ASYNC110 (written by another process)
        await asyncio.sleep(_POLL_S)
    return url_file.read_text()


async def _answering(url: str) -> str:
    """Once it generates."""
    engine = SGLangEngine(url, health_s=_HEALTH_S)
    try:
        while not await engine.healthy():  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(_ASK_S)
    finally:
        await engine.close()
    return url


async def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    deadline = time.monotonic() + grace_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            _kill(process)
            process.wait()
            return
        await asyncio.sleep(_POLL_S)
    _kill(process)  # what it may have left behind


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group: a server may have processes of its own, and they are in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
