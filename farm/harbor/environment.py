"""The farm's sandboxes as a Harbor environment: ``import_path = "farm.harbor.environment:FarmEnvironment"``.

Needs the package ``harbor``, which needs Python 3.12. Keyword arguments (``--ek NAME=VALUE``): ``sandbox`` is the
farm's provider (default ``docker``), ``sandbox_options`` are its own, ``image`` goes before what the task says,
``life_s`` is when a sandbox ends in any case.

A task that the farm wrote says which of the farm's own images does in place of its Dockerfile; then its repository is
put there, so that it runs on ``bubblewrap`` with no Docker at all. Commands run as the image's own user: what Harbor
asks to run as root runs as that one, too, and another user is refused.
"""

from __future__ import annotations

import contextlib
import shlex
import stat
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition, should_use_prebuilt_docker_image

from farm.harbor.folder import REPOSITORY, dockerfile_workdir, files_below, own_facts
from farm.protocols import Sandbox, SandboxProvider, SandboxSpec
from farm.sandbox import make_provider
from farm.sandbox.build_context import BuildContext, digest_of
from farm.suites.repo import make_repo
from farm.types import Machine

_LIFE_S = 24 * 3_600.0
_MEMORY_BYTES = 2 << 30
_DISK_BYTES = 4 << 30
_PIDS = 1_024
_OUTPUT_BYTES = 8 << 20
_MOST_FILE_BYTES = 1 << 30
_OWN_USER = (None, "root", 0, "0")
# Every file below a folder, each name followed by a zero byte; links are not followed.
_LIST = """\
shopt -s globstar dotglob nullglob
cd {folder} || exit
for path in **; do
  if [ -f "$path" ] && [ ! -L "$path" ]; then printf '%s\\0' "$path"; fi
done
"""


class FarmEnvironment(BaseEnvironment):
    """One sandbox of the farm."""

    def __init__(
        self,
        *args: Any,
        sandbox: str = "docker",
        sandbox_options: Mapping[str, Any] | None = None,
        image: str = "",
        life_s: float = _LIFE_S,
        **kwargs: Any,
    ) -> None:
        self._provider_name = sandbox
        self._provider_options = dict(sandbox_options or {})
        self._image = image
        self._life_s = float(life_s)
        self._open = contextlib.AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._workdir = ""
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "rollout-farm"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        """Before anything starts. Raises FileNotFoundError, ValueError."""
        if not self._image and not self._own_image():
            require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)
        network = {"docker": self._provider_options.get("network"), "e2b": self._provider_options.get("internet")}
        if self._network_is_public and not network.get(self._provider_name):
            raise ValueError(
                f"the task wants a public network (Harbor's default), the farm's sandboxes ({self._provider_name}) "
                'have none: write environment.network_mode = "no-network" in its task.toml, or give sandbox_options, '
                'for docker {"network": "bridge"}'
            )

    async def start(self, force_build: bool) -> None:
        """Raises ``farm.errors.SandboxStartError``."""
        provider = make_provider(self._provider_name, **self._provider_options)
        self._open.callback(getattr(provider, "close", lambda: None))
        try:
            self._sandbox = await self._start(provider, force_build)
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._put_repository(self._sandbox)
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self._open.aclose()
            raise

    async def _start(self, provider: SandboxProvider, force_build: bool) -> Sandbox:
        config = self.task_env_config
        dockerfile = self.environment_dir / "Dockerfile"
        text = dockerfile.read_text(errors="replace") if dockerfile.is_file() else ""
        self._workdir = config.workdir or dockerfile_workdir(text)
        spec = SandboxSpec(
            owner=self.session_id,
            deadline_at_s=time.time() + self._life_s,
            image=self._image or self._own_image() or self._task_image(force_build),
            memory_bytes=_bytes(self._effective_memory_mb, _MEMORY_BYTES),
            disk_bytes=_bytes(self._effective_storage_mb, _DISK_BYTES),
            pids=_PIDS,
            output_bytes=_OUTPUT_BYTES,
            workdir=self._workdir or ("" if self._provider_name == "docker" else "/"),
            machine=Machine(cpus=self._effective_cpus, network=self._network_is_public),
        )
        return await self._open.enter_async_context(provider.open(spec))

    async def stop(self, delete: bool) -> None:
        """A sandbox is never kept, whatever ``delete`` says."""
        self._sandbox = None
        await self._open.aclose()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """``stdout`` has stderr in it, in order. Raises RuntimeError past ``timeout_sec``, as Harbor's own do, when all
        that the command started is dead and the sandbox goes on."""
        wanted = self._resolve_user(user)
        if wanted not in _OWN_USER:
            raise RuntimeError(f"the farm's sandboxes run commands as the image's own user, not as {wanted!r}")
        timeout_s = float(timeout_sec) if timeout_sec else self._life_s
        result = await self._running().exec(command, timeout_s=timeout_s, cwd=cwd, env=self._merge_env(env) or {})
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_s:g} seconds")
        emit = self._output_callback()
        if emit is not None and result.output:
            await emit(result.output, "stdout")
        return ExecResult(stdout=result.output, stderr="", return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._upload({str(target_path): Path(source_path)})

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        root, target = Path(source_dir), PurePosixPath(target_dir)
        files = {str(target / path.relative_to(root).as_posix()): path for path in root.rglob("*") if path.is_file()}
        folders = [target, *(target / path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_dir())]
        await self._must(f"mkdir -p {shlex.join(map(str, folders))}")
        await self._upload(files)

    async def _upload(self, files: Mapping[str, Path]) -> None:
        """Contents and the permission to execute; a link comes as the file that it leads to."""
        await self._running().write_files({target: source.read_bytes() for target, source in files.items()})
        programs = [target for target, source in files.items() if source.stat().st_mode & stat.S_IXUSR]
        if programs:
            await self._must(f"chmod +x {shlex.join(programs)}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await self._running().read_file(str(source_path), max_bytes=_MOST_FILE_BYTES)
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Its regular files."""
        listed = await self._must(_LIST.format(folder=shlex.quote(str(source_dir))))
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)
        for name in filter(None, listed.split("\0")):
            await self.download_file(f"{str(source_dir).rstrip('/')}/{name}", target / name)

    # ----------------------------------------------------------------------------------------------- parts

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("the environment is not started")
        return self._sandbox

    async def _must(self, command: str) -> str:
        result = await self._running().exec(command, timeout_s=60.0, cwd="/")
        if result.exit_code != 0 or result.truncated:
            raise RuntimeError(f"{command[:200]}: exit code {result.exit_code}: {result.output[-500:]}")
        return result.output

    def _task_image(self, force_build: bool) -> str:
        named = self.task_env_config.docker_image
        if should_use_prebuilt_docker_image(self.environment_dir, docker_image=named, force_build=force_build):
            return str(named)
        return BuildContext(folder=self.environment_dir, digest=digest_of(self.environment_dir)).reference

    def _own_image(self) -> str:
        return str(self._own().get("image", ""))

    def _own(self) -> Mapping[str, Any]:
        """What the farm wrote about the task, whose folder is where Harbor has it."""
        return own_facts(self.environment_dir.parent)

    async def _put_repository(self, sandbox: Sandbox) -> None:
        """Into an image that is not built from the task's Dockerfile."""
        if self._own().get("repository") and (self._image or self._own_image()):
            _, files = make_repo(files_below(self.environment_dir.parent / REPOSITORY))
            await sandbox.write_files({f"{self._workdir}/{name}": data for name, data in files.items()})


def _bytes(megabytes: int | None, default: int) -> int:
    return default if megabytes is None else megabytes << 20
