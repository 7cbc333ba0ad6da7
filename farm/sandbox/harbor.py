"""Any Harbor environment as a back end: what Harbor starts and talks to, the farm uses as a sandbox.

Needs the package ``harbor``, which needs Python 3.12. Harbor offers short commands and files; the farm's own promises
(one merged stream, time-outs that kill the whole tree, a sandbox that stays usable after them) come from the runner
(:mod:`farm.sandbox.runner_sandbox`), so a machine needs bash and ``/usr/bin/perl``.

Harbor knows no deadline and can't list what it started, so the farm writes down what it opens
(:mod:`farm.sandbox.harbor_records`). Its owner stops a sandbox at its deadline; any sweep on the host ends those that
are overdue, and those of dead owners: the environment is made again under the same session id and stopped. That is
enough for environments that find their machine by that id (docker, podman, ...). One that only finds it by what a
service answered at its start can be stopped by nobody else: give it a time limit of its own in ``harbor.kwargs``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import secrets
import shlex
import shutil
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from farm.errors import SandboxStartError, UsageError
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox.build_context import build_context
from farm.sandbox.harbor_records import Record, Records
from farm.sandbox.optional import sdk
from farm.sandbox.runner_sandbox import Refused, RunnerSandbox
from farm.sandbox.served import STOP_S, uncancelled
from farm.sandbox.state import alive
from farm.types import Machine, content_digest

_CALL_S = 60.0  # one answer, beyond what a command is asked to wait
_STOP_S = 120.0
_LOOK_S = 1.0  # how often an open sandbox is held against its deadline and its record
_TRIES = 3
_PAUSE_S = 0.5

# Files, packed in one, to their places: a call per file would take an environment's time once for each.
_UNPACK = r"""
use strict; use warnings;
my ($blob) = @ARGV;
open(my $in, '<:raw', $blob) or do { print "FAIL $blob: $!\n"; exit };
my @parts = do { local $/; unpack('(N/a)*', <$in>) };
unlink($blob);
while (my ($path, $data) = splice(@parts, 0, 2)) {
    my $folder = '';
    for my $part (split(m{/}, substr($path, 1, rindex($path, '/')))) { $folder .= "/$part"; mkdir($folder) }
    my $done = open(my $out, '>:raw', $path);
    $done = (print {$out} $data) && close($out) if $done;
    if (!$done) { print "FAIL $path: $!\n"; exit }
}
print "DONE\n";
"""

_OVERDUE = ("its deadline has passed", "deadline")
_log = logging.getLogger(__name__)
T = TypeVar("T")


class HarborProvider:
    """``environment``: one of Harbor's types (docker, modal, daytona, ...) or MODULE:CLASS; ``kwargs``: its own;
    ``network``: every sandbox has one, not only those of tasks that ask: for environments that can't do without. One
    event loop at a time."""

    name = "harbor"

    def __init__(
        self, *, environment: str = "docker", network: bool = False, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raises UsageError where Harbor is missing, or knows no such environment."""
        sdk("harbor", oldest=(0, 25), below=1, least_python=(3, 12))
        self._models = importlib.import_module("harbor.models.task.config")
        self._paths = importlib.import_module("harbor.models.trial.paths")
        self._factory = importlib.import_module("harbor.environments.factory").EnvironmentFactory
        named = {"import_path": environment} if ":" in environment else {"type": environment}
        try:
            config = importlib.import_module("harbor.models.trial.config").EnvironmentConfig
            self._config = config.model_validate({**named, "kwargs": dict(kwargs or {})})
            self._factory.validate_options(self._config)
        except Exception as error:  # pydantic's, and whatever an import brings
            raise UsageError(f"sandbox 'harbor': environment {environment!r}: {_told(error)}") from error
        self._network = network
        self._records = Records(content_digest([environment, {str(k): str(v) for k, v in (kwargs or {}).items()}]))

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        session = f"farm-{secrets.token_hex(8)}"
        with tempfile.TemporaryDirectory(prefix="farm-harbor-") as folder:
            environment = self._environment(spec, Path(folder), session)
            self._records.add(
                session=session,
                owner=spec.owner,
                deadline_at_s=spec.deadline_at_s,
                folder=folder,
                network=spec.machine.network,
            )
            sandbox = HarborSandbox(environment, spec, self._records)
            watch = asyncio.create_task(self._watch(sandbox, environment, spec.deadline_at_s))
            try:
                await _start(environment, spec)
                await sandbox.ready()
                yield sandbox
            finally:
                sandbox.closed()
                await uncancelled(self._close(session, environment, watch))

    async def _watch(self, sandbox: HarborSandbox, environment: Any, deadline_at_s: float) -> None:
        """Stop it at its deadline, or when a sweep has ended it; without, for ever."""
        while time.time() < deadline_at_s and not self._records.is_over(sandbox.id):  # noqa: ASYNC110 - others end it
            await asyncio.sleep(_LOOK_S)
        sandbox.closed(_OVERDUE)
        await _stop(environment)

    async def _close(self, session: str, environment: Any, watch: asyncio.Task[None]) -> None:
        watch.cancel()
        await asyncio.wait([watch])
        if await _stop(environment):
            self._records.remove(session)
        else:
            self._records.end(session)  # for the sweeps to come

    async def sweep(self, *, now_s: float) -> int:
        """Of every process on this host that has such environments open, or had; see the module."""
        with self._records.overdue(now_s=now_s) as found:
            await asyncio.gather(*(uncancelled(self._end(record)) for record in found))
            return len(found)

    async def _end(self, record: Record) -> None:
        with tempfile.TemporaryDirectory(prefix="farm-harbor-") as folder:
            spec = SandboxSpec(
                owner=record.owner,
                deadline_at_s=record.deadline_at_s,
                image="none",  # nothing is started
                machine=Machine(network=record.network),
            )
            try:
                environment = self._environment(spec, Path(folder), record.session)
            except SandboxStartError as error:
                _log.warning("environment %s may be left: %s", record.session, error)
                return
            stopped = await _stop(environment)
        if stopped and (not alive(record.owner_process) or not Path(record.folder).exists()):
            self._records.remove(record.session)
            shutil.rmtree(record.folder, ignore_errors=True)
        # else its owner sees that it is over, and clears up itself

    def _environment(self, spec: SandboxSpec, folder: Path, session: str) -> Any:
        """Raises SandboxStartError: Harbor refuses what an environment can't do."""
        context = build_context(spec.image)
        empty = folder / "environment"
        empty.mkdir()
        trial = self._paths.TrialPaths(folder / "trial")
        trial.mkdir()
        network = "public" if spec.machine.network or self._network else "no-network"
        try:
            return self._factory.create_environment_from_config(
                config=self._config,
                environment_dir=context.folder if context else empty,
                environment_name=context.digest[:12] if context else spec.image.replace("/", "-").replace(":", "-"),
                session_id=session,
                trial_paths=trial,
                task_env_config=self._models.EnvironmentConfig(
                    docker_image=None if context else spec.image,
                    cpus=spec.machine.cpus,
                    memory_mb=spec.memory_bytes >> 20,
                    storage_mb=spec.disk_bytes >> 20,
                    workdir=spec.workdir,
                    network_mode=network,
                ),
                network_policy=self._models.NetworkPolicy(network_mode=network),
            )
        except Exception as error:
            raise SandboxStartError(f"image {spec.image}: {_told(error)}", kind="refused", retryable=False) from error


