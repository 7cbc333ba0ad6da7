"""The engines of one farm: processes that are kept alive, behind a pool that keeps them on the newest policy.

An engine of the farm's own that dies is taken out of the pool at once, so that nothing is sent to it, and started again
on the newest policy with a growing delay; the pool verifies it before it gets traffic (Rule 5). One that won't start is
given up, unless it is the last. SGLang servers at given URLs are only pooled: whoever runs them restarts them.

What people order of single engines while the farm runs (drain, add, remove, replace) comes through
:mod:`farm.engine_orders`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm.admission import Ask
from farm.config import DEFAULT_POOL, EngineConfig, EnginePoolConfig
from farm.elastic import EngineView
from farm.engine import make_engine
from farm.engine.launch import (
    CommandOptions,
    EngineOptions,
    EngineProcess,
    free_port,
    launch_engine,
    share_out_gpus,
    visible_gpus,
)
from farm.engine_orders import Member, Orders, Step, next_steps
from farm.errors import EngineError, FarmError, UsageError
from farm.farm_state import ProcessId
from farm.pool import EnginePool, Health, PoolEvent
from farm.protocols import EngineLoad
from farm.service import Placement, until_first_ends
from farm.types import PolicyVersion

_WATCH_S = 0.2
_RESTART_DELAY_S = 0.5
_RESTART_DELAY_MAX_S = 30.0
_MAX_RESTARTS = 10  # in a row without having served
_PROVEN_S = 30.0  # an engine that lived this long starts the count anew
_ORDERS_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """The place of one engine of ours, over all its processes. ``process`` is None while there is none (it is being
    started, or was given up); ``replaced`` is the last order to replace it that was carried out."""

    name: str
    pool: str
    config: EnginePoolConfig
    gpus: tuple[str, ...] | None
    process: EngineProcess | None = None
    started_at_s: float = 0.0
    restarts: int = 0
    failures: int = 0
    replaced: int = 0
    retired: bool = False
    error: str = ""

    @property
    def url(self) -> str | None:
        return None if self.process is None else self.process.url


class Retractions:
    """Retractions for want of KV. A policy update pauses an engine by retracting what runs there, and those say nothing
    about its KV: what an engine counted up to its first load after an update is left out."""

    def __init__(self) -> None:
        self._updated_at_s: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._for_want_of_kv = 0

    def updated(self, url: str, at_s: float) -> None:
        self._updated_at_s[url] = at_s

    def total(self, loads: Mapping[str, tuple[float, int]]) -> int:
        """``loads``: URL -> (when it was looked at, retractions it has counted). Never falls."""
        for url, (seen_at_s, retracted) in loads.items():
            updated_at_s = self._updated_at_s.get(url)
            if updated_at_s is not None and seen_at_s < updated_at_s:
                continue  # looked at before the update: the next look tells
            more = retracted - self._seen.get(url, 0)
            self._seen[url] = retracted
            if updated_at_s is not None:
                del self._updated_at_s[url]
            elif more > 0:
                self._for_want_of_kv += more
        return self._for_want_of_kv


class Fleet:
    """Implements ``farm.service.Engines``. Use :func:`start_fleet`."""

    def __init__(self, config: EngineConfig, *, logs: Path, orders: Callable[[], Orders] = Orders) -> None:
        self._config = config
        self._pool = EnginePool(
            overcommit=config.overcommit,
            push_wait_s=config.push_wait_s if config.weights == "push" else 0.0,
            on_event=self._on_event,
            on_load=self._on_load,
        )
        self._retractions = Retractions()
        self._logs = logs
        self._orders = orders
        self._orders_error = ""
        self._slots: dict[str, _Slot] = {}
        self._others: dict[str, str] = {}  # URL of an engine that somebody else runs -> its pool
        self._written: dict[str, EngineLoad] = {}

    # -- the driver's side ----------------------------------------------------------------------------

    def place(self, key: tuple[str, int], *, group_id: str, tokens: int) -> Placement | None:
        grant = self._pool.place(Ask(key=_name(key), group=group_id, tokens=tokens))
        return None if grant is None else Placement(url=grant.url, step=grant.step)

    def witness(self, key: tuple[str, int], *, failed: str | None) -> None:
        self._pool.witness(_name(key), failed=failed)

    def release(self, key: tuple[str, int]) -> None:
        self._pool.release(_name(key))

    def capacity(self, tokens: int) -> int:
        capacity = self._pool.capacity(tokens)
        if not capacity and not self._may_hold(tokens):
            raise EngineError(self._nobody_holds(tokens), kind="no_engine")
        return capacity

    def want(self, version: PolicyVersion) -> None:
        self._pool.want(version)

    def view(self) -> EngineView | None:
        # The same engines as in capacity(): what a dead one said last would steer the farm for ever.
        states = [(state, state.load) for state in self._pool.states() if state.in_use and state.load is not None]
        if not states:
            return None
        loads = [load for _, load in states]
        counted = {state.url: (state.seen_at_s or 0.0, load.retracted_total) for state, load in states}
        return EngineView(
            queued=sum(load.queued for load in loads),
            used_tokens=sum(load.used_tokens for load in loads),
            max_total_tokens=sum(load.max_total_tokens for load in loads),
            retracted_total=self._retractions.total(counted),
        )

    def status(self) -> list[dict[str, Any]]:
        slots = {slot.url: slot for slot in self._slots.values()}
        found = []
        for state in self._pool.states():
            slot = slots.get(state.url)
            process = None if slot is None or slot.process is None else ProcessId.of(slot.process.process.pid)
            record: dict[str, Any] = {
                "name": state.url if slot is None else slot.name,
                "pool": self._others.get(state.url, DEFAULT_POOL) if slot is None else slot.pool,
                "url": state.url,
                "state": state.health.value,
                "draining": state.draining,
                "circuit": state.circuit.state.value,
                "version": None if state.info is None else state.info.version,
                "step": state.step,
                "error": state.error,
                "reserved_tokens": self._pool.reserved_tokens(state.url),
                "process": None if process is None else process.to_json(),
                "restarts": 0 if slot is None else slot.restarts,
            }
            if (load := state.load) is not None:
                record |= {
                    "running": load.running,
                    "queued": load.queued,
                    "used_tokens": load.used_tokens,
                    "max_total_tokens": load.max_total_tokens,
                    "retracted": load.retracted_total,
                    "generated_tokens": load.generated_tokens_total,
                }
            found.append(record)
        known = {record["url"] for record in found}
        found += [
            {
                "name": slot.name,
                "pool": slot.pool,
                "url": slot.url or "-",
                "state": "failed" if slot.error else "starting",
                "error": slot.error,
                "process": None,
                "restarts": slot.restarts,
            }
            for slot in self._slots.values()
            if slot.url not in known and not slot.retired
        ]
        return found

    async def supervise(self) -> None:
        keepers = [self._keep_alive(slot) for slot in self._slots.values()]
        await until_first_ends(self._pool.supervise(), self._follow_orders(), self._see_one_serve(), *keepers)

    async def _see_one_serve(self) -> None:
        """Engines that have never served by the time in which one may come up, and are not being loaded, never will:
        a server of another model refuses every load. Raises EngineError with what they said."""
        patience_s = max(pool.start_s for pool in self._config.named_pools.values())
        give_up_at_s = _clock() + patience_s
        while True:
            states = self._pool.states()
            if any(state.seen_at_s is not None for state in states):
                break
            hopeless = states and not self._on_the_way() and all(state.health is Health.DOWN for state in states)
            if hopeless and _clock() >= give_up_at_s:
                assert self._pool.wanted is not None
                said = "; ".join(f"{state.url}: {state.error}" for state in states)
                raise EngineError(
                    f"no engine has served policy {self._pool.wanted.name} within {patience_s:g} s "
                    f"(engine.start_timeout_s): {said[:1000]}",
                    kind="start",
                )
            await asyncio.sleep(_WATCH_S)
        await asyncio.Event().wait()

    def _may_hold(self, tokens: int) -> bool:
        """Whether waiting may help. Where all engines were removed, somebody may add one."""
        nobody = not self._slots and not self._others
        largest = [self._pool.largest_tokens(state.url) for state in self._pool.states()]
        return nobody or self._on_the_way() or any(size is None or size >= tokens for size in largest)

    def _on_the_way(self) -> bool:
        """Whether a process of ours is not in the pool and not given up: it is being started, or on its way out."""
        pooled = {state.url for state in self._pool.states()}
        return any(slot.url not in pooled and not slot.error for slot in self._slots.values())

    def _nobody_holds(self, tokens: int) -> str:
        sizes = [f"{state.url} holds {self._pool.largest_tokens(state.url)}" for state in self._pool.states()]
        given_up = [slot.error for slot in self._slots.values() if slot.error]
        return (
            f"no engine is left that could hold an episode of {tokens} tokens (limits.max_context_tokens): "
            f"{'; '.join(sizes + given_up)[:1000]}. Lower limits.max_context_tokens, or start the farm again with "
            "engines of a larger context_length and max_total_tokens"
        )

    def _on_event(self, event: PoolEvent) -> None:
        if event.kind == "live":
            self._retractions.updated(event.url, event.at_s)
        with (self._logs / "engines.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(event)) + "\n")

    def _on_load(self, url: str, at_s: float, load: EngineLoad) -> None:
        if load == self._written.get(url):
            return  # an idle engine fills no disk
        self._written[url] = load
        with (self._logs / "engine_metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": round(at_s, 3), "url": url, **asdict(load)}) + "\n")

    # -- orders ---------------------------------------------------------------------------------------

    async def _follow_orders(self) -> None:
        while True:
            try:
                orders = await asyncio.to_thread(self._orders)
            except UsageError as error:  # somebody edited it: what runs goes on
                if str(error) != self._orders_error:
                    _log.warning("%s", error)
                self._orders_error = str(error)
            else:
                self._orders_error = ""
                for step in next_steps(orders, self._members()):
                    await self._take(step, orders)
            await asyncio.sleep(_ORDERS_S)

    def _members(self) -> list[Member]:
        draining = {state.url: state.draining for state in self._pool.states()}
        members = []
        for name, url in [(slot.name, slot.url) for slot in self._slots.values()] + [(u, u) for u in self._others]:
            slot = self._slots.get(name)
            if url is None or url not in draining:
                continue  # between two processes: nothing can be done with it now
            members.append(
                Member(
                    name=name,
                    draining=draining[url],
                    reserved_tokens=self._pool.reserved_tokens(url),
                    own=slot is not None,
                    replaced=0 if slot is None else slot.replaced,
                )
            )
        return members

    async def _take(self, step: Step, orders: Orders) -> None:
        slot = self._slots.get(step.name)
        url = step.name if slot is None else slot.url
        assert url is not None
        _log.info("engine %s: %s, as ordered", step.name, step.do)
        match step.do:
            case "add":
                self._others[url] = orders.added[url]
                self._pool.add(make_engine(url))
            case "drain":
                self._pool.drain(url)
            case "undrain":
                self._pool.undrain(url)
            case "remove":
                await self._pool.remove(url)
                self._others.pop(url, None)
                if slot is not None:
                    slot.retired = True
                    await self._stop(slot)
                    del self._slots[slot.name]  # not before: whoever closes the fleet must find it
            case "replace":
                assert slot is not None
                slot.replaced = orders.replaced[slot.name]
                await self._stop(slot)  # its keeper takes it out of the pool and starts another one

    # -- processes ------------------------------------------------------------------------------------

    async def start(self, version: PolicyVersion) -> None:
        """Start what is ours and pool everything; verified later, by :meth:`supervise`."""
        self._pool.want(version)
        pools = self._config.named_pools
        places = [
            (_slot_name(name, number), name, pool)
            for name, pool in pools.items()
            if pool.kind != "sglang"
            for number in range(pool.count)
        ]
        gpus = share_out_gpus(visible_gpus(), [_gpus(pool) for _, _, pool in places])
        replaced = self._orders().replaced  # orders of before: this start has carried them out
        slots = [
            _Slot(name=name, pool=pool_name, config=pool, gpus=share, replaced=replaced.get(name, 0))
            for (name, pool_name, pool), share in zip(places, gpus, strict=True)
        ]
        started = await asyncio.gather(*(self._launch(slot) for slot in slots), return_exceptions=True)
        for slot, process in zip(slots, started, strict=True):
            if isinstance(process, EngineProcess):
                self._slots[slot.name] = slot
                self._began(slot, process)
        for process in started:
            if isinstance(process, BaseException):
                raise process
        for name, pool in pools.items():
            for url in pool.urls:
                self._others[url] = name
                self._pool.add(make_engine(url))

    async def close(self) -> None:
        await self._pool.close()
        await asyncio.gather(*(self._stop(slot) for slot in self._slots.values()))

    async def _stop(self, slot: _Slot) -> None:
        if slot.process is not None:
            await slot.process.stop()

    def _began(self, slot: _Slot, process: EngineProcess) -> None:
        slot.process = process
        slot.started_at_s = _clock()
        self._pool.add(make_engine(process.url))

    async def _launch(self, slot: _Slot) -> EngineProcess:
        version = self._pool.wanted
        assert version is not None
        config = slot.config
        options: EngineOptions | CommandOptions
        if config.kind == "embedded":
            options = EngineOptions(
                model=version.path,
                version=version.name,
                host=config.host,
                max_total_tokens=config.max_total_tokens,
                context_length=config.context_length,
                max_running_requests=config.max_running_requests,
            )
        else:
            options = CommandOptions(
                command=config.command,
                model=version.path,
                version=version.name,
                host=config.host,
                port=free_port(config.host),
                max_total_tokens=config.max_total_tokens,
                context_length=config.context_length,
                max_running_requests=config.max_running_requests,
                gpus=slot.gpus,
            )
        return await launch_engine(options, run_folder=self._logs, name=slot.name, timeout_s=config.start_s)

    async def _keep_alive(self, slot: _Slot) -> None:
        while not slot.retired:
            await asyncio.sleep(_WATCH_S)
            process = slot.process
            if slot.retired or process is None or process.alive:
                continue
            _log.warning(
                "engine %s (%s) ended with %s; starting it again", slot.name, process.url, process.process.returncode
            )
            slot.process = None
            await self._pool.remove(process.url)
            if _clock() - slot.started_at_s > _PROVEN_S:
                slot.failures = 0
            again = await self._restart(slot)
            if again is None:
                break
            slot.restarts += 1
            self._began(slot, again)
        await asyncio.Event().wait()  # nothing is left to do, and whoever ends here ends the farm

    async def _restart(self, slot: _Slot) -> EngineProcess | None:
        """None when it was given up."""
        while True:
            await asyncio.sleep(min(_RESTART_DELAY_S * 2.0**slot.failures, _RESTART_DELAY_MAX_S))
            slot.failures += 1
            try:
                return await self._launch(slot)
            except FarmError as error:
                _log.warning("engine %s did not start: %s", slot.name, error)
                if slot.failures < _MAX_RESTARTS:
                    continue
                slot.error = f"{slot.name} did not come up in {slot.failures} tries, last: {error}"
                if not self._others and all(other.error for other in self._slots.values()):
                    raise EngineError(slot.error, kind="start") from error
                _log.error("%s; it is given up, the others go on", slot.error)
                return None


async def start_fleet(
    config: EngineConfig, *, version: PolicyVersion, logs: Path, orders: Callable[[], Orders] = Orders
) -> Fleet:
    """Engines on their way to serve ``version``. Nothing is left running when this raises. ``orders`` is asked, in a
    thread, for what people want of single engines.

    When a policy went live on an engine is written to ``logs/engines.jsonl``, what each engine says of its load (about
    once a second, while it changes) to ``logs/engine_metrics.jsonl``."""
    fleet = Fleet(config, logs=logs, orders=orders)
    try:
        await fleet.start(version)
    except BaseException:
        await fleet.close()
        raise
    return fleet


def _slot_name(pool: str, number: int) -> str:
    return f"{'engine' if pool == DEFAULT_POOL else pool}-{number}"


def _gpus(pool: EnginePoolConfig) -> int:
    return pool.gpus_per_engine if pool.kind == "launch" else 0


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]}-{key[1]}"


def _clock() -> float:
    return asyncio.get_running_loop().time()
