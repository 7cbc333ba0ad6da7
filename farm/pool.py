"""The pool of engines: keeps each one on the newest policy and hands out those that serve it.

What holds at any time:

* an engine gets new episodes only while its own answer names the policy that is wanted from it, by version and path (or
  by version and digest, where the trainer pushed it); an engine that restarted, or was loaded by somebody else, is
  fenced until it is loaded and verified again (Rule 5);
* an engine that the pool paused is resumed whatever happens between: error, time-out, cancellation. If the resume
  itself fails, it is tried again at every visit until it succeeds;
* a paused engine is not a dead one: what is paused by a push under way is left alone, what nobody is about to resume is
  resumed, and neither is taken for a failure;
* an engine that is drained gets no new episodes, but keeps up with the policies for those that run on it;
* policies only go forward: an older or repeated one is ignored, and of several that piled up only the newest is loaded;
* engines are visited side by side, so one that hangs delays no other.

:func:`next_move`, :mod:`farm.circuit` and :mod:`farm.admission` decide, purely; the rest of this file carries out.
"""

from __future__ import annotations

import asyncio
import logging
import os.path
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from farm.admission import Admission, Ask, EngineCapacity, Grant
from farm.circuit import (
    Circuit,
    CircuitRules,
    CircuitState,
    left_s,
    look_failed,
    look_succeeded,
    request_failed,
    request_succeeded,
    speaks_against,
    try_again,
)
from farm.errors import EngineError
from farm.protocols import Engine, EngineInfo, EngineLoad
from farm.types import PUSH_GIVEN_UP, PUSH_UNDER_WAY, PolicyVersion, version_step

_CANCEL_AGAIN_S = 1.0
_COOL_DOWN_POLLS = 2.0
_PUSH_POLLS = 0.1
_RESUME_S = 30.0

_NEW_CIRCUIT = Circuit()

_log = logging.getLogger(__name__)


class Health(StrEnum):
    """NEW: not seen yet. UP: serves a verified policy. UPDATING: paused, being loaded. DOWN: silent, broken or
    unverified."""

    NEW = "new"
    UP = "up"
    UPDATING = "updating"
    DOWN = "down"


