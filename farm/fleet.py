"""The engines of one farm: processes that are kept alive, behind a pool that keeps them on the newest policy.

An embedded engine that dies is taken out of the pool at once, so that nothing is sent to it, and started again on the
newest policy with a growing delay; the pool verifies it before it gets traffic (Rule 5). SGLang servers at given URLs
are only pooled: whoever runs them restarts them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm.admission import Ask
from farm.config import EngineConfig
from farm.elastic import EngineView
from farm.engine import make_engine
from farm.engine.launch import EngineOptions, EngineProcess, launch_engine
from farm.errors import EngineError, FarmError
from farm.farm_state import ProcessId
from farm.pool import EnginePool, PoolEvent
from farm.protocols import EngineLoad
from farm.service import Placement, until_first_ends
from farm.types import PolicyVersion

_WATCH_S = 0.2
_RESTART_DELAY_S = 0.5
_RESTART_DELAY_MAX_S = 30.0
_MAX_RESTARTS = 10  # in a row without having served
_PROVEN_S = 30.0  # an engine that lived this long starts the count anew

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    """The place of one embedded engine, over all its restarts."""

    name: str
    process: EngineProcess
    started_at_s: float
    restarts: int = 0
    failures: int = 0


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

    def __init__(self, config: EngineConfig, *, logs: Path) -> None:
        self._config = config
        self._pool = EnginePool(overcommit=config.overcommit, on_event=self._on_event, on_load=self._on_load)
        self._retractions = Retractions()
        self._logs = logs
        self._slots: list[_Slot] = []
        self._written: dict[str, EngineLoad] = {}

    # -- the driver's side ----------------------------------------------------------------------------

    def place(self, key: tuple[str, int], *, group_id: str, tokens: int) -> Placement | None:
        grant = self._pool.place(Ask(key=_name(key), group=group_id, tokens=tokens))
        return None if grant is None else Placement(url=grant.url, step=grant.step)

    def release(self, key: tuple[str, int]) -> None:
        self._pool.release(_name(key))

    def capacity(self, tokens: int) -> int:
        return self._pool.capacity(tokens)

    def want(self, version: PolicyVersion) -> None:
        self._pool.want(version)

    def view(self) -> EngineView | None:
        states = [(state, state.load) for state in self._pool.states() if state.load is not None]
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
        processes = {slot.process.url: slot for slot in self._slots}
        found = []
        for state in self._pool.states():
            slot = processes.get(state.url)
            process = None if slot is None else ProcessId.of(slot.process.process.pid)
            record: dict[str, Any] = {
                "url": state.url,
                "state": state.health.value,
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
        return found

    async def supervise(self) -> None:
        await until_first_ends(self._pool.supervise(), *(self._keep_alive(slot) for slot in self._slots))

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

    # -- processes ------------------------------------------------------------------------------------

    async def start(self, version: PolicyVersion) -> None:
        """Start what is ours and pool everything; verified later, by :meth:`supervise`."""
        self._pool.want(version)
        if self._config.kind == "sglang":
            for url in self._config.urls:
                self._pool.add(make_engine(url))
            return
        names = [f"engine-{number}" for number in range(self._config.count)]
        started = await asyncio.gather(*(self._launch(name) for name in names), return_exceptions=True)
        for name, process in zip(names, started, strict=True):
            if isinstance(process, EngineProcess):
                self._slots.append(_Slot(name=name, process=process, started_at_s=_clock()))
                self._pool.add(make_engine(process.url))
        for process in started:
            if isinstance(process, BaseException):
                raise process

    async def close(self) -> None:
        await self._pool.close()
        await asyncio.gather(*(slot.process.stop() for slot in self._slots))

    async def _launch(self, name: str) -> EngineProcess:
        version = self._pool.wanted
        assert version is not None
        options = EngineOptions(
            model=version.path,
            version=version.name,
            max_total_tokens=self._config.max_total_tokens,
            context_length=self._config.context_length,
            max_running_requests=self._config.max_running_requests,
        )
        return await launch_engine(options, run_folder=self._logs, name=name, timeout_s=self._config.start_timeout_s)

    async def _keep_alive(self, slot: _Slot) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            if slot.process.alive:
                continue
            code = slot.process.process.returncode
            _log.warning("engine %s (%s) ended with %s; starting it again", slot.name, slot.process.url, code)
            await self._pool.remove(slot.process.url)
            if _clock() - slot.started_at_s > _PROVEN_S:
                slot.failures = 0
            slot.process = await self._restart(slot)
            slot.started_at_s = _clock()
            slot.restarts += 1
            self._pool.add(make_engine(slot.process.url))

    async def _restart(self, slot: _Slot) -> EngineProcess:
        while True:
            await asyncio.sleep(min(_RESTART_DELAY_S * 2.0**slot.failures, _RESTART_DELAY_MAX_S))
            slot.failures += 1
            try:
                return await self._launch(slot.name)
            except FarmError as error:
                _log.warning("engine %s did not start: %s", slot.name, error)
                if slot.failures >= _MAX_RESTARTS:
                    raise EngineError(
                        f"{slot.name} did not come up in {slot.failures} tries, last: {error}", kind="start"
                    ) from error


async def start_fleet(config: EngineConfig, *, version: PolicyVersion, logs: Path) -> Fleet:
    """Engines on their way to serve ``version``. Nothing is left running when this raises.

    When a policy went live on an engine is written to ``logs/engines.jsonl``, what each engine says of its load (about
    once a second, while it changes) to ``logs/engine_metrics.jsonl``."""
    fleet = Fleet(config, logs=logs)
    try:
        await fleet.start(version)
    except BaseException:
        await fleet.close()
        raise
    return fleet


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]}-{key[1]}"


def _clock() -> float:
    return asyncio.get_running_loop().time()
