"""The Docker SDK off the event loop: bounded threads, every call bounded in time, every error one kind of exception.

The only file that uses the ``docker`` package, which is optional.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from farm.errors import UsageError
from farm.sandbox import docker_faults
from farm.sandbox.docker_faults import Fault
from farm.sandbox.optional import sdk
from farm.sandbox.served import uncancelled

DEFAULT_HOST = "unix:///var/run/docker.sock"
_THREADS = 8  # more at once do not start more containers per second, they only wait in the daemon
_PULL_THREADS = 2
_CONNECT_S = 5.0
_CALL_S = 90.0  # one answer of a daemon under load
_QUIET_S = 300.0  # between two words of a pull: unpacking a layer of gigabytes is silent
_BUILD_LINES = 20
_OLDEST_API = (1, 41)  # Docker 20.10

T = TypeVar("T")


class DockerError(Exception):
    """A call that failed. ``fault`` is what that means."""

    def __init__(self, what: str, message: str, fault: Fault, *, status: int = 0) -> None:
        super().__init__(f"{what}: {message.strip()}; {fault.advice}")
        self.fault = fault
        self.status = status


def package() -> Any:
    """The Docker SDK. Raises ``UsageError`` when it isn't there, or too old."""
    return sdk("docker", oldest=(7, 1), below=8)


