"""The driver's side of a cluster on Dask: attempts out, one event for each back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from distributed import Client, Future, wait
from distributed.scheduler import KilledWorker

from farm.cluster import ClusterEvent, Finished, Lost, Size
from farm.cluster.crews import Crew, farm_plan
from farm.cluster.on_worker import cancel_attempt, run_attempt
from farm.errors import FarmError
from farm.types import Attempt

_CLOSE_S = 20.0
_GATHER_WINDOW_S = 0.005
_GATHER_S = 30.0
_CANCEL_S = 10.0

_log = logging.getLogger(__name__)


class DaskCluster:
    """:class:`Cluster` on Dask. Made by :mod:`farm.cluster.opening`."""

    def __init__(self, client: Client, crew: Crew) -> None:
        self._client = client
        self._crew = crew
        self._events: asyncio.Queue[ClusterEvent] = asyncio.Queue()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._fetching: dict[str, Future] = {}
        self._gathering: asyncio.Task[dict[str, tuple[str, Any]]] | None = None

    @property
    def address(self) -> str:
        return str(self._client.scheduler.address)

    @property
    def events(self) -> asyncio.Queue[ClusterEvent]:
        return self._events

    def submit(self, attempt: Attempt) -> None:
        key = attempt_key(attempt.episode.id, attempt.number)
        future = self._client.submit(run_attempt, key, attempt, key=key, pure=False, retries=0)
        follower = asyncio.create_task(self._follow(key, attempt.episode.id, attempt.number, future))
        self._followers[key] = follower
        follower.add_done_callback(lambda _: self._followers.pop(key, None))

    async def _follow(self, key: str, episode_id: str, number: int, future: Future) -> None:
        def lost(kind: str, message: str, worker: str = "") -> Lost:
            return Lost(episode_id=episode_id, number=number, worker=worker, kind=kind, message=message[:2000])

        event: ClusterEvent
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await wait(future)
            if future.status == "finished":
                state, result = await self._fetch(key, future)
                if state == "finished":
                    event = Finished(episode_id=episode_id, number=number, result=result)
                elif state == "preempted":
                    event = lost(state, "its worker was told to go", str(result))
                else:
                    event = lost("cancelled", "cancelled")
            elif future.status == "error":
                error = await future.exception()
                if isinstance(error, KilledWorker):
                    event = lost("worker_lost", "the worker died", str(getattr(error.last_worker, "name", "")))
                else:
                    event = lost("defect", f"{type(error).__name__}: {error}")
            else:  # the scheduler is gone or let go of the task
                event = lost("worker_lost", f"the cluster gave the task up ({future.status})")
        except Exception as error:  # the worker died between the result and its gathering
            event = lost("worker_lost", f"{type(error).__name__}: {error}")
        finally:
            future.release()
        self._events.put_nowait(event)

    async def _fetch(self, key: str, future: Future) -> tuple[str, Any]:
        """Results are gathered in batches: one round trip for all that finish within a few milliseconds."""
        self._fetching[key] = future
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._gather())
        results = await asyncio.shield(self._gathering)
        if key not in results:
            raise FarmError("its result could not be gathered", kind="gather")
        answer: tuple[str, Any] = results[key]
        return answer

    async def _gather(self) -> dict[str, tuple[str, Any]]:
        await asyncio.sleep(_GATHER_WINDOW_S)
        batch, self._fetching, self._gathering = self._fetching, {}, None
        try:
            return await self._results(batch)
        except TimeoutError:  # one whose worker is gone holds up the others
            each = [self._results({key: future}) for key, future in batch.items()]
            results = await asyncio.gather(*each, return_exceptions=True)
        return {key: result for some in results if isinstance(some, dict) for key, result in some.items()}

    async def _results(self, futures: dict[str, Future]) -> dict[str, tuple[str, Any]]:
        """Raises TimeoutError."""
        return dict(await asyncio.wait_for(self._client.gather(futures, errors="skip"), timeout=_GATHER_S))

    async def cancel(self, episode_id: str, number: int) -> None:
        key = attempt_key(episode_id, number)
        if key not in self._followers:
            return
        try:
            await asyncio.wait_for(self._client.run(cancel_attempt, key=key, on_error="ignore"), timeout=_CANCEL_S)
        except (TimeoutError, OSError) as error:  # its worker is gone or stuck: then its lease ends it
            _log.warning("%s could not be cancelled (%s)", key, type(error).__name__)

    async def scale(self, workers: int) -> Size:
        try:
            plan = await farm_plan(self._client, workers, self._crew.leaving)
        except (OSError, TimeoutError) as error:
            raise FarmError(
                f"the scheduler at {self.address} is gone ({type(error).__name__}); start it, and then the farm again "
                "on its folder",
                kind="scheduler_lost",
            ) from error
        await self._crew.reach(workers, plan)
        return Size(
            workers=len(plan.live),
            draining=len(plan.draining),
            slots=plan.slots,
            trouble=(self._crew.last_failure or self._crew.waits) if len(plan.live) < workers else "",
        )

    async def close(self) -> None:
        followers = list(self._followers.values())
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._client.close(), timeout=_CLOSE_S)
        await self._crew.close()


def attempt_key(episode_id: str, number: int) -> str:
    return f"attempt-{episode_id}-{number}"
