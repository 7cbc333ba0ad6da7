"""A crowd on one engine: generations without an end, and the others, who come and go turn after turn.

Played twice. *Alone*, requests go to the engine as they come, without a cap on the context. *Guarded*, everybody has a
context cap and comes through the farm's pool, which admits an episode only where its whole cap fits into the KV budget.
Whoever gets no answer within the time-out gives the request up and asks anew, as an agent would.

Everything is written down by client: how many requests and tokens, how many time-outs, the longest time without a
token while an episode was under way (requests are a few tokens long, so the time between two answers), and the longest
wait for admission. Alone, all this is counted from the moment on when the KV is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from farm.admission import Ask
from farm.engine import make_engine
from farm.pool import EnginePool
from farm.protocols import EngineLoad

ENDLESS, OTHER = "endless", "other"

_PROMPT = {ENDLESS: 16, OTHER: 48}  # tokens
_TURNS = 8
_TURN_TOKENS = 8
_OBSERVED_TOKENS = 8
_THINK_S = 0.02
_LOOK_S = 0.25
_GUARDED = 2.5  # times the time-out
_WATCHED = 4  # times the time-out: how long at most the others are watched once the KV is full
_SETTLE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdPlan:
    """``longest_tokens``: the context that the engine allows; ``cap_tokens``: the context cap of the guarded crowd.
    The others need 176 tokens. ``fill_s``: how long the alone crowd may take to fill the KV, which is full when the
    engine retracts for the first time."""

    endless: int
    others: int
    budget_tokens: int
    longest_tokens: int
    cap_tokens: int
    timeout_s: float
    fill_s: float
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Client:
    """What one client went through. Times are seconds."""

    name: str
    kind: str
    requests: int = 0
    tokens: int = 0
    timeouts: int = 0
    longest_gap_s: float = 0.0
    longest_admission_s: float = 0.0
    waiting_since_s: float | None = None  # for a token; None while it does not wait for one

    def asks(self, now_s: float) -> None:
        self.requests += 1
        self.waiting_since_s = now_s if self.waiting_since_s is None else self.waiting_since_s

    def got(self, tokens: int, now_s: float) -> None:
        self.tokens += tokens
        self.gap(now_s)
        self.waiting_since_s = None

    def start_over(self, now_s: float) -> None:
        """Count from now on."""
        self.requests = self.tokens = self.timeouts = 0
        self.longest_gap_s = self.longest_admission_s = 0.0
        self.waiting_since_s = None if self.waiting_since_s is None else now_s

    def gap(self, now_s: float) -> None:
        """A gap that is still open counts as far as it has come."""
        if self.waiting_since_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.waiting_since_s)


@dataclass(slots=True, kw_only=True)
class Played:
    """How one crowd fared. ``loads``: (seconds since its beginning, what the engine said); ``full_at_s``: when the KV
    was first full; None when it never was."""

    clients: list[Client]
    seconds: float
    full_at_s: float | None = None
    loads: list[tuple[float, EngineLoad]] = field(default_factory=list)


async def play(url: str, plan: CrowdPlan) -> dict[str, Played]:
    """``alone`` until the KV is full and all others have timed out since, or for a few time-outs; then ``guarded`` for
    as long as somebody blocked would need to time out twice."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        alone = await _Crowd(session, url, plan, admitted=_at_once).play(until_full=True, seconds=plan.fill_s)
        await _calm(session, url)
        pool = EnginePool()
        pool.add(make_engine(url))
        supervisor = asyncio.create_task(pool.supervise())

        @contextlib.asynccontextmanager
        async def admitted(key: str) -> AsyncIterator[None]:
            await pool.acquire(Ask(key=key, group=key, tokens=plan.cap_tokens), timeout_s=plan.fill_s)
            try:
                yield
            finally:
                pool.release(key)

        try:
            crowd = _Crowd(session, url, plan, admitted=admitted, cap_tokens=plan.cap_tokens)
            guarded = await crowd.play(until_full=False, seconds=_GUARDED * plan.timeout_s)
        finally:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
            await pool.close()
    return {"alone": alone, "guarded": guarded}


@contextlib.asynccontextmanager
async def _at_once(key: str) -> AsyncIterator[None]:
    del key
    yield


