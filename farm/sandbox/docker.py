"""Sandboxes in containers of a Docker daemon, served by the command server as their pid 1.

A container has no network (unless its task asks for one and ``docker.network`` names it), no capabilities, no way to
gain privileges, and limits on memory, processes, CPU and disk. Its first process is :mod:`farm.sandbox.command_server`
(perl, which every Debian and Ubuntu has), spoken to over the attached standard streams, so a command costs about a
millisecond and not a ``docker exec``, and a time-out kills every process but the server, also one that made a session
of its own.

Nothing stays behind: when the farm dies, the server reads the end of its input and exits; at the deadline it exits by
its own alarm; in both cases the daemon removes the container (``AutoRemove``). What is left when the daemon could
not, or when the farm died between two calls, is swept by the deadline in its label.

Images: ``host`` and ``host-pytest`` as for bubblewrap (:mod:`farm.sandbox.docker_host_image`), or whatever the daemon
has or can pull (:mod:`farm.sandbox.docker_images`). The root of a pulled image is writable; where the daemon can't
limit the size of that layer, it is looked at every few seconds (:mod:`farm.sandbox.docker_disk`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from farm.errors import SandboxStartError, UsageError
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox import command_server, docker_host_image, rootfs
from farm.sandbox.channel import Closed
from farm.sandbox.docker_daemon import Daemon, DockerError, package
from farm.sandbox.docker_disk import DiskWatch, room_for_images
from farm.sandbox.docker_images import ImageStore, start_error
from farm.sandbox.docker_link import DockerLink
from farm.sandbox.served import STOP_S, ServedSandbox, uncancelled
from farm.sandbox.state import state_directory

OWNER_LABEL, DEADLINE_LABEL = "rollout-farm.owner", "rollout-farm.deadline"
PREFIX = "rollout-farm-"

_START_S = 60.0  # the most time until the command server answers, once the container is started
_NOFILE = 4096
_SHM_BYTES = 64 << 20
_SWEEP_S = 60.0
_EVENTS_S = 0.2  # how much later than the end of its streams a container's last event may come
_NO_QUOTA = ("storage-opt", "storage opt", "pquota", "quota")

_log = logging.getLogger(__name__)


class DockerProvider:
    """``host``: where the daemon listens ("" is DOCKER_HOST or the usual socket); ``runtime``: an OCI runtime that it
    knows, such as ``crun`` or ``runsc``; ``cpus``: quota of one sandbox; ``user``: whom commands run as ("" is the
    image's own user); ``network``: a network of the daemon, for tasks that ask for one ("": they don't start). For the
    others see :class:`ImageStore`. One event loop at a time."""

    name = "docker"

    def __init__(
        self,
        *,
        host: str = "",
        runtime: str = "",
        cpus: float = 1.0,
        user: str = "",
        network: str = "",
        pulls_per_minute: float = 60.0,
        image_budget_bytes: int | None = None,
    ) -> None:
        if platform.machine() not in command_server.SYSCALLS:
            raise UsageError(
                f"sandbox 'docker': machine type {platform.machine()!r} is not supported; use x86_64 or aarch64"
            )
        self._daemon = Daemon(host)
        info = self._daemon.check()
        _check_runtime(info, runtime)
        self._runtime = runtime
        self._cpus = cpus
        self._user = user
        self._network = network
        self._machine = str(info.get("Architecture", platform.machine()))
        self._state = state_directory()
        identity = hashlib.sha256(str(info.get("ID", self._daemon.host)).encode()).hexdigest()[:16]
        self._images = ImageStore(
            self._daemon,
            self._state / f"docker-{identity}",
            pulls_per_minute=pulls_per_minute,
            budget_bytes=image_budget_bytes,
            room=room_for_images(info),
        )
        self._host_image = ""  # the name of the image "host", once it is known to be there
        self._pytest: rootfs.Bind | None = None
        self._quota: bool | None = None  # can the daemon limit a writable layer? None: not tried yet
        self._disk = DiskWatch(self._daemon)
        self._swept_at_s = 0.0

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        await self._sweep_now_and_then()
        sandbox = await self._start(spec)
        try:
            yield sandbox
        finally:
            await uncancelled(sandbox.close())

    async def sweep(self, *, now_s: float) -> int:
        """Also those of dead farms, of this daemon."""
        try:
            found = await self._daemon.call(
                "containers", lambda client: client.containers(all=True, filters={"label": DEADLINE_LABEL})
            )
        except DockerError as error:
            _log.warning("not swept: %s", error)
            return 0
        overdue = [row["Id"] for row in found if _deadline(row) <= now_s]
        gone = await asyncio.gather(*(_remove(self._daemon, container) for container in overdue))
        return sum(gone)

    async def check(self, images: Iterable[str]) -> None:
        """Whether a registry has them shows only when they are pulled; that the daemon answers is known by now."""

    async def prepare(self, image: str, *, deadline_at_s: float) -> None:
        """Have ``image`` ready before anybody waits for it. Raises ``SandboxStartError``."""
        if image not in docker_host_image.NAMES:
            await self._images.keep(image, deadline_at_s=deadline_at_s)

    def close(self) -> None:
        """Optional: ends the threads that talk to the daemon."""
        self._daemon.close()

    async def _sweep_now_and_then(self) -> None:
        """Every host has its own daemon, and the farm's own sweep runs on one host only."""
        now_s = time.time()
        if now_s - self._swept_at_s > _SWEEP_S:
            self._swept_at_s = now_s
            await self.sweep(now_s=now_s)

    async def _start(self, spec: SandboxSpec) -> DockerSandbox:
        if spec.machine.network and not self._network:
            raise SandboxStartError(
                "the task asks for a network: name one in docker.network", kind="network", retryable=False
            )
        image, extra = await self._image(spec)
        if not spec.workdir:
            spec = replace(spec, workdir=await self._images.workdir(image))
        name = PREFIX + secrets.token_hex(8)
        try:
            await self._create(name, image, spec, extra)
            link = await DockerLink.over(await self._daemon.attach(name))
            sandbox = DockerSandbox(name, spec, link, self._daemon)
            try:
                await self._daemon.call(f"start {name}", lambda client: client.start(name))
                await sandbox.ready()
            except BaseException:
                await uncancelled(sandbox.close())
                raise
        except DockerError as error:
            self._images.forget(spec.image)
            await uncancelled(_remove(self._daemon, name))
            raise start_error(error) from error
        except BaseException:
            await uncancelled(_remove(self._daemon, name))
            raise
        if not extra and not self._quota:
            sandbox.stop_watching = self._disk.watch(name, spec.disk_bytes, sandbox.over_disk)
        return sandbox

    async def _create(self, name: str, image: str, spec: SandboxSpec, extra: Mapping[str, Any]) -> None:
        """With a limited layer where the daemon can do that; it is asked once."""
        limited = {"storage_opt": {"size": str(spec.disk_bytes)}} if not extra and self._quota is not False else {}
        try:
            await self._try_create(name, image, spec, {**extra, **limited})
        except DockerError as error:
            if not limited or not any(word in str(error).lower() for word in _NO_QUOTA):
                raise
            self._quota = False
            await self._try_create(name, image, spec, extra)
        else:
            self._quota = True if limited else self._quota

    async def _try_create(self, name: str, image: str, spec: SandboxSpec, extra: Mapping[str, Any]) -> None:
        life_s = math.ceil(spec.deadline_at_s - time.time())
        program = command_server.stream_argv(_architecture(self._machine), [], life_s=life_s)
        host = {**extra}
        environment = host.pop("environment", {})

        def create(client: Any) -> None:
            types = package().types
            limits = [
                types.Ulimit(name="nofile", soft=_NOFILE, hard=_NOFILE),
                types.Ulimit(name="core", soft=0, hard=0),
            ]
            client.create_container(
                image,
                entrypoint=program[:1],
                command=program[1:],
                name=name,
                hostname="sandbox",
                user=self._user or None,
                working_dir=spec.workdir,
                stdin_open=True,
                environment=environment,
                labels={OWNER_LABEL: spec.owner, DEADLINE_LABEL: repr(spec.deadline_at_s)},
                healthcheck={"test": ["NONE"]},
                host_config=client.create_host_config(
                    auto_remove=True,
                    network_mode=self._network if spec.machine.network else "none",
                    ipc_mode="private",
                    cap_drop=["ALL"],
                    security_opt=["no-new-privileges"],
                    pids_limit=spec.pids,
                    mem_limit=spec.memory_bytes + (spec.disk_bytes if "tmpfs" in host else 0),
                    memswap_limit=spec.memory_bytes + (spec.disk_bytes if "tmpfs" in host else 0),
                    nano_cpus=int((spec.machine.cpus or self._cpus) * 1e9),
                    shm_size=min(_SHM_BYTES, spec.disk_bytes),
                    ulimits=limits,
                    log_config=types.LogConfig(type="none"),
                    runtime=self._runtime or None,
                    **host,
                ),
            )

        await self._daemon.call(f"create {name} of {image}", create)

    async def _image(self, spec: SandboxSpec) -> tuple[str, dict[str, Any]]:
        """The name that the daemon knows ``spec.image`` by, and what its containers need besides."""
        if spec.image not in docker_host_image.NAMES:
            return await self._images.ensure(spec.image, deadline_at_s=spec.deadline_at_s), {}
        if not self._host_image:
            self._host_image = await self._import_host_image()
        if spec.image == "host-pytest" and self._pytest is None:
            self._pytest = await asyncio.to_thread(rootfs.stage_pytest, self._state)
            if self._pytest is None:
                raise SandboxStartError(f"image {spec.image!r}: pytest is not installed", kind="image", retryable=False)
        pytest = self._pytest if spec.image == "host-pytest" else None
        binds = await asyncio.to_thread(docker_host_image.binds, self._state, pytest)
        return self._host_image, {
            "read_only": True,
            "binds": binds,
            "tmpfs": docker_host_image.scratch(spec.workdir, disk_bytes=spec.disk_bytes),
            "environment": docker_host_image.environment(pytest),
        }

    async def _import_host_image(self) -> str:
        tar = await asyncio.to_thread(docker_host_image.image_tar)
        name = docker_host_image.image_name(tar)
        if not await self._images.has(name):
            repository, _, tag = name.rpartition(":")
            changes = docker_host_image.image_changes()
            try:
                await self._daemon.call(
                    f"import {name}",
                    lambda client: client.import_image_from_data(tar, repository=repository, tag=tag, changes=changes),
                )
            except DockerError as error:
                raise start_error(error) from error
        return name


