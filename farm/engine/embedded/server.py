"""The HTTP side and the loop that drives the model, in one thread.

On a core of its own, a second thread would only fight for the interpreter lock: every tensor operation gives it up and
has to win it back. So a model step is a callback of the event loop, and between two steps the loop gets a few turns in
which requests that have come in are read and answers that are ready are written.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from farm.engine.embedded import wire
from farm.engine.embedded.config import ModelConfig, ModelFolderError, read_config
from farm.engine.embedded.metrics import Metrics
from farm.engine.embedded.model import Weights, load_weights, with_tensors
from farm.engine.embedded.request import Request
from farm.engine.embedded.scheduler import Limits, QueueFullError, Scheduler
from farm.engine.embedded.weight_group import WeightGroupError, WeightGroups

VERSION = "0.5.23"  # of the SGLang API spoken here
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_SESSION_OPEN = "a weight-update session is already open; call end_weight_update() first"
_NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
_NO_SESSION_TO_END = "no weight-update session is open; call begin_weight_update() first"
_MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "LlamaForCausalLM": "llama"}
_TURNS_BETWEEN_STEPS = 3  # socket readable -> parsed -> handler runs -> request queued


class StepLoop:
    """Runs ``scheduler.step`` while there is work, as callbacks of the running event loop."""

    def __init__(self, scheduler: Scheduler, on_defect: Callable[[BaseException], None]) -> None:
        self._scheduler = scheduler
        self._on_defect = on_defect
        self._scheduled = False
        self.last_step_s = time.perf_counter()

    def wake(self) -> None:
        """Something was queued, resumed or changed."""
        if not self._scheduled and self._scheduler.has_work:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn, _TURNS_BETWEEN_STEPS)

    def _turn(self, left: int) -> None:
        loop = asyncio.get_running_loop()
        if left > 0:
            loop.call_soon(self._turn, left - 1)
            return
        self._scheduled = False
        if not self._scheduler.has_work:
            return
        try:
            self._scheduler.step()
        except Exception as error:
            # A step that fails leaves the store in an unknown state: the process must end, not answer wrongly.
            self._on_defect(error)
            return
        self.last_step_s = time.perf_counter()
        self.wake()


class EngineServer:
    """Handlers of one embedded engine. ``text`` decodes ids for the answer's ``text`` field, without special tokens
    when its second argument says so."""

    def __init__(
        self,
        *,
        model_path: Path,
        config: ModelConfig,
        weights: Weights,
        limits: Limits,
        version: str,
        text: Callable[[list[int], bool], str],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._model_path = str(model_path)
        self._config = config
        self._limits = limits
        self._text = text
        self._scheduler = Scheduler(weights, limits, version=version)
        self._loop = StepLoop(self._scheduler, on_defect)
        self._bounds = wire.ModelBounds(
            vocab=config.vocab,
            context_length=limits.context_length,
            max_total_tokens=limits.max_total_tokens,
            eos=config.eos,
        )
        self._answers: dict[str, asyncio.Future[Request]] = {}
        self._held: list[tuple[Request, asyncio.Future[Request]]] = []  # what came during a pause
        self._still: tuple[dict[str, Any], bytes] | None = None  # load and metrics as they were when it began
        self._open = asyncio.Event()  # closed while weights are updated on an engine that is not paused
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._update_lock = asyncio.Lock()
        self._weights = weights
        self._groups = WeightGroups()
        self._updating = False  # between begin_weight_update and end_weight_update
        self._rate = (time.perf_counter(), 0)
        self._started_s = time.time()
        self._metrics = Metrics(model_name=self._model_path, gauges=self._gauges, counters=self._counters)
        get, post = ("GET",), ("POST", "PUT")
        self._routes: dict[str, tuple[tuple[str, ...], Callable[[web.BaseRequest], Awaitable[web.Response]]]] = {
            "/generate": (post, self._generate),
            "/abort_request": (post, self._abort),
            "/pause_generation": (post, self._pause),
            "/continue_generation": (post, self._continue),
            "/update_weights_from_disk": (post, self._update_weights),
            "/init_weights_update_group": (post, self._join_group),
            "/destroy_weights_update_group": (post, self._leave_group),
            "/begin_weight_update": (post, self._begin_update),
            "/update_weights_from_distributed": (post, self._receive_weights),
            "/end_weight_update": (post, self._end_update),
            "/update_weight_version": (post, self._update_version),
            "/flush_cache": (get + post, self._flush),
            "/health": (get, self._health),
            "/health_generate": (get, self._health),
            "/model_info": (get, self._model_info),
            "/get_model_info": (get, self._model_info),
            "/server_info": (get, self._server_info),
            "/get_server_info": (get, self._server_info),
            "/v1/loads": (get, self._loads),
            "/metrics": (get, self._metrics_text),
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """The one handler of the web server: dispatch by path."""
        route = self._routes.get(request.path)
        if route is None:
            return _json({"detail": "Not Found"}, 404)
        methods, handler = route
        if request.method not in methods:
            return _json({"detail": "Method Not Allowed"}, 405)
        try:
            return await handler(request)
        except wire.BadRequestError as error:
            return _json({"error": {"message": str(error)}}, 400)

    # ------------------------------------------------------------------------------------- generation

    async def _generate(self, http: web.BaseRequest) -> web.Response:
        arrived = time.perf_counter()
        body = wire.read_generate(await _body(http), self._bounds)
        rid = secrets.token_hex(16) if body.rid is None else body.rid
        if rid in self._answers:
            raise wire.BadRequestError(f"Duplicate request ID detected: {rid}")
        answer: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        self._answers[rid] = answer
        try:
            if not self._open.is_set():
                await self._open.wait()
            self._idle.clear()
            self._take(
                wire.make_request(
                    body,
                    rid=rid,
                    seed=secrets.randbits(63),
                    arrived_s=arrived,
                    on_finish=lambda done: self._finished(done, answer),
                ),
                answer,
            )
            request = await answer
        except QueueFullError:
            return _error("The request queue is full.", 503)
        except asyncio.CancelledError:
            # The client has gone: nobody waits for these tokens any more. What a pause holds back runs all the same.
            self._scheduler.abort_exactly(rid)
            raise
        finally:
            del self._answers[rid]
            if not self._answers:
                self._idle.set()
        status = request.finish.get("status_code")
        if status is not None:
            return _error(request.finish["message"], status)
        text = self._text(wire.text_ids(body, request), body.skip_special_tokens)
        epoch_s = time.time() - time.perf_counter()
        return _json(wire.write_answer(body, request, text=text, epoch_s=epoch_s))

    def _take(self, request: Request, answer: asyncio.Future[Request]) -> None:
        """Give the scheduler a request. As in SGLang, what comes during a pause waits before the scheduler: it is in no
        count, no abort reaches it, and the queue's limit meets it only after the pause."""
        if self._scheduler.paused:
            self._held.append((request, answer))
            return
        try:
            self._scheduler.submit(request)
        except QueueFullError as error:
            if not answer.done():
                answer.set_exception(error)
        self._loop.wake()

    def _finished(self, request: Request, answer: asyncio.Future[Request]) -> None:
        self._metrics.observe(request)
        if not answer.done():
            answer.set_result(request)

    async def _abort(self, http: web.BaseRequest) -> web.Response:
        body = await _body(http)
        rid = body.get("rid")
        if body.get("abort_all"):
            self._scheduler.abort(None)
        elif rid:
            self._scheduler.abort(str(rid))
        return web.Response()

    # ------------------------------------------------------------------------------------- control

    async def _pause(self, http: web.BaseRequest) -> web.Response:
        mode = (await _body(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise wire.BadRequestError(f"mode must be abort, retract or in_place, got {mode!r}")
        if not self._scheduler.paused:
            self._still = (self._load(), self._metrics.text())
        self._scheduler.paused = True
        if mode == "abort":
            self._scheduler.abort(None)
        elif mode == "retract":
            self._scheduler.retract_all()
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.BaseRequest) -> web.Response:
        await http.read()
        self._scheduler.paused = False
        self._still = None
        held, self._held = self._held, []
        for request, answer in held:
            self._take(request, answer)
        self._loop.wake()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, http: web.BaseRequest) -> web.Response:
        body = await _body(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str):
            raise wire.BadRequestError("model_path must be a string")
        if body.get("abort_all_requests"):
            self._scheduler.abort(None)
        async with self._update_lock:
            try:
                weights = await asyncio.to_thread(self._read_weights, Path(path))
            except ModelFolderError as error:
                message = f"Failed to get weights iterator: {path}. {error}"
                return _json({"success": False, "message": message, "num_paused_requests": 0}, 400)
            await self._swap(weights, version)
        self._model_path = path
        message = "Succeeded to update model weights."
        if body.get("flush_cache", True) and not self._scheduler.flush():
            return _json({"success": False, "message": _NOT_FLUSHED, "num_paused_requests": 0}, 400)
        if version is not None:
            message += f" Weight version updated to {version}."
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def _swap(self, weights: Weights, version: str | None) -> None:
        waited = not self._scheduler.paused
        if waited:
            # Not paused: as in SGLang, running requests end under the weights they began with.
            self._open.clear()
        try:
            if waited:
                await self._idle.wait()
            self._scheduler.set_weights(weights, version)
            self._weights = weights
        finally:
            self._open.set()

    async def _join_group(self, http: web.BaseRequest) -> web.Response:
        body = await _body(http)
        try:
            await asyncio.to_thread(self._groups.join, body)
        except WeightGroupError as error:
            return _refused(str(error))
        return _json({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _leave_group(self, http: web.BaseRequest) -> web.Response:
        try:
            self._groups.leave(await _body(http))
        except WeightGroupError as error:
            return _refused(str(error))
        return _json({"success": True, "message": "Succeeded to destroy custom process group."})

    async def _begin_update(self, http: web.BaseRequest) -> web.Response:
        await http.read()
        if self._updating:
            return _refused(_SESSION_OPEN)
        self._updating = True
        return _json({"success": True, "message": "Success."})

    async def _receive_weights(self, http: web.BaseRequest) -> web.Response:
        body = await _body(http)
        if not self._updating:
            return _refused(_NO_SESSION)
        version = body.get("weight_version")
        async with self._update_lock:
            try:
                received = await asyncio.to_thread(self._groups.receive, body)
                weights = await asyncio.to_thread(with_tensors, self._weights, received)
            except (WeightGroupError, ModelFolderError) as error:
                return _refused(str(error))
            await self._swap(weights, version)
        if body.get("flush_cache", True) and not self._scheduler.flush():
            return _refused(_NOT_FLUSHED)
        message = "Succeeded to update parameter online."
        if version is not None:
            message += f" Weight version updated to {version}."
        # SGLang has no checksum; where one is given here, what came was held against it.
        return _json({"success": True, "message": message, "checksum": body.get("checksum")})

    async def _end_update(self, http: web.BaseRequest) -> web.Response:
        await http.read()
        if not self._updating:
            return _refused(_NO_SESSION_TO_END)
        self._updating = False
        return _json({"success": True, "message": "Success."})

    def _read_weights(self, folder: Path) -> Weights:
        config = read_config(folder)
        for name in ("architecture", "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "rope_theta"):
            ours, theirs = getattr(self._config, name), getattr(config, name)
            if ours != theirs:
                raise ModelFolderError(f"{folder}: {name} is {theirs}, this server was started with {ours}")
        return load_weights(config, folder)

    async def _update_version(self, http: web.BaseRequest) -> web.Response:
        body = await _body(http)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise wire.BadRequestError("new_version must be a string")
        if body.get("abort_all_requests", True):
            self._scheduler.abort(None)
        self._scheduler.set_version(version)
        message = f"Weight version updated to {version}"
        return _json({"success": True, "message": message, "new_version": version})

    async def _flush(self, http: web.BaseRequest) -> web.Response:
        await http.read()
        if self._scheduler.flush():
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    # ------------------------------------------------------------------------------------- reports

    async def _health(self, http: web.BaseRequest) -> web.Response:
        # SGLang proves its health by generating a token, which a paused engine can't.
        return web.Response(status=503 if self._scheduler.paused else 200)

    async def _model_info(self, http: web.BaseRequest) -> web.Response:
        model_type = _MODEL_TYPES[self._config.architecture]
        return _json(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._scheduler.version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "embedding": {"family": "none", "enabled": False},
                "model_type": model_type,
                "architectures": [self._config.architecture],
            }
        )

    async def _server_info(self, http: web.BaseRequest) -> web.Response:
        limits = self._limits
        return _json(
            {
                "model_path": self._model_path,
                "context_length": limits.context_length,
                "max_total_tokens": limits.max_total_tokens,
                "max_total_num_tokens": limits.max_total_tokens,
                "max_running_requests": limits.max_running,
                "max_queued_requests": limits.max_queued,
                "chunked_prefill_size": limits.chunk_tokens,
                "max_req_input_len": min(limits.context_length, limits.max_total_tokens) - 1,
                "weight_version": self._scheduler.version,
                "device": "cpu",
                "dtype": "float32",
                "startup_time": self._started_s,
                "internal_states": [
                    {
                        "effective_max_running_requests_per_dp": limits.max_running,
                        "last_gen_throughput": self._throughput(),
                    }
                ],
                "version": VERSION,
                "frontend": "embedded",
            }
        )

    async def _loads(self, http: web.BaseRequest) -> web.Response:
        load = self._load() if self._still is None else self._still[0]
        return _json({"timestamp": time.time(), "version": VERSION, "loads": [load]})

    def _load(self) -> dict[str, Any]:
        s, limits = self._scheduler, self._limits
        used = self._used_tokens()
        counters = s.counters
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": s.running,
            "num_waiting_reqs": s.queued,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running,
            "token_usage": used / limits.max_total_tokens,
            "gen_throughput": self._throughput(),
            "cache_hit_rate": counters.cached_tokens / max(1, counters.prompt_tokens),
            "queues": {
                "waiting": s.queued,
                "grammar": 0,
                "paused": (s.running + s.waiting) if s.paused else 0,
                "retracted": s.retracted_waiting,
                "prealloc_ready": 0,
            },
        }

    async def _metrics_text(self, http: web.BaseRequest) -> web.Response:
        text = self._metrics.text() if self._still is None else self._still[1]
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _used_tokens(self) -> int:
        """KV tokens of running requests. What a step will compute counts, and that step makes room for it first."""
        return min(self._scheduler.running_tokens, self._limits.max_total_tokens)

    def _throughput(self) -> float:
        """Tokens/s sampled since the last question that was at least a second ago; 0 when idle."""
        now, total = time.perf_counter(), self._scheduler.counters.generated_tokens
        since, before = self._rate
        rate = (total - before) / max(now - since, 1e-9)
        if now - since > 1:
            self._rate = (now, total)
        return rate if self._scheduler.has_work else 0.0

    def _gauges(self) -> dict[str, tuple[str, float]]:
        s, limits = self._scheduler, self._limits
        used, kept = self._used_tokens(), s.kept_tokens
        c = s.counters
        return {
            "num_running_reqs": ("Running requests", s.running),
            "num_queue_reqs": ("Requests in the waiting queue", s.queued),
            "num_retracted_reqs": ("Retracted requests in the waiting queue", s.retracted_waiting),
            "num_paused_reqs": ("Requests held by a pause", s.running + s.waiting if s.paused else 0),
            "token_usage": ("Share of the KV budget in use by running requests", used / limits.max_total_tokens),
            "num_used_tokens": ("KV tokens in use by running requests", used),
            "kv_used_tokens": ("KV tokens in use by running requests", used),
            "kv_evictable_tokens": ("KV tokens kept for prefix reuse", kept),
            "kv_available_tokens": ("KV tokens free", limits.max_total_tokens - used - kept),
            "max_total_num_tokens": ("KV budget in tokens", limits.max_total_tokens),
            "cache_hit_rate": ("Prompt tokens found in the prefix cache", c.cached_tokens / max(1, c.prompt_tokens)),
            "gen_throughput": ("Sampled tokens per second", self._throughput()),
            "new_token_ratio": ("Share of remaining length set aside at admission", s.new_token_ratio),
        }

    def _counters(self) -> dict[str, tuple[str, float]]:
        c = self._scheduler.counters
        return {
            "num_retracted_requests_total": ("Retractions", c.retracted),
            "num_requests_total": ("Requests", c.requests),
            "num_aborted_requests_total": ("Aborted requests", c.aborted),
            "prompt_tokens_total": ("Prompt tokens", c.prompt_tokens),
            "cached_tokens_total": ("Prompt tokens found in the prefix cache", c.cached_tokens),
            "generation_tokens_total": ("Sampled tokens", c.generated_tokens),
        }


async def _body(http: web.BaseRequest) -> dict[str, Any]:
    raw = await http.read()
    if not raw:
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise wire.BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise wire.BadRequestError("the body must be a JSON object")
    return value


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _refused(message: str) -> web.Response:
    return _json({"success": False, "message": message}, 400)


def _error(message: str, status: int) -> web.Response:
    body = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return _json(body, status)