class Daemon:
    """One daemon. Made and used from one event loop at a time; :meth:`close` is optional."""

    def __init__(self, host: str = "") -> None:
        """``host``: unix:///path or tcp://host:port; "" is DOCKER_HOST, or the usual socket. Asks nothing yet."""
        self.host = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        if not self.host.startswith(("unix://", "tcp://")):
            raise UsageError(
                f"docker.host {self.host!r}: must be unix:///PATH or tcp://HOST:PORT; reach other daemons by "
                "forwarding their socket (ssh -L /tmp/docker.sock:/var/run/docker.sock HOST)"
            )
        self._docker = package()
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="docker")
        self._pullers = ThreadPoolExecutor(_PULL_THREADS, thread_name_prefix="docker-pull")
        self._clients: list[Any] = []
        self._lock = threading.Lock()

    def check(self) -> Mapping[str, Any]:
        """What the daemon says about itself. Blocks for seconds at most. Raises ``UsageError``."""
        try:
            self._knock()
            client = self._docker.APIClient(base_url=self.host, version="auto", timeout=_CONNECT_S)
            try:
                info: Mapping[str, Any] = client.info()
                version = tuple(int(part) for part in str(client.version()["ApiVersion"]).split("."))
            finally:
                client.close()
        except (self._docker.errors.DockerException, OSError) as error:
            raise UsageError(
                f"sandbox 'docker': no daemon answers at {self.host} ({_reason(error)}); start it, or set docker.host "
                "(or DOCKER_HOST) to where it listens"
            ) from None
        if version < _OLDEST_API:
            raise UsageError(
                f"sandbox 'docker': the daemon at {self.host} speaks API {'.'.join(map(str, version))}; "
                "Docker 20.10 (API 1.41) or newer is needed, upgrade it"
            )
        if info.get("OSType") != "linux":
            raise UsageError(f"sandbox 'docker': the daemon at {self.host} runs {info.get('OSType')}; Linux is needed")
        return info

    async def call(self, what: str, work: Callable[[Any], T]) -> T:
        """``work`` with an ``APIClient`` in one of the threads. When cancelled, it is waited for: nobody else would
        clean up what it makes. Raises ``DockerError``; ``what`` begins its message."""
        loop = asyncio.get_running_loop()

        async def run() -> T:
            return await loop.run_in_executor(self._threads, self._translated, what, work, _CALL_S)

        return await uncancelled(run())

    async def pull(self, image: str, *, timeout_s: float) -> None:
        """Bounded by ``timeout_s``; when cancelled, the pull ends at the daemon's next word. Raises ``DockerError``."""
        given_up = threading.Event()

        def work(client: Any) -> None:
            name, _, tag = image.rpartition(":")
            if not name or "/" in tag:
                name, tag = image, "latest"
            for word in client.pull(name, tag=tag, stream=True, decode=True):
                if given_up.is_set():
                    return
                if "error" in word:
                    message = str(word["error"])
                    raise DockerError(f"pull {image}", message, docker_faults.meaning(0, message))

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.run_in_executor(self._pullers, self._translated, f"pull {image}", work, _QUIET_S)
        except TimeoutError:
            raise DockerError(f"pull {image}", f"not done in {timeout_s:g} s", docker_faults.SLOW) from None
        finally:
            given_up.set()

    async def build(self, folder: str, image: str, *, timeout_s: float) -> None:
        """An image from the Dockerfile in ``folder``, bounded by ``timeout_s``; when cancelled, the build ends at the
        daemon's next word. Raises ``DockerError`` (kind ``build`` where the Dockerfile is to blame)."""
        given_up = threading.Event()

        def work(client: Any) -> None:
            said: deque[str] = deque(maxlen=_BUILD_LINES)
            for word in client.build(path=folder, tag=image, rm=True, forcerm=True, decode=True):
                if given_up.is_set():
                    return
                said.append(str(word.get("stream", "")).strip())
                if "error" in word:
                    told = f"{word['error']}: {' | '.join(line for line in said if line)}"
                    fault = docker_faults.meaning(0, told)
                    raise DockerError(
                        f"build of {folder}",
                        told[-1500:],
                        docker_faults.BUILD if fault is docker_faults.DAEMON else fault,
                    )

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.run_in_executor(self._pullers, self._translated, f"build of {folder}", work, _QUIET_S)
        except TimeoutError:
            raise DockerError(f"build of {folder}", f"not done in {timeout_s:g} s", docker_faults.SLOW) from None
        finally:
            given_up.set()

    async def attach(self, container: str) -> socket.socket:
        """The container's three streams as one connected socket; before its start, so that nothing is missed."""
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        made: list[socket.socket] = []

        def work(client: Any) -> socket.socket:
            stream = client.attach_socket(container, params)
            try:
                made.append(socket.socket(fileno=os.dup(stream.fileno())))
            finally:
                getattr(stream, "_response", stream).close()
            made[0].setblocking(False)
            return made[0]

        try:
            return await self.call(f"attach {container}", work)
        except BaseException:  # cancelled: it was made, and nobody takes it
            for connection in made:
                connection.close()
            raise

    def close(self) -> None:
        """End the threads, once their calls are done, and close the connections."""
        self._threads.shutdown(wait=True)
        self._pullers.shutdown(wait=True)
        with self._lock:
            for client in self._clients:
                client.close()
            self._clients.clear()

    def _translated(self, what: str, work: Callable[[Any], T], timeout_s: float) -> T:
        """Run ``work`` in this thread with this thread's own client."""
        import requests

        errors = self._docker.errors
        try:
            return work(self._client(timeout_s))
        except errors.APIError as error:
            status = int(error.status_code or 0)
            message = str(error.explanation or error)
            raise DockerError(what, message, docker_faults.meaning(status, message), status=status) from error
        except (requests.exceptions.Timeout, TimeoutError) as error:
            raise DockerError(what, f"no answer in {timeout_s:g} s", docker_faults.SLOW) from error
        except (errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise DockerError(what, f"no daemon at {self.host} ({_reason(error)})", docker_faults.GONE) from error

    def _knock(self) -> None:
        """Raises ``OSError`` when nobody listens. The SDK would leave the socket of such a try open."""
        if self.host.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_S)
                probe.connect(self.host.removeprefix("unix://"))

    def _client(self, timeout_s: float) -> Any:
        self._knock()
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._docker.APIClient(base_url=self.host, version="auto", timeout=timeout_s)
            self._local.client = client
            with self._lock:
                self._clients.append(client)
        return client


def _reason(error: BaseException) -> str:
    """The innermost words of an error of many layers."""
    for inner in _chain(error):
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
    return str(error)[:200]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [part for part in (*one.args, one.__cause__, one.__context__) if isinstance(part, BaseException)]