class _Crowd:
    """One crowd at work. ``admitted(key)`` is entered for each episode."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        plan: CrowdPlan,
        *,
        admitted: Callable[[str], contextlib.AbstractAsyncContextManager[None]],
        cap_tokens: int | None = None,
    ) -> None:
        self._session, self._url, self._plan, self._admitted = session, url, plan, admitted
        self._cap_tokens = cap_tokens or plan.longest_tokens

    async def play(self, *, until_full: bool, seconds: float) -> Played:
        """For ``seconds``; with ``until_full`` that is the limit of filling the KV, and what comes then is watched."""
        plan = self._plan
        clients = [Client(name=f"{ENDLESS}-{n}", kind=ENDLESS) for n in range(plan.endless)]
        clients += [Client(name=f"{OTHER}-{n}", kind=OTHER) for n in range(plan.others)]
        began_s = _now()
        played = Played(clients=clients, seconds=0.0)
        lives = [asyncio.create_task(self._live(client), name=client.name) for client in clients]
        try:
            end_s = began_s + seconds
            engine = make_engine(self._url)
            try:
                first = await engine.load()
                while _now() < end_s and not any(life.done() for life in lives):
                    load = await engine.load()
                    at_s = _now() - began_s
                    played.loads.append((at_s, load))
                    if until_full and played.full_at_s is None and load.retracted_total > first.retracted_total:
                        played.full_at_s = at_s
                        end_s = _now() + _WATCHED * plan.timeout_s
                        for client in clients:
                            client.start_over(_now())
                    if played.full_at_s is not None and all(c.timeouts for c in clients if c.kind == OTHER):
                        break
                    await asyncio.sleep(_LOOK_S)
            finally:
                await engine.close()
        finally:
            for life in lives:
                life.cancel()
            ended = await asyncio.gather(*lives, return_exceptions=True)
        for error in ended:  # they live for ever, so one that ended by itself broke
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError("a client of the crowd broke") from error
        played.seconds = _now() - began_s
        for client in clients:
            client.gap(began_s + played.seconds)
        return played

    async def _live(self, client: Client) -> None:
        """Episode after episode, for ever."""
        draw = random.Random(f"{self._plan.seed} {client.name}")
        for number in range(1 << 30):
            asked_s = _now()
            async with self._admitted(f"{client.name}-{number}"):
                client.longest_admission_s = max(client.longest_admission_s, _now() - asked_s)
                if client.kind == ENDLESS:
                    await self._endless(client, draw)
                else:
                    await self._episode(client, draw)

    async def _endless(self, client: Client, draw: random.Random) -> None:
        room = self._cap_tokens - _PROMPT[ENDLESS]
        client.asks(_now())
        client.got(len(await self._generate(_ids(draw, _PROMPT[ENDLESS]), room, client.name) or ()), _now())

    async def _episode(self, client: Client, draw: random.Random) -> None:
        ids = _ids(draw, _PROMPT[OTHER])
        for _ in range(_TURNS):
            client.asks(_now())
            try:
                async with asyncio.timeout(self._plan.timeout_s):
                    sampled = await self._generate(ids, _TURN_TOKENS, client.name)
            except TimeoutError:
                client.timeouts += 1
                return  # still without a token: the next episode's first request goes on waiting
            if sampled:
                client.got(len(sampled), _now())
                ids += sampled
            ids += _ids(draw, _OBSERVED_TOKENS)
            await asyncio.sleep(_THINK_S)

    async def _generate(self, ids: list[int], max_new_tokens: int, name: str) -> list[int]:
        """What was sampled; empty when the engine gave the request up. Cancelled, the connection closes, and the engine
        drops the request."""
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 1.0}
        body = {"rid": f"{name}-{secrets.token_hex(4)}.", "input_ids": ids, "sampling_params": params}
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            answer: dict[str, Any] = await response.json()
        sampled: list[int] = answer.get("output_ids") or []
        return sampled


async def _calm(session: aiohttp.ClientSession, url: str) -> None:
    """Nothing runs, waits or is cached any more."""
    engine = make_engine(url)
    try:
        load = await engine.load()
        while load.running or load.queued:
            await engine.abort()
            await asyncio.sleep(_SETTLE_S)
            load = await engine.load()
    finally:
        await engine.close()
    async with session.post(f"{url}/flush_cache") as response:
        await response.read()


def _ids(draw: random.Random, count: int) -> list[int]:
    """Ids that no other prompt shares, above the special ones."""
    return [draw.randrange(16, 256) for _ in range(count)]


def _now() -> float:
    return time.monotonic()