class Move(StrEnum):
    """What to do with an engine that has answered."""

    SERVE = "serve"
    UPDATE = "update"
    AWAIT = "await"  # the trainer is about to push the wanted policy to it
    REFUSE = "refuse"  # it serves no policy, and none is there to load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the pool knows of one engine. ``step`` is the verified policy; None: no traffic. ``error`` says why it is
    down."""

    url: str
    health: Health = Health.NEW
    step: int | None = None
    info: EngineInfo | None = None
    load: EngineLoad | None = None
    circuit: Circuit = _NEW_CIRCUIT
    draining: bool = False
    seen_at_s: float | None = None
    error: str = ""

    @property
    def in_use(self) -> bool:
        """Whether it serves, or will once its policy is changed, and may get new episodes."""
        return self.health in (Health.UP, Health.UPDATING) and not self.draining


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """``kind``: ``live`` (``step`` serves on ``url`` from ``at_s`` on; ``seconds`` since its publication), ``up``,
    ``down``."""

    kind: str
    url: str
    at_s: float
    step: int | None = None
    seconds: float = 0.0
    detail: str = ""


def serves(info: EngineInfo, wanted: PolicyVersion) -> bool:
    """Whether the engine's own answer is the wanted policy: its name and the folder that it was loaded from, or the
    name that only somebody who has its weights can give (the digest is part of it)."""
    loaded = info.version == wanted.name and os.path.normpath(info.model_path) == os.path.normpath(wanted.path)
    return loaded or info.version == wanted.pushed_name


def next_move(info: EngineInfo, wanted: PolicyVersion | None, *, push_s: float = 0.0, pushed: bool = False) -> Move:
    """Decide from what the engine says of itself. With nothing wanted, an engine serves what it claims, if that is a
    policy. ``push_s``: for how much longer the trainer may still push the wanted policy. ``pushed``: an engine has it
    from a push. All that take part in one are under way before the first has it, so whoever is not came too late."""
    if wanted is None:
        return Move.SERVE if version_step(info.version) is not None else Move.REFUSE
    if serves(info, wanted):
        return Move.SERVE
    missed = info.version == PUSH_GIVEN_UP or (pushed and info.version != PUSH_UNDER_WAY)
    return Move.AWAIT if push_s > 0 and not missed else Move.UPDATE


class EnginePool:
    """Use from one event loop. :meth:`supervise` must run for anything to be served.

    ``poll_s`` is the time between two looks at an engine; a new policy is acted on at once. ``overcommit``: see
    :class:`farm.admission.Admission`. ``push_wait_s``: how long a new policy may be on its way to the engines by a push
    of the trainer's, before the pool loads it from disk; 0: nobody pushes. ``on_load`` gets (URL, when, load) at every
    look at an engine that serves.
    """

    def __init__(
        self,
        *,
        overcommit: float = 1.0,
        poll_s: float = 1.0,
        push_wait_s: float = 0.0,
        on_event: Callable[[PoolEvent], None] | None = None,
        on_load: Callable[[str, float, EngineLoad], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._admission = Admission(overcommit=overcommit)
        self._poll_s = poll_s
        self._push_wait_s = push_wait_s
        self._rules = CircuitRules(cool_down_s=_COOL_DOWN_POLLS * poll_s)
        self._on_event = on_event
        self._on_load = on_load
        self._now = now
        self._engines: dict[str, Engine] = {}
        self._states: dict[str, EngineState] = {}
        self._paused: set[str] = set()
        self._awaiting: set[str] = set()  # a push of the trainer's
        self._wanted: PolicyVersion | None = None
        self._wanted_since_s = 0.0
        self._pushed = False  # the wanted policy was, to an engine at least
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[str, asyncio.Event] = {}
        self._membership = asyncio.Event()
        self._asks: dict[str, asyncio.Future[Grant]] = {}

    # ------------------------------------------------------------------------------------- who is in it

    def add(self, engine: Engine) -> None:
        """Take an engine in. It gets traffic once it is verified. The pool does not close it before it is removed."""
        if engine.url in self._engines:
            raise ValueError(f"{engine.url} is in the pool already")
        self._engines[engine.url] = engine
        self._states[engine.url] = EngineState(url=engine.url)
        self._wakes[engine.url] = asyncio.Event()
        self._membership.set()

    async def remove(self, url: str) -> list[str]:
        """Let an engine go; returns the keys of the episodes whose reservations were on it."""
        engine = self._engines.pop(url)
        del self._states[url], self._wakes[url]
        lost = self._admission.remove_engine(url)
        keeper = self._keepers.pop(url, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        self._paused.discard(url)
        self._awaiting.discard(url)
        await engine.close()
        return lost

    async def close(self) -> None:
        """Let all engines go; end :meth:`supervise` first."""
        for url in list(self._engines):
            await self.remove(url)

    def drain(self, url: str) -> None:
        """Give the engine no new episodes; those that run on it go on."""
        self._set(url, draining=True)
        self._admission.unverify(url)

    def undrain(self, url: str) -> None:
        """Use the engine again, from the next look at it on."""
        if self._states[url].draining:
            self._set(url, draining=False)
            self._wakes[url].set()

    def states(self) -> tuple[EngineState, ...]:
        """One state per engine, in the order they were added."""
        return tuple(self._states.values())

    # ------------------------------------------------------------------------------------- policies

    @property
    def wanted(self) -> PolicyVersion | None:
        """The newest policy that was asked for."""
        return self._wanted

    def want(self, version: PolicyVersion) -> None:
        """Move every engine to ``version``. Ignored when it is not newer than what is wanted already."""
        if self._wanted is not None and version.step <= self._wanted.step:
            return
        # The first policy is there already when the engines come up: nobody pushes it.
        self._wanted_since_s = _clock() if self._wanted is not None else -self._push_wait_s
        self._wanted = version
        self._pushed = False
        for wake in self._wakes.values():
            wake.set()

    # ------------------------------------------------------------------------------------- episodes

    def place(self, ask: Ask) -> Grant | None:
        """Reserve an engine now, or None."""
        return self._admission.place(ask)

    async def acquire(self, ask: Ask, *, timeout_s: float) -> Grant:
        """Wait, first come first served, for an engine. Raises EngineError (``no_engine``) after ``timeout_s``, and
        UsageError for an episode that no engine could ever hold."""
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._asks[ask.key] = future
        try:
            self._granted(self._admission.ask(ask))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            self.release(ask.key)
            raise EngineError(f"no engine had room for {ask.key} within {timeout_s:g} s", kind="no_engine") from error
        except asyncio.CancelledError:
            self.release(ask.key)
            raise
        finally:
            del self._asks[ask.key]

    def release(self, key: str) -> None:
        """The episode has ended. Unknown keys are ignored."""
        self._granted(self._admission.release(key))

    def witness(self, key: str, *, failed: str | None) -> None:
        """How an episode fared on its engine, told before it is released. ``failed`` is the kind of the ``EngineError``
        that ended it; None when it ended in any other way."""
        url = self._admission.holder(key)
        state = None if url is None else self._states.get(url)
        if url is None or state is None or (failed is not None and not speaks_against(failed)):
            return
        if failed is None:
            self._set(url, circuit=request_succeeded(state.circuit))
            return
        circuit = request_failed(state.circuit, self._rules, now_s=_clock())
        self._set(url, circuit=circuit)
        if circuit.state is not state.circuit.state:
            self._down(url, f"{self._rules.requests} requests in a row failed, the last with {failed}")

    def capacity(self, tokens: int) -> int:
        """How many episodes of ``tokens`` the engines that are up (or being updated) hold at once, running ones
        included. Engines that are drained don't count."""
        return sum(self._admission.capacity(url, tokens) for url, state in self._states.items() if state.in_use)

    def largest_tokens(self, url: str) -> int | None:
        """Tokens of the largest episode that an engine holds, up or not; None while it was never seen serving."""
        return self._admission.largest_tokens(url) if url in self._admission.engines else None

    def reserved_tokens(self, url: str) -> int:
        """KV tokens reserved on an engine."""
        return self._admission.reserved_tokens(url)

    def _granted(self, grants: list[Grant]) -> None:
        for grant in grants:
            future = self._asks.get(grant.key)
            if future is not None and not future.done():
                future.set_result(grant)

    # ------------------------------------------------------------------------------------- supervision

    async def supervise(self) -> None:
        """For ever: visit every engine. Ends only by cancellation, or by an error that is a defect."""
        try:
            while True:
                for url, engine in self._engines.items():
                    if url not in self._keepers:
                        self._keepers[url] = asyncio.create_task(self._keep(engine), name=f"keep {url}")
                self._membership.clear()
                changed = asyncio.create_task(self._membership.wait())
                try:
                    await asyncio.wait({changed, *self._keepers.values()}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                for keeper in self._keepers.values():
                    if keeper.done() and not keeper.cancelled():
                        keeper.result()
        finally:
            keepers = list(self._keepers.values())
            self._keepers.clear()
            pending = set(keepers)
            while pending:  # a cancellation that meets a time-out of the client's can get lost: ask again
                for keeper in pending:
                    keeper.cancel()
                _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)

    async def _keep(self, engine: Engine) -> None:
        url, wake = engine.url, self._wakes[engine.url]
        while self._engines.get(url) is engine:
            circuit = try_again(self._states[url].circuit, self._rules, now_s=_clock())
            self._set(url, circuit=circuit)
            if circuit.state is CircuitState.OPEN:
                # Ever less often, whatever is wanted: each try to load it pauses it.
                await asyncio.sleep(left_s(circuit, self._rules, now_s=_clock()))
                continue
            wake.clear()
            await self._visit(engine, self._wanted)
            if (state := self._states.get(url)) is None or state.circuit.state is CircuitState.OPEN:
                continue
            try:
                async with asyncio.timeout(self._poll_s * (_PUSH_POLLS if url in self._awaiting else 1.0)):
                    await wake.wait()
            except TimeoutError:
                continue

    async def _visit(self, engine: Engine, wanted: PolicyVersion | None) -> None:
        try:
            if engine.url in self._paused:
                await self._resume(engine)
            info = await engine.info()
            self._awaiting.discard(engine.url)
            push_s = self._wanted_since_s + self._push_wait_s - _clock()
            match next_move(info, wanted, push_s=push_s, pushed=self._pushed and wanted is self._wanted):
                case Move.UPDATE:
                    assert wanted is not None
                    info = await self._update(engine, wanted)
                case Move.AWAIT:
                    self._await_push(engine.url, info)
                    return
                case Move.SERVE:
                    await self._prove_alive(engine)
                case Move.REFUSE:
                    message = f"{engine.url} serves {info.version!r}, and no policy is published to load"
                    raise EngineError(message, kind="unverified_weights")
            load = await engine.load()
        except EngineError as error:
            self._failed(engine.url, error)
        else:
            self._serving(engine.url, info, load, wanted)

    def _await_push(self, url: str, info: EngineInfo) -> None:
        """The engine goes on with the policy that it was verified to serve, until it says that it is being changed."""
        self._awaiting.add(url)
        state = self._states.get(url)
        if state is not None and state.step is not None and version_step(info.version) != state.step:
            self._admission.unverify(url)
            self._set(url, step=None)

    async def _prove_alive(self, engine: Engine) -> None:
        """An engine that answers but does not generate may have been left paused, by a farm that was killed in an
        update."""
        if await engine.healthy():
            return
        await engine.resume()
        if not await engine.healthy():
            raise EngineError(f"{engine.url} answers but does not generate", kind="unhealthy")

    async def _update(self, engine: Engine, wanted: PolicyVersion) -> EngineInfo:
        """Pause, load, verify, resume. Running requests wait and go on; no new episode comes meanwhile."""
        url = engine.url
        self._admission.unverify(url)
        self._set(url, health=Health.UPDATING, step=None)
        self._paused.add(url)
        try:
            await engine.pause()
            await engine.load_weights(wanted.path, step=wanted.step)
            info = await engine.info()
            if not serves(info, wanted):
                raise EngineError(
                    f"{url} answers {info.version!r} from {info.model_path} after loading {wanted.name}",
                    kind="unverified_weights",
                )
        finally:
            await self._resume(engine)
        self._live(url, wanted)
        return info

    def _live(self, url: str, wanted: PolicyVersion) -> None:
        at_s = self._now()
        self._emit(PoolEvent(kind="live", url=url, at_s=at_s, step=wanted.step, seconds=at_s - wanted.published_at_s))

    async def _resume(self, engine: Engine) -> None:
        """Resume, and see it through even when this task is cancelled meanwhile."""
        resuming = asyncio.create_task(engine.resume())
        try:
            await asyncio.shield(resuming)
        except asyncio.CancelledError:
            await asyncio.wait({resuming}, timeout=_RESUME_S)
            raise
        finally:
            if resuming.done() and not resuming.cancelled() and resuming.exception() is None:
                self._paused.discard(engine.url)

    def _serving(self, url: str, info: EngineInfo, load: EngineLoad, wanted: PolicyVersion | None) -> None:
        state = self._states.get(url)
        if state is None:
            return  # removed meanwhile
        step = version_step(info.version)
        circuit = look_succeeded(state.circuit)
        if circuit.state is CircuitState.OPEN:
            return  # requests made it so while it was looked at
        seen_at_s = self._now()
        if state.health in (Health.NEW, Health.DOWN):
            self._emit(PoolEvent(kind="up", url=url, at_s=seen_at_s, step=step))
        elif wanted is not None and state.step != step and state.health is not Health.UPDATING:
            self._live(url, wanted)  # the trainer pushed it
        if wanted is not None and wanted is self._wanted and info.version == wanted.pushed_name:
            self._pushed = True
        self._set(
            url, health=Health.UP, step=step, info=info, load=load, circuit=circuit, seen_at_s=seen_at_s, error=""
        )
        if self._on_load is not None:
            self._on_load(url, seen_at_s, load)
        capacity = EngineCapacity(
            budget_tokens=info.max_total_tokens,
            context_length=info.context_length,
            step=None if state.draining else step,
        )
        self._granted(self._admission.set_engine(url, capacity))

    def _failed(self, url: str, error: EngineError) -> None:
        state = self._states.get(url)
        if state is None:
            return
        circuit = look_failed(state.circuit, self._rules, now_s=_clock(), serving=state.step is not None)
        self._set(url, circuit=circuit, error=str(error))
        if circuit.state is not CircuitState.CLOSED:
            self._down(url, str(error))

    def _down(self, url: str, why: str) -> None:
        known = self._states[url].health
        self._admission.unverify(url)
        self._set(url, health=Health.DOWN, step=None, error=why)
        if known is not Health.DOWN:
            _log.warning("engine %s is down: %s", url, why)
            self._emit(PoolEvent(kind="down", url=url, at_s=self._now(), detail=why))

    def _set(self, url: str, **changes: object) -> None:
        if url in self._states:
            self._states[url] = replace(self._states[url], **changes)  # type: ignore[arg-type]

    def _emit(self, event: PoolEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def _clock() -> float:
    """Of circuits and waits: the loop's, which never jumps."""
    return asyncio.get_running_loop().time()
