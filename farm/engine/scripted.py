"""An engine without a model: answers from a function, fails, stalls or forgets its weights on demand. For tests and
twins."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from farm.errors import EngineError
from farm.protocols import EngineInfo, EngineLoad, GenerateRequest, Generation
from farm.types import VersionSpan, version_name, version_step

Answer = Callable[[GenerateRequest], Sequence[int]]


class ScriptedEngine:
    """Implements Engine. ``answer`` gives the sampled ids of a request (cut at ``max_new_tokens`` and after the first
    stop token); every log-prob is -0.5. ``calls`` lists what was called, as (method, detail).

    ``fail(method, error, times)`` makes the next calls of a method raise; ``stall(method)`` makes them hang until
    ``release(method)`` (a stalled call still ends by its time-out or by cancellation).
    """

    def __init__(
        self,
        answer: Answer,
        *,
        url: str = "http://scripted",
        version: str = "step-000000",
        max_total_tokens: int = 16_384,
        context_length: int = 512,
        max_running_requests: int = 32,
        control_timeout_s: float = 1.0,
    ) -> None:
        self._answer = answer
        self._url = url
        self._control_timeout_s = control_timeout_s
        self.version = version
        self.model_path = "base"
        self.paused = False
        self.calls: list[tuple[str, str]] = []
        self._info = (max_total_tokens, context_length, max_running_requests)
        self._failures: dict[str, deque[EngineError]] = defaultdict(deque)
        self._stalls: dict[str, asyncio.Event] = {}
        self._running: dict[str, asyncio.Event] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._generated = 0

    @property
    def url(self) -> str:
        return self._url

    # ------------------------------------------------------------------------------------- the script

    def fail(self, method: str, error: EngineError, *, times: int = 1) -> None:
        """The next ``times`` calls of ``method`` raise ``error``."""
        self._failures[method].extend([error] * times)

    def stall(self, method: str) -> None:
        """Calls of ``method`` hang from now on."""
        self._stalls[method] = asyncio.Event()

    def release(self, method: str) -> None:
        """Let stalled calls of ``method`` go on, and later ones through."""
        event = self._stalls.pop(method, None)
        if event is not None:
            event.set()

    def restart(self, *, version: str = "default") -> None:
        """As after a crash and a restart: base weights, not paused, nothing running."""
        self.version = version
        self.model_path = "base"
        self.paused = False
        self._resumed.set()
        for aborted in self._running.values():
            aborted.set()

    # ------------------------------------------------------------------------------------- Engine

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation:
        await self._enter("generate", request.rid, timeout_s)
        aborted = asyncio.Event()
        self._running[request.rid] = aborted
        try:
            first = self.version
            await self._wait_resumed(aborted, timeout_s)
            ids = [] if aborted.is_set() else list(self._answer(request))[: request.max_new_tokens]
        finally:
            del self._running[request.rid]
        stop = next((n for n, token in enumerate(ids) if token in request.stop_token_ids), None)
        if stop is not None:
            ids = ids[: stop + 1]
        step = version_step(self.version)
        if ids and step is None:
            raise EngineError(f"tokens were sampled under weights named {first!r}", kind="unverified_weights")
        self._generated += len(ids)
        reason = "abort" if aborted.is_set() else "stop" if stop is not None else "length"
        return Generation(
            output_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            spans=(VersionSpan(step=step, start=0, end=len(ids)),) if ids and step is not None else (),
            finish_reason=reason,
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            retractions=0,
            queue_s=0.0,
            e2e_s=0.0,
        )

    async def abort(self, rid: str | None = None) -> None:
        await self._enter("abort", rid or "", self._control_timeout_s)
        for running, aborted in self._running.items():
            if rid is None or running == rid:
                aborted.set()

    async def pause(self) -> None:
        await self._enter("pause", "", self._control_timeout_s)
        self.paused = True
        self._resumed.clear()

    async def resume(self) -> None:
        await self._enter("resume", "", self._control_timeout_s)
        self.paused = False
        self._resumed.set()

    async def load_weights(self, path: str, *, step: int) -> None:
        await self._enter("load_weights", version_name(step), self._control_timeout_s)
        self.version = version_name(step)
        self.model_path = path

    async def info(self) -> EngineInfo:
        await self._enter("info", "", self._control_timeout_s)
        budget, context, running = self._info
        return EngineInfo(
            model_path=self.model_path,
            version=self.version,
            max_total_tokens=budget,
            context_length=context,
            max_running_requests=running,
        )

    async def load(self) -> EngineLoad:
        await self._enter("load", "", self._control_timeout_s)
        return EngineLoad(
            running=len(self._running),
            queued=0,
            used_tokens=0,
            max_total_tokens=self._info[0],
            retracted_total=0,
            generated_tokens_total=self._generated,
        )

    async def healthy(self) -> bool:
        try:
            await self._enter("healthy", "", self._control_timeout_s)
        except EngineError:
            return False
        return not self.paused

    async def close(self) -> None:
        self.calls.append(("close", ""))

    # ------------------------------------------------------------------------------------- inside

    async def _enter(self, method: str, detail: str, timeout_s: float) -> None:
        self.calls.append((method, detail))
        failures = self._failures[method]
        if failures:
            raise failures.popleft()
        event = self._stalls.get(method)
        if event is None:
            await asyncio.sleep(0)
            return
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError as error:
            raise EngineError(f"{method}: no answer within {timeout_s:g} s", kind="timeout") from error

    async def _wait_resumed(self, aborted: asyncio.Event, timeout_s: float) -> None:
        """Hold a request while paused; an abort ends the wait."""
        if not self.paused:
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self._resumed, aborted)]
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            raise EngineError(f"generate: no answer within {timeout_s:g} s", kind="timeout")
