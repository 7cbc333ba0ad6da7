"""One account's limits, kept by all workers together: how many sandboxes are created per second, and live at once.

The workers are processes on one or several hosts; what they share is a file in ``folder``. With a folder inside the run
(the default) the limits hold for one run, on all hosts that mount its folder; two runs on one account need one folder,
or a share of the limits each. There is no queue: among those who wait for a place the order is left to chance.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

from farm.errors import SandboxStartError
from farm.sandbox import pacing
from farm.sandbox.pacing import Pace
from farm.sandbox.served import uncancelled
from farm.sandbox.shared_state import locked, peek

_LOOK_S = (0.2, 0.6)  # between looks for a free place, drawn so that workers don't look all at once
_FILE = "account.json"


class AccountLimit:
    """``concurrent`` leases at most, granted ``creates_per_s`` at most."""

    def __init__(
        self, folder: Path, *, creates_per_s: float, concurrent: int, now: Callable[[], float] = time.time
    ) -> None:
        self._path = folder / _FILE
        self._per_s = creates_per_s
        self._concurrent = concurrent
        self._now = now

    async def acquire(self, key: str, *, until_s: float, deadline_at_s: float) -> None:
        """Wait until one more may be created. The lease ends at ``until_s`` by itself. Raises ``SandboxStartError``
        (kind ``account_wait``) when the place would come after ``deadline_at_s``; give the lease back in any case."""
        while True:
            # Not interrupted, or it is taken after the release.
            at_s = await uncancelled(asyncio.to_thread(self._take, key, until_s, deadline_at_s))
            wait_s = random.uniform(*_LOOK_S) if at_s is None else at_s - self._now()
            if self._now() + wait_s > deadline_at_s:
                raise SandboxStartError(
                    f"no place within the account's limits ({self._concurrent} at once, {self._per_s:g} created per "
                    "second) before the deadline; lower the concurrency of the run (cluster.workers x cluster.slots)",
                    kind="account_wait",
                )
            await asyncio.sleep(max(0.0, wait_s))
            if at_s is not None:
                return

    async def another(self, *, deadline_at_s: float) -> None:
        """Wait for the turn of one more creation under a lease that is held. Raises like :meth:`acquire`."""
        at_s = await asyncio.to_thread(self._reserve, deadline_at_s)
        if at_s > deadline_at_s:
            raise SandboxStartError("no turn to create it before the deadline", kind="account_wait")
        await asyncio.sleep(max(0.0, at_s - self._now()))

    async def release(self, key: str) -> None:
        await asyncio.to_thread(self._release, key)

    async def back_off(self, wait_s: float) -> None:
        """The service said no: nobody creates for ``wait_s``."""
        await asyncio.to_thread(self._back_off, wait_s)

    def held(self) -> int:
        """How many leases are held now."""
        return len(pacing.held(peek(self._path).get("leases", {}), now_s=self._now()))

    def _take(self, key: str, until_s: float, by_s: float) -> float | None:
        """When to create (after ``by_s``: nothing is taken); None when all places are taken."""
        now_s = self._now()
        with locked(self._path) as state:
            leases = pacing.held(state.get("leases", {}), now_s=now_s)
            state["leases"] = leases
            if not pacing.has_room(leases, now_s=now_s, limit=self._concurrent):
                return None
            pace, at_s = pacing.reserve(Pace(**state.get("pace", {})), now_s=now_s, per_s=self._per_s, by_s=by_s)
            if at_s <= by_s:
                leases[key] = until_s
            state["pace"] = _plain(pace)
        return at_s

    def _reserve(self, by_s: float) -> float:
        with locked(self._path) as state:
            pace = Pace(**state.get("pace", {}))
            pace, at_s = pacing.reserve(pace, now_s=self._now(), per_s=self._per_s, by_s=by_s)
            state["pace"] = _plain(pace)
        return at_s

    def _release(self, key: str) -> None:
        with locked(self._path) as state:
            state.get("leases", {}).pop(key, None)

    def _back_off(self, wait_s: float) -> None:
        with locked(self._path) as state:
            state["pace"] = _plain(pacing.back_off(Pace(**state.get("pace", {})), now_s=self._now(), wait_s=wait_s))


def _plain(pace: Pace) -> dict[str, float]:
    return {"next_at_s": pace.next_at_s, "blocked_until_s": pace.blocked_until_s}
