"""Client of SGLang's native HTTP API (0.5.23), used for real servers and for the embedded one alike.

Every call is bounded and raises :class:`~farm.errors.EngineError` with one of these kinds: ``unreachable``,
``timeout``, ``queue_full``, ``out_of_memory``, ``status_NNN``, ``malformed``, ``unverified_weights``, ``bad_ids``.

A pause is a *retract* pause: running requests keep their tokens and go on after it, but their KV is computed anew. It
is the one mode in which SGLang flushes its whole prefix cache on a weight update; with ``in_place`` it refuses to, and
later turns would build on KV of the old policy.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping
from typing import Any

import aiohttp

from farm.errors import EngineError
from farm.protocols import EngineInfo, EngineLoad, GenerateRequest, Generation
from farm.types import VersionSpan, version_name, version_step

_CONTROL_S = 30.0
_INFO_S = 10.0
_ABORT_S = 2.0
_CONNECT_S = 5.0
_CONNECTIONS = 1024
# Below the 5 s after which SGLang's HTTP server closes an idle connection: a POST on a closing one would fail.
_KEEP_ALIVE_S = 3.0
_HEADERS = {"Content-Type": "application/json"}


class SGLangEngine:
    """One engine by its base URL. Usable from several event loops; :meth:`close` closes the calling loop's connections.

    ``load_s`` bounds a weight update, ``health_s`` a health check (SGLang's takes a second by itself).
    """

    def __init__(self, url: str, *, load_s: float = 300.0, health_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._load_s = load_s
        self._health_s = health_s
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]
        self._sessions = weakref.WeakKeyDictionary()
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self._url

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation:
        """Sample. When cancelled or out of time, the request is aborted on the engine (best effort, not awaited)."""
        if min(request.input_ids, default=0) < 0:
            raise EngineError(f"{request.rid}: negative token ids, which kill an SGLang server", kind="bad_ids")
        sampling = request.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        rid = _wire_rid(request.rid)
        body = {
            "rid": rid,
            "input_ids": list(request.input_ids),
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }
        try:
            raw = await self._call("POST", "/generate", body, timeout_s=timeout_s)
        except asyncio.CancelledError:
            self._abort_later(rid)
            raise
        except EngineError as error:
            if error.kind == "timeout":
                self._abort_later(rid)
            raise
        return _generation(_object(raw, "/generate"))

    async def abort(self, rid: str | None = None) -> None:
        body = {"abort_all": True} if rid is None else {"rid": _wire_rid(rid)}
        await self._call("POST", "/abort_request", body, timeout_s=_CONTROL_S)

    async def pause(self) -> None:
        await self._call("POST", "/pause_generation", {"mode": "retract"}, timeout_s=_CONTROL_S)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {}, timeout_s=_CONTROL_S)

    async def load_weights(self, path: str, *, step: int) -> None:
        body = {"model_path": path, "weight_version": version_name(step), "flush_cache": True}
        answer = _object(await self._call("POST", "/update_weights_from_disk", body, timeout_s=self._load_s), "update")
        if answer.get("success") is not True:
            raise EngineError(f"{self._url}: weights not loaded: {answer.get('message')}", kind="malformed")

    async def info(self) -> EngineInfo:
        model = _object(await self._call("GET", "/model_info", None, timeout_s=_INFO_S), "/model_info")
        server = _object(await self._call("GET", "/server_info", None, timeout_s=_INFO_S), "/server_info")
        try:
            budget = int(server["max_total_num_tokens"])
            # Unset launch options are null in SGLang: fall back to what the scheduler made of them.
            context = server.get("context_length") or int(server["max_req_input_len"]) + 1
            running = server.get("max_running_requests")
            if running is None:
                running = server["internal_states"][0]["effective_max_running_requests_per_dp"]
            return EngineInfo(
                model_path=str(model["model_path"]),
                version=str(model["weight_version"]),
                max_total_tokens=budget,
                context_length=int(context),
                max_running_requests=int(running),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{self._url}: server_info lacks {error}", kind="malformed") from error

    async def load(self) -> EngineLoad:
        loads = _object(await self._call("GET", "/v1/loads", None, timeout_s=_INFO_S), "/v1/loads")
        try:
            counters = _samples(await self._call("GET", "/metrics", None, timeout_s=_INFO_S))
        except EngineError as error:
            if error.kind != "status_404":  # a server started without --enable-metrics: its totals stay 0
                raise
            counters = {}
        try:
            first = loads["loads"][0]
            return EngineLoad(
                running=int(first["num_running_reqs"]),
                queued=int(first["num_waiting_reqs"]),
                used_tokens=int(first["num_used_tokens"]),
                max_total_tokens=int(first["max_total_num_tokens"]),
                retracted_total=int(counters.get("sglang:num_retracted_requests_total", 0)),
                generated_tokens_total=int(counters.get("sglang:generation_tokens_total", 0)),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{self._url}: /v1/loads lacks {error}", kind="malformed") from error

    async def healthy(self) -> bool:
        """Whether the engine generates. False while it is paused, unreachable or broken; never raises EngineError."""
        try:
            await self._call("GET", "/health", None, timeout_s=self._health_s)
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Let pending aborts end (bounded) and close this loop's connections."""
        mine = [task for task in self._aborting if task.get_loop() is asyncio.get_running_loop()]
        if mine:
            await asyncio.wait(mine, timeout=_ABORT_S)
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    # ------------------------------------------------------------------------------------- transport

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            self._sessions[loop] = session
        return session

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        where = self._url + path
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    status, raw = await self._send(method, where, data)
                except aiohttp.ClientOSError as error:
                    if not isinstance(error.__cause__, aiohttp.ClientConnectionResetError):
                        raise
                    # The server was closing that idle connection, and nothing was sent on it: another one will do.
                    status, raw = await self._send(method, where, data)
        except TimeoutError as error:
            raise EngineError(f"{where}: no answer within {timeout_s:g} s", kind="timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{where}: {type(error).__name__}: {error}", kind="unreachable") from error
        if status != 200:
            message = _message(raw)
            raise EngineError(f"{where}: {status}: {message}", kind=_kind(status, message))
        return raw

    async def _send(self, method: str, where: str, data: bytes | None) -> tuple[int, bytes]:
        async with self._session().request(method, where, data=data, headers=_HEADERS) as response:
            return response.status, await response.read()

    def _abort_later(self, rid: str) -> None:
        task = asyncio.get_running_loop().create_task(self._abort_quietly(rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self._call("POST", "/abort_request", {"rid": rid}, timeout_s=_ABORT_S)
        except EngineError:
            return  # the engine is gone, and the request with it


def _wire_rid(rid: str) -> str:
    """SGLang aborts every request whose rid *begins* with the given one; the closing dot keeps ``e-1`` from
    ``e-10``."""
    return rid + "."


def _kind(status: int, message: str) -> str:
    if status == 503 and "queue is full" in message:
        return "queue_full"
    if status == 500 and "ut of memory" in message:
        return "out_of_memory"
    return f"status_{status}"


def _message(raw: bytes) -> str:
    """The human part of an error body, whatever its shape."""
    text = raw[:2000].decode(errors="replace")
    try:
        value = json.loads(raw)
    except ValueError:
        return text
    if isinstance(value, dict):
        error = value.get("error", value)
        if isinstance(error, dict):
            error = error.get("message", error.get("detail", text))
        return str(error)
    return text


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise EngineError(f"{what}: the answer is not JSON: {error}", kind="malformed") from error
    if not isinstance(value, dict):
        raise EngineError(f"{what}: the answer is not an object", kind="malformed")
    return value


def _generation(answer: Mapping[str, Any]) -> Generation:
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        # A request aborted before it ran has no log-probs and no tokens.
        pairs = meta.get("output_token_logprobs") or []
        ids = tuple([pair[1] for pair in pairs])
        if list(ids) != list(answer["output_ids"]):
            raise EngineError("output_ids and output_token_logprobs differ", kind="malformed")
        return Generation(
            output_ids=ids,
            logprobs=tuple([pair[0] for pair in pairs]),
            spans=_spans(meta, len(ids)),
            finish_reason=finish,
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
            retractions=meta.get("num_retractions", 0),
            queue_s=meta.get("queue_time") or 0.0,
            e2e_s=meta.get("e2e_latency") or 0.0,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"/generate answered without {error}", kind="malformed") from error


def _spans(meta: Mapping[str, Any], tokens: int) -> tuple[VersionSpan, ...]:
    """Version spans that cover [0, tokens). Raises EngineError ``unverified_weights`` for a name that is not a step."""
    if tokens == 0:
        return ()
    named = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    spans = []
    reached = 0
    for span in named:
        step = version_step(span["version"])
        if step is None:
            raise EngineError(f"tokens were sampled under weights named {span['version']!r}", kind="unverified_weights")
        if span["start"] != reached or span["end"] <= reached:
            raise EngineError(f"weight_versions {named} do not follow on", kind="malformed")
        reached = span["end"]
        spans.append(VersionSpan(step=step, start=span["start"], end=reached))
    if reached != tokens:
        raise EngineError(f"weight_versions {named} do not cover {tokens} tokens", kind="malformed")
    return tuple(spans)


def _samples(raw: bytes) -> dict[str, float]:
    """Prometheus text -> sum over labels by sample name, for SGLang's totals."""
    found: dict[str, float] = {}
    for line in raw.decode(errors="replace").splitlines():
        if line.startswith("sglang:") and "_total" in line:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
    return found
