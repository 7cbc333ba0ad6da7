"""Who starts and ends the workers of a cluster. Each crew goes towards a wanted number, step by step.

None of them ends a worker that may hold an episode: the scheduler's plan (:mod:`farm.cluster.on_scheduler`) drains the
surplus, and only what it calls empty is closed (Rule 8).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from distributed import Client, LocalCluster

from farm.cluster.launcher import REFUSED, Phase, WorkerLauncher, WorkerState
from farm.cluster.roster import Roster, RosterRules, Seen, after_failure, next_steps
from farm.errors import FarmError

_PLAN_S = 30.0
_CLOSE_S = 20.0
_RETIRE_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What the scheduler says: names of workers that take work, and of those that only finish theirs. Of the latter,
    the empty ones by name (as Dask knows it) and address."""

    live: frozenset[str]
    slots: int
    draining: frozenset[str]
    empty_names: tuple[Any, ...]
    empty_addresses: tuple[str, ...]


async def farm_plan(client: Client, want: int | None, leaving: frozenset[str] = frozenset()) -> PlanView:
    """Drain or undrain towards ``want`` workers (None: leave as is), drain those that are ``leaving``, and look."""
    call = client.scheduler.farm_plan(want=want, leaving=sorted(leaving))
    plan: dict[str, Any] = await asyncio.wait_for(call, timeout=_PLAN_S)
    return PlanView(
        live=frozenset(plan["live"]),
        slots=plan["slots"],
        draining=frozenset(plan["draining"]),
        empty_names=tuple(plan["empty_names"]),
        empty_addresses=tuple(plan["empty_addresses"]),
    )


async def retire(client: Client, addresses: tuple[str, ...]) -> None:
    """Close workers that are drained and empty. One that can't be told is tried again, or lost, by and by."""
    if addresses:
        try:
            await asyncio.wait_for(client.retire_workers(list(addresses), close_workers=True), timeout=_RETIRE_S)
        except (OSError, TimeoutError) as error:
            _log.warning("%d drained workers could not be closed (%s)", len(addresses), type(error).__name__)


class Crew(Protocol):
    @property
    def refusal(self) -> str:
        """The line of a worker that refused its host; "" when none did."""
        ...

    @property
    def last_failure(self) -> str:
        """Why the last worker that did not come or stay failed; "" when none did."""
        ...

    @property
    def waits(self) -> str:
        """What a worker that has not begun waits for; "" when none does."""
        ...

    @property
    def leaving(self) -> frozenset[str]:
        """Names of workers that will be taken away soon."""
        ...

    async def reach(self, want: int, plan: PlanView) -> None:
        """One step towards ``want`` live workers; called about twice a second."""
        ...

    async def close(self) -> None:
        """End every worker that this crew started, and the scheduler if it is its own. The client has closed."""
        ...


class LocalCrew:
    """Processes of this machine, kept alive by Dask's nannies."""

    refusal = ""
    last_failure = ""
    waits = ""
    leaving: frozenset[str] = frozenset()

    def __init__(self, local: LocalCluster) -> None:
        self._local = local

    async def reach(self, want: int, plan: PlanView) -> None:
        if plan.empty_names:
            await self._local.scale_down(list(plan.empty_names))
        missing = want + len(plan.draining) - len(plan.empty_names) - len(self._local.worker_spec)
        if missing > 0:
            self._local.scale(len(self._local.worker_spec) + missing)

    async def close(self) -> None:
        await asyncio.wait_for(self._local.close(), timeout=_CLOSE_S)


class JoinedCrew:
    """Workers of a scheduler that somebody else runs: the surplus is drained and closed, none is started."""

    refusal = ""
    last_failure = ""
    waits = ""
    leaving: frozenset[str] = frozenset()

    def __init__(self, client: Client, ends: contextlib.AsyncExitStack) -> None:
        self._client = client
        self._ends = ends

    async def reach(self, want: int, plan: PlanView) -> None:
        await retire(self._client, plan.empty_addresses)

    async def close(self) -> None:
        await self._ends.aclose()


class LaunchedCrew:
    """Workers that a launcher starts. ``ends``: what closes the launcher and the scheduler."""

    def __init__(
        self,
        client: Client,
        launcher: WorkerLauncher,
        rules: RosterRules,
        ends: contextlib.AsyncExitStack,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._ends = ends
        self._launcher = launcher
        self._rules = rules
        self._clock = clock
        self._roster = Roster()
        self._told = ""
        self._refusal = ""
        self._waits = ""
        self._leaving: frozenset[str] = frozenset()

    @property
    def refusal(self) -> str:
        return self._refusal

    @property
    def last_failure(self) -> str:
        return self._roster.last_failure

    @property
    def waits(self) -> str:
        return self._waits

    @property
    def leaving(self) -> frozenset[str]:
        return self._leaving

    async def reach(self, want: int, plan: PlanView) -> None:
        await retire(self._client, plan.empty_addresses)
        try:
            states = await self._launcher.look()
        except FarmError as error:
            self._tell(str(error))
            return
        self._leaving = frozenset(name for name, state in states.items() if state.leaving)
        self._hear_waiting(states, plan)
        seen = Seen(want=want, live=plan.live, draining=plan.draining, states=states)
        self._roster, steps = next_steps(self._roster, seen, self._rules, now_s=self._clock())
        for name, state in steps.failed:
            if state.code == REFUSED:
                self._refusal = state.message
            self._tell(f"{name} ({state.where}) failed: {state.message or f'exit code {state.code}'}")
        ends = [self._launcher.stop(name) for name in steps.stop]
        ends += [self._launcher.withdraw(name) for name in steps.withdraw]
        for ended in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(ended, FarmError):  # seen again, and tried again
                self._tell(str(ended))
            elif ended is not None:
                raise ended
        for name in steps.start:
            try:
                await self._launcher.start(name)
            except FarmError as error:
                self._roster = after_failure(self._roster, str(error), self._rules, now_s=self._clock())
                self._tell(str(error))
                break

    def _hear_waiting(self, states: Mapping[str, WorkerState], plan: PlanView) -> None:
        waiting = [state for state in states.values() if state.phase is Phase.WAITING and state.message]
        self._waits = waiting[0].message if waiting else ""
        for state in waiting:
            if state.hopeless:
                self._tell(state.message)
                if not plan.live:
                    self._refusal = state.message

    def _tell(self, message: str) -> None:
        if message != self._told:  # the same again and again fills no log
            _log.warning("%s", message)
        self._told = message

    async def close(self) -> None:
        await self._ends.aclose()
