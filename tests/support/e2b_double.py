"""A local server that speaks E2B's protocol (control plane and envd) over bubblewrap sandboxes, with planned faults.

It runs on a thread with an event loop of its own, so that the real SDK talks to it as to a stranger. What it can't
show: the service's own scheduling, its network, and what envd does that was never recorded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import secrets
import struct
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from farm.errors import SandboxLostError
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox.bubblewrap import BubblewrapProvider

KEY = "e2b_" + "0" * 40
TEMPLATES = {"base": "host", "with-pytest": "host-pytest"}
LONGEST_S = 3_600
MIDWAY = web.RequestKey("midway", bool)  # is the answer's stream to be cut?


@dataclass(slots=True, kw_only=True)
class Fault:
    """Done to the next ``times`` requests that match ``where`` (a pattern of "METHOD /path")."""

    where: str
    times: int = 1
    status: int = 0  # 0: the connection is cut
    message: str = "planned"
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False  # the request is carried out first, only its answer is lost
    midway: bool = False  # of a stream: cut after its first event


@dataclass(slots=True, kw_only=True)
class Box:
    id: str
    template: str
    metadata: dict[str, str]
    sandbox: Sandbox
    stack: contextlib.AsyncExitStack
    started_at_s: float
    end_at_s: float
    jobs: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # it is never ended while somebody talks to it

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Sandbox]:
        async with self.lock:
            if self.end_at_s <= time.time():
                raise SandboxLostError("the sandbox was not found")
            yield self.sandbox


class E2BDouble:
    """``with E2BDouble().running() as double``. ``created``: metadata of every sandbox ever made; ``requests``: what
    was asked, as "METHOD /path"; ``longest_stream_s``: how long a stream was ever held."""

    def __init__(self, *, concurrent: int = 100) -> None:
        self.url = ""
        self.created: list[dict[str, str]] = []
        self.created_at_s: list[float] = []
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.built: dict[str, str] = dict(TEMPLATES)
        self.longest_stream_s = 0.0
        self.most_at_once = 0
        self.templates_at_once = 0  # the most that were asked for at a time
        self._looks = 0
        self._concurrent = concurrent
        self._boxes: dict[str, Box] = {}
        self._by_key: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def running_now(self) -> list[str]:
        return sorted(box.id for box in self._boxes.values() if box.end_at_s > time.time())

    def metadata(self, sandbox_id: str) -> dict[str, str]:
        return self._boxes[sandbox_id].metadata

    def end(self, sandbox_id: str) -> None:
        """The sandbox dies early."""
        asyncio.run_coroutine_threadsafe(self._end(sandbox_id), self._loop).result(timeout=20)

    @contextlib.contextmanager
    def running(self) -> Iterator[E2BDouble]:
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="e2b-double")
        thread.start()
        try:
            if not ready.wait(20):
                raise RuntimeError("the double did not start")
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(30)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._provider = BubblewrapProvider()
        app = web.Application(client_max_size=64 << 20, middlewares=[self._planned])
        app.router.add_post("/v2/sandboxes", self._create)
        app.router.add_get("/v2/sandboxes", self._list)
        app.router.add_get("/sandboxes/{id}", self._info)
        app.router.add_delete("/sandboxes/{id}", self._delete)
        app.router.add_get("/templates/aliases/{alias}", self._alias)
        app.router.add_get("/health", self._health)
        app.router.add_post("/process.Process/Start", self._start)
        app.router.add_get("/files", self._read)
        app.router.add_post("/files", self._write)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._stop.wait()
        await runner.cleanup()
        for sandbox_id in list(self._boxes):
            await self._end(sandbox_id)
        self._provider.close()

    # ---------------------------------------------------------------------------------------- faults

    @web.middleware
    async def _planned(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = f"{request.method} {request.path}"
        self.requests.append(name)
        fault = self._fault(name)
        if request.path.startswith(("/v2/", "/sandboxes", "/templates")) and request.headers.get("X-API-KEY") != KEY:
            return _error(401, "The API key is not valid")
        if fault is None or fault.midway:
            request[MIDWAY] = fault is not None
            answer: web.StreamResponse = await handler(request)
            return answer
        if fault.after:
            await handler(request)
        if fault.status:
            return _error(fault.status, fault.message, fault.headers)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _fault(self, name: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, name):
                    fault.times -= 1
                    return fault
        return None

    # ---------------------------------------------------------------------------------- control plane

    async def _create(self, request: web.Request) -> web.Response:
        given = await request.json()
        key = request.headers.get("Idempotency-Key", "")
        if key in self._by_key and self._by_key[key] in self._boxes:
            return web.json_response(_made(self._boxes[self._by_key[key]]), status=201)
        template = given["templateID"]
        life_s = given.get("timeout", 300)
        if template not in self.built:
            return _error(404, f"template '{template}' not found")
        if life_s > LONGEST_S:
            return _error(400, "Timeout cannot be greater than 1 hours")
        if len(self.running_now) >= self._concurrent:
            return _error(429, f"you have reached the maximum number of concurrent sandboxes ({self._concurrent})")
        now_s = time.time()
        stack = contextlib.AsyncExitStack()
        spec = SandboxSpec(
            owner="e2b-double",
            deadline_at_s=now_s + life_s,
            image=self.built[template],
            disk_bytes=64 << 20,
            pids=512,
            output_bytes=16 << 20,
        )
        sandbox = await stack.enter_async_context(self._provider.open(spec))
        box = Box(
            id=f"i{secrets.token_hex(9)}",
            template=template,
            metadata=given.get("metadata") or {},
            sandbox=sandbox,
            stack=stack,
            started_at_s=now_s,
            end_at_s=now_s + life_s,
        )
        self._boxes[box.id] = box
        if key:
            self._by_key[key] = box.id
        self.created.append(box.metadata)
        self.created_at_s.append(now_s)
        self.most_at_once = max(self.most_at_once, len(self.running_now))
        return web.json_response(_made(box), status=201)

    async def _list(self, request: web.Request) -> web.Response:
        pairs = urllib.parse.parse_qsl(request.query.get("metadata", ""))  # the SDK quotes them once more
        wanted = {urllib.parse.unquote(name): urllib.parse.unquote(value) for name, value in pairs}
        found = [
            _info(box)
            for box in self._boxes.values()
            if box.end_at_s > time.time() and wanted.items() <= box.metadata.items()
        ]
        limit, start = int(request.query.get("limit", "100")), int(request.query.get("nextToken") or 0)
        more = {"x-next-token": str(start + limit)} if len(found) > start + limit else {}
        return web.json_response(found[start : start + limit], headers=more)

    async def _info(self, request: web.Request) -> web.Response:
        box = self._boxes.get(request.match_info["id"])
        return _error(404, "sandbox not found") if box is None else web.json_response(_info(box))

    async def _delete(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self._boxes:
            return _error(404, "sandbox not found")
        await self._end(request.match_info["id"])
        return web.Response(status=204)

    async def _alias(self, request: web.Request) -> web.Response:
        alias = request.match_info["alias"]
        self._looks += 1
        self.templates_at_once = max(self.templates_at_once, self._looks)
        await asyncio.sleep(0.02)  # so that those that are asked for together are seen together
        self._looks -= 1
        if alias not in self.built:
            return _error(404, f"template '{alias}' not found")
        return web.json_response({"templateID": alias, "public": False})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=204 if self._box(request) else 502)

    async def _end(self, sandbox_id: str) -> None:
        box = self._boxes.pop(sandbox_id, None)
        if box is not None:
            box.end_at_s = 0.0
            async with box.lock:
                await box.stack.aclose()

    # ------------------------------------------------------------------------------------------- envd

    def _box(self, request: web.Request) -> Box | None:
        box = self._boxes.get(request.headers.get("E2b-Sandbox-Id", ""))
        return box if box is not None and box.end_at_s > time.time() else None

    async def _start(self, request: web.Request) -> web.StreamResponse:
        box = self._box(request)
        if box is None:
            return _gone()
        body = await request.read()
        given = json.loads(body[5 : 5 + struct.unpack(">I", body[1:5])[0]])["process"]
        began = time.monotonic()
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        box.jobs += 1
        number = box.jobs
        try:
            await self._launch(box, number, given)
            await response.write(_event({"start": {"pid": 1000 + number}}))
            if request[MIDWAY] and request.transport is not None:
                request.transport.abort()
                return response
            code = await self._wait(box, number)
            for stream in ("stdout", "stderr"):
                async with box.use() as sandbox:
                    data = await sandbox.read_file(f"/tmp/.envd/{number}.{stream}", max_bytes=32 << 20)
                for at in range(0, len(data), 1 << 15):
                    piece = base64.b64encode(data[at : at + (1 << 15)]).decode()
                    await response.write(_event({"data": {stream: piece}}))
            end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
            await response.write(_event({"end": end}))
            await response.write(_envelope(2, {}))
        except SandboxLostError:
            error = {"code": "unavailable", "message": "the sandbox was not found"}
            await response.write(_envelope(2, {"error": error}))
        except ConnectionError:
            pass  # the client has gone; the process goes on, as with envd
        finally:
            self.longest_stream_s = max(self.longest_stream_s, time.monotonic() - began)
        return response

    async def _launch(self, box: Box, number: int, given: dict[str, Any]) -> None:
        inner = (
            f'"$@" > /tmp/.envd/{number}.stdout 2> /tmp/.envd/{number}.stderr < /dev/null; '
            f"echo $? > /tmp/.envd/{number}.new; mv /tmp/.envd/{number}.new /tmp/.envd/{number}.rc"
        )
        args = {f"FARM_{n}": text for n, text in enumerate(given["args"])}
        words = " ".join(f'"$FARM_{n}"' for n in range(len(args)))
        # Its own variables are gone before the command starts: its environment is the caller's.
        unset = " ".join(f"-u FARM_{n}" for n in range(len(args)))
        start = (
            f"mkdir -p /tmp/.envd; env {unset} setsid bash -c '{inner}' sh {given['cmd']} {words} "
            "> /dev/null 2>&1 < /dev/null &"
        )
        env = {**given.get("envs", {}), **args}
        async with box.use() as sandbox:
            await sandbox.exec(start, timeout_s=20, cwd=given.get("cwd") or "/", env=env)

    async def _wait(self, box: Box, number: int) -> int:
        while True:
            with contextlib.suppress(FileNotFoundError):
                async with box.use() as sandbox:
                    return int(await sandbox.read_file(f"/tmp/.envd/{number}.rc"))
            await asyncio.sleep(0.005)

    async def _read(self, request: web.Request) -> web.StreamResponse:
        box = self._box(request)
        if box is None:
            return _gone()
        try:
            async with box.use() as sandbox:
                return web.Response(body=await sandbox.read_file(request.query["path"], max_bytes=32 << 20))
        except FileNotFoundError:
            return _error(404, "file not found")
        except SandboxLostError:
            return _gone()

    async def _write(self, request: web.Request) -> web.StreamResponse:
        box = self._box(request)
        if box is None:
            return _gone()
        files: dict[str, bytes] = {}
        if request.content_type == "multipart/form-data":
            async for part in await request.multipart():
                named = re.search(r'filename="([^"]*)"', part.headers["Content-Disposition"])  # a path, kept whole
                path = request.query.get("path") or (named[1] if named else "")
                files[path] = bytes(await part.read())
        else:
            files[request.query["path"]] = await request.read()
        try:
            async with box.use() as sandbox:
                await sandbox.write_files(files)
        except SandboxLostError:
            return _gone()
        except OSError as error:
            full = "No space left" in str(error)
            return _error(507 if full else 400, "not enough disk space" if full else str(error))
        return web.json_response([{"name": path.rpartition("/")[2], "type": "file", "path": path} for path in files])


def _made(box: Box) -> dict[str, Any]:
    return {
        "templateID": box.template,
        "sandboxID": box.id,
        "clientID": "6532622b",
        "envdVersion": "0.6.4",
        "envdAccessToken": "token",
        "domain": None,
    }


def _info(box: Box) -> dict[str, Any]:
    return {
        "templateID": box.template,
        "sandboxID": box.id,
        "clientID": "6532622b",
        "startedAt": datetime.fromtimestamp(box.started_at_s, UTC).isoformat().replace("+00:00", "Z"),
        "endAt": datetime.fromtimestamp(box.end_at_s, UTC).isoformat().replace("+00:00", "Z"),
        "envdVersion": "0.6.4",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "state": "running",
        "metadata": box.metadata,
    }


def _envelope(flag: int, value: dict[str, Any]) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack(">BI", flag, len(data)) + data


def _event(event: dict[str, Any]) -> bytes:
    return _envelope(0, {"event": event})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status, headers=headers)


def _gone() -> web.Response:
    return _error(502, "The sandbox was not found")
