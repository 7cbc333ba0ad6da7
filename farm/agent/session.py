"""One episode as a scaffold sees it: an OpenAI-compatible server of its own on loopback, with the policy behind it.

``POST /v1/chat/completions`` samples from the policy, token-in, token-out (``farm.agent.ledger``); ``POST /exec`` runs
a command in the episode's sandbox; ``GET /task`` tells the task. All want the session's token as ``Authorization:
Bearer``. Sampling parameters are the episode's, whatever the request says; ``max_tokens`` can only lower the limit.

Once the episode is over (a cap, or a failure) every request is refused with 400 and the code
``context_length_exceeded``, which clients do not retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from farm.agent.bash import check_generation
from farm.agent.caps import ENGINE_SHARE, allowance
from farm.agent.ledger import Ledger, Prompt
from farm.errors import EngineError, FarmError
from farm.protocols import AgentRun, Engine, GenerateRequest, Generation, Sandbox
from farm.render.messages import Message, MessageRenderer, read_message
from farm.types import EndReason, Event, Limits, SamplingParams, Task, Turn

_ABORT_S = 2.0
_MAX_REQUEST_BYTES = 32 << 20
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Session:
    """``over`` is set once nothing more can happen; ``reason`` or ``failure`` then says why."""

    def __init__(
        self,
        task: Task,
        *,
        episode_id: str,
        sandbox: Sandbox,
        engine: Engine,
        renderer: MessageRenderer,
        sampling: SamplingParams,
        limits: Limits,
        min_step: int,
        wall_s: Callable[[], float],
    ) -> None:
        self._task, self._sandbox, self._engine, self._renderer = task, sandbox, engine, renderer
        self._sampling, self._limits, self._min_step = sampling, limits, min_step
        self._rid = f"{episode_id}-{secrets.token_hex(4)}"
        self._clock = asyncio.get_running_loop().time
        self._wall = wall_s() - self._clock()
        self._deadline = self._clock() + limits.agent_s
        self._ledger = Ledger(renderer)
        self._one = asyncio.Lock()
        self._turns: list[Turn] = []
        self._timeline: list[Event] = []
        self.token = secrets.token_hex(16)
        self.over = asyncio.Event()
        self.reason: EndReason | None = None
        self.failure: FarmError | None = None

    def left_s(self) -> float:
        return self._deadline - self._clock()

    def result(self, end: EndReason) -> AgentRun:
        return AgentRun(turns=tuple(self._turns), end_reason=end, timeline=tuple(self._timeline))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The server's address, while it is up."""
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_get("/task", self._guarded(self._tell_task))
        app.router.add_get("/v1/models", self._guarded(self._models))
        app.router.add_post("/v1/chat/completions", self._guarded(self._complete))
        app.router.add_post("/exec", self._guarded(self._exec))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    def _guarded(self, handler: _Handler) -> _Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if not secrets.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self.token}"):
                return _refusal(401, "this session's token is needed as Authorization: Bearer", "invalid_api_key")
            if self.over.is_set():
                return self._is_over()
            try:
                return await handler(request)
            except FarmError as error:
                self.failure = self.failure or error
                self.over.set()
                return self._is_over()

        return guarded

    def _is_over(self) -> web.Response:
        why = self.reason.value if self.reason else "it failed"
        return _refusal(400, f"the episode is over: {why}", "context_length_exceeded")

    def _end(self, reason: EndReason) -> web.Response:
        self.reason = reason
        self.over.set()
        return self._is_over()

    async def _tell_task(self, request: web.Request) -> web.StreamResponse:
        task = self._task
        told = {"instance_id": task.instance_id, "problem_statement": task.problem_statement, "workdir": task.workdir}
        return web.json_response(told)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        body = await _object(request)
        command = body.get("command")
        if not isinstance(command, str) or "\0" in command:
            return _refusal(400, "command must be text", "invalid_request")
        async with self._one:
            if self.left_s() <= 0:
                return self._end(EndReason.TIME_LIMIT)
            start = self._clock()
            result = await self._sandbox.exec(command, timeout_s=min(self._limits.tool_s, self.left_s()))
            self._event("exec", start)
            if self._turns:
                self._turns[-1] = replace(self._turns[-1], observation=result.output, exit_code=result.exit_code)
        told = {"output": result.output, "returncode": result.exit_code, "timed_out": result.timed_out}
        return web.json_response(told)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await _object(request)
        if body.get("stream") or body.get("n") not in (None, 1):
            return _refusal(400, "stream and n > 1 are not served", "invalid_request")
        tools = body.get("tools") or []
        try:
            messages = [read_message(value) for value in body.get("messages") or ()]
            if not messages or messages[-1].role == "assistant":
                raise ValueError("messages must end with one that the assistant is to answer")
        except ValueError as error:
            return _refusal(400, str(error), "invalid_request")
        async with self._one:
            prompt = self._ledger.prompt(messages, tools)
            allowed = allowance(
                self._limits, turns=len(self._turns), context_tokens=len(prompt.ids), left_s=self.left_s()
            )
            if isinstance(allowed, EndReason):
                return self._end(allowed)
            asked = body.get("max_completion_tokens") or body.get("max_tokens")
            if isinstance(asked, int) and asked > 0:
                allowed = min(allowed, asked)
            generation = await self._generate(prompt, allowed)
            if generation is None:
                return self._end(EndReason.TIME_LIMIT)
            reply = self._renderer.reply(generation.output_ids)
            self._ledger.record(prompt, generation.output_ids, reply)
            self._record(prompt, generation)
        return web.json_response(_completion(reply, prompt, generation))

    async def _generate(self, prompt: Prompt, max_new_tokens: int) -> Generation | None:
        """One sampling; None when the agent's time ran out while it waited."""
        request = GenerateRequest(
            rid=f"{self._rid}-{secrets.token_hex(2)}",
            input_ids=prompt.ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            sampling=self._sampling,
        )
        start = self._clock()
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                generation = await self._engine.generate(request, timeout_s=self._limits.agent_s * ENGINE_SHARE)
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_ABORT_S):
                    await self._engine.abort(request.rid)
            if not limit.expired():
                raise
            return None
        finally:
            self._event("generate", start)
        check_generation(generation, max_new_tokens=max_new_tokens, min_step=self._min_step)
        return generation

    def _record(self, prompt: Prompt, generation: Generation) -> None:
        self._turns.append(
            Turn(
                segment=prompt.segment,
                context_ids=prompt.context_ids,
                output_ids=generation.output_ids,
                output_logprobs=generation.logprobs,
                spans=generation.spans,
                finish_reason=generation.finish_reason,
                action=self._renderer.decode(generation.output_ids),
                observation="",
                exit_code=None,
                cached_tokens=generation.cached_tokens,
                retractions=generation.retractions,
            )
        )

    def _event(self, name: str, start: float) -> None:
        self._timeline.append(Event(name=name, start_at_s=self._wall + start, end_at_s=self._wall + self._clock()))


async def _object(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    return body if isinstance(body, dict) else {}


def _refusal(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


def _completion(reply: Message, prompt: Prompt, generation: Generation) -> dict[str, Any]:
    """The answer in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(6)}", "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]  # fmt: skip
    finish = "length" if generation.finish_reason == "length" else "tool_calls" if reply.calls else "stop"
    counts = len(prompt.ids), len(generation.output_ids)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)},
    }