class HarborSandbox(RunnerSandbox):
    """A started Harbor environment; made by :class:`HarborProvider` only."""

    def __init__(self, environment: Any, spec: SandboxSpec, records: Records) -> None:
        super().__init__(str(environment.session_id), spec, user="of the image")
        self._environment = environment
        self._records = records
        self._numbers = itertools.count()

    def _check(self) -> None:
        if self._records.is_over(self.id):
            self.closed(_OVERDUE)
        super()._check()

    async def _say(self, command: str, *, wait_s: float) -> str:
        self._check()
        timeout_s = wait_s + _CALL_S
        result = await self._persist(
            lambda: self._environment.exec(command=command, cwd="/", timeout_sec=int(timeout_s)), timeout_s
        )
        said = str(result.stdout or "").replace("\r\n", "\n")  # through a terminal, in some environments
        return said if said.endswith("\n") or not said else f"{said}\n"  # and stripped in others

    async def _put(self, files: Mapping[str, bytes]) -> None:
        packed = b"".join(
            struct.pack(">I", len(part)) + part for path, data in files.items() for part in (path.encode(), data)
        )
        with tempfile.TemporaryDirectory(prefix="farm-harbor-") as folder:
            source, target = Path(folder) / "blob", f"/tmp/.farm-{secrets.token_hex(8)}"
            source.write_bytes(packed)
            source.chmod(0o644)  # the machine's user may be another than the one who uploads
            self._check()
            await self._persist(lambda: self._environment.upload_file(source, target), _CALL_S)
        answer = await self._say(f"exec /usr/bin/perl -e {shlex.quote(_UNPACK)} -- {target}", wait_s=0.0)
        if answer != "DONE\n":
            raise Refused(answer.removeprefix("FAIL ").strip() or "the files could not be unpacked")

    async def _fetch(self, path: str) -> bytes:
        self._check()
        with tempfile.TemporaryDirectory(prefix="farm-harbor-") as folder:
            target = Path(folder) / "file"
            await self._persist(lambda: self._environment.download_file(path, target), _CALL_S)
            return target.read_bytes()

    async def _persist(self, call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """``call``, which may be repeated, a few times. Raises ``SandboxLostError``."""
        for left in reversed(range(_TRIES)):
            try:
                async with asyncio.timeout(timeout_s + STOP_S):
                    return await call()
            except Exception as error:
                if not left:
                    self._fail(_told(error), "lost")
            await asyncio.sleep(_PAUSE_S)
            self._check()
        raise AssertionError("unreachable")


async def _start(environment: Any, spec: SandboxSpec) -> None:
    """Raises SandboxStartError."""
    try:
        async with asyncio.timeout(max(1.0, spec.deadline_at_s - time.time())):
            await environment.start(force_build=False)
    except Exception as error:
        permanent = type(error).__name__ == "SandboxBuildFailedError" or not getattr(error, "retryable", True)
        raise SandboxStartError(
            f"image {spec.image}: {_told(error)}", kind=getattr(error, "kind", "start"), retryable=not permanent
        ) from error


async def _stop(environment: Any) -> bool:
    """Bounded in time; whether it could be stopped."""
    try:
        async with asyncio.timeout(_STOP_S):
            await environment.stop(delete=True)
    except Exception as error:
        _log.warning("environment %s may be left: %s", environment.session_id, _told(error))
        return False
    return True


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