class DockerSandbox(ServedSandbox):
    """A running container; made by :class:`DockerProvider` only. Its id is the container's name."""

    def __init__(self, name: str, spec: SandboxSpec, link: DockerLink, daemon: Daemon) -> None:
        super().__init__(name, spec, link)
        self._stream = link
        self._daemon = daemon
        self._began_s = time.time()
        self._over: tuple[str, str] | None = None
        self.stop_watching: Callable[[], None] = lambda: None

    async def ready(self) -> None:
        """Wait for the command server. Raises ``SandboxStartError``."""
        try:
            cpu_s = command_server.parse_ready(await self._stream.receive(timeout_s=_START_S))
        except Closed:
            said = self._stream.said.decode(errors="replace").strip()
            message, kind = await self._why_gone()
            raise SandboxStartError(f"{self.id}: {said or message}", kind="server" if said else kind) from None
        except TimeoutError:
            raise SandboxStartError(f"{self.id}: no answer in {_START_S:g} s", kind="timeout") from None
        if cpu_s is None:
            raise SandboxStartError(f"{self.id}: the command server speaks another version", kind="server")
        self._cpu_s = cpu_s

    def over_disk(self, used_bytes: int) -> None:
        """Told by the disk watch, which then ends the container."""
        self._over = f"it wrote {used_bytes} bytes, {self._spec.disk_bytes} are allowed", "disk_limit"

    async def close(self) -> None:
        """End everything and wait until it is gone: by asking, then by force, then it is the sweeper's."""
        self.stop_watching()
        self._lost = self._lost or ("it is closed", "closed")
        self._stream.shut()
        try:
            await _remove(self._daemon, self.id)
        finally:
            await self._stream.close()

    async def _end_by_force(self) -> None:
        await _remove(self._daemon, self.id)

    async def _why_gone(self) -> tuple[str, str]:
        """From the daemon's memory of the last events; it may have forgotten, or be gone itself."""
        if self._over is not None:
            return self._over
        if time.time() >= self._spec.deadline_at_s:
            return "its deadline has passed", "deadline"
        try:
            events = await self._daemon.call(f"events of {self.id}", self._events)
        except DockerError as error:
            return str(error), error.fault.kind
        if any(event.get("Action") == "oom" for event in events):
            return "it ran out of memory as a whole", "oom"
        codes = [event["Actor"]["Attributes"].get("exitCode") for event in events if event.get("Action") == "die"]
        return (f"its container ended with exit code {codes[-1]}" if codes else "its container is gone"), "lost"

    def _events(self, client: Any) -> list[Mapping[str, Any]]:
        since, until = f"{self._began_s:.6f}", f"{time.time() + _EVENTS_S:.6f}"
        return list(client.events(since=since, until=until, filters={"container": self.id}, decode=True))


async def _remove(daemon: Daemon, container: str) -> bool:
    """Kill and remove it; waits until it is gone. False when that could not be done: then it is the sweeper's."""
    until = time.monotonic() + STOP_S
    while True:
        try:
            await daemon.call(
                f"remove {container}", lambda client: client.remove_container(container, v=True, force=True)
            )
        except DockerError as error:
            if error.status == 404:
                return True
            if error.status != 409 or time.monotonic() > until:  # 409: the daemon is at it already
                _log.warning("%s", error)
                return False
            await asyncio.sleep(0.02)
        else:
            return True


def _deadline(row: Mapping[str, Any]) -> float:
    try:
        return float(row["Labels"][DEADLINE_LABEL])
    except (KeyError, TypeError, ValueError):
        return 0.0


def _check_runtime(info: Mapping[str, Any], runtime: str) -> None:
    known = sorted(info.get("Runtimes") or {})
    if runtime and runtime not in known:
        raise UsageError(f"docker.runtime {runtime!r}: the daemon does not know it; it has {', '.join(known)}")


def _architecture(name: str) -> str:
    """As ``platform.machine()`` would say it inside."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)
