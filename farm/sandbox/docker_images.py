"""The images of one Docker daemon: there already, or pulled in turn, and kept within a budget of disk space.

What the farm pulled stands in a ledger per daemon below the user's state directory, which all processes of this user
share. So pulls of several workers are paced together, the longest unused image goes first when the budget is full, and
what the farm did not pull is never removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from farm.errors import SandboxStartError
from farm.sandbox import pacing
from farm.sandbox.build_context import BuildContext, build_context, digest_of
from farm.sandbox.docker_daemon import Daemon, DockerError
from farm.sandbox.image_plan import HeldImage, evictions, full_name, registry_of
from farm.sandbox.pacing import Pace
from farm.sandbox.shared_state import locked, peek, try_lock

_KEEP_S = 600.0  # an image just used is about to be used again
_NOTE_S = 60.0  # for so long an image that was there is believed to be there
_TURN_S = 0.5  # between looks whether another process has pulled it
_REFUSED_S = 60.0  # nobody asks a registry again that said "too many requests"
_TRIES = 3

_log = logging.getLogger(__name__)


class ImageStore:
    """``pulls_per_minute``: per registry, of all processes of this user together. ``budget_bytes``: of what the farm
    pulled (0: no limit; None: what there is and ``room`` more, :func:`farm.sandbox.docker_disk.room_for_images`)."""

    def __init__(
        self,
        daemon: Daemon,
        folder: Path,
        *,
        pulls_per_minute: float,
        budget_bytes: int | None,
        room: Callable[[], int] | None = None,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._daemon = daemon
        self._folder = folder
        self._per_s = pulls_per_minute / 60.0
        self._budget, self._room = budget_bytes, room
        self._kept: set[str] = set()  # made ready for a run by this process: none gives way to another
        self._now, self._sleep = now, sleep
        self._noted: dict[str, float] = {}  # when this process last saw an image, and wrote its use down
        self._workdirs: dict[str, str] = {}

    async def keep(self, image: str, *, deadline_at_s: float) -> None:
        """As :meth:`ensure`, and it stays: what is kept together has to fit into the budget together. Raises
        ``SandboxStartError`` (kind ``image_budget``) for the first that does not."""
        name = known_as(image)
        if not await self.has(name):
            await self._make_room()
            held = self.held()
            budget = self._limit(held)
            if budget is not None and sum(one.bytes for one in held) + _typical(held) > budget:
                raise SandboxStartError(
                    f"image {name}: does not fit beside the {len(self._kept)} that were made ready: images may take "
                    f"{max(0, budget) / 1e9:.1f} GB here; raise docker.image_budget_bytes (0: no limit), or give the "
                    "daemon a larger disk. A run does without: it pulls what is missing, and removes others for it",
                    kind="image_budget",
                    retryable=False,
                )
        self._kept.add(await self.ensure(image, deadline_at_s=deadline_at_s))

    async def ensure(self, image: str, *, deadline_at_s: float) -> str:
        """``image`` is there when this returns: pulled, or built where it names a folder
        (:mod:`farm.sandbox.build_context`). Gives the name that the daemon knows it by. Raises ``SandboxStartError``:
        kind ``image`` (no such one), ``build``, ``rate_limited``, ``disk_full``, ``image_wait``, ``registry_auth``,
        ``daemon``."""
        context = build_context(image)
        name = known_as(image)
        if self._now() - self._noted.get(name, 0.0) <= _NOTE_S:
            return name
        if not await self.has(name):
            obtain = self._pull if context is None else partial(self._build, context)
            await self._once(name, obtain, deadline_at_s)
        self._noted[name] = self._now()
        await asyncio.to_thread(self._touch, name)
        return name

    async def workdir(self, name: str) -> str:
        """The working directory that the image ``name`` says for itself. Raises ``SandboxStartError``."""
        if name not in self._workdirs:
            self._workdirs[name] = str((await self._inspect(name))["Config"].get("WorkingDir") or "/")
        return self._workdirs[name]

    def forget(self, image: str) -> None:
        """It was there, and is not any more."""
        self._noted.pop(known_as(image), None)
        self._workdirs.pop(known_as(image), None)

    async def has(self, image: str) -> bool:
        try:
            await self._daemon.call(f"image {image}", lambda client: client.inspect_image(image))
        except DockerError as error:
            if error.status == 404:
                return False
            raise start_error(error) from error
        return True

    def held(self) -> list[HeldImage]:
        """What the farm pulled, by the ledger."""
        return _images(peek(self._ledger))

    @property
    def _ledger(self) -> Path:
        return self._folder / "images.json"

    async def _once(self, name: str, obtain: Callable[[str, float], Awaitable[None]], deadline_at_s: float) -> None:
        """One process pulls or builds, the others wait for it."""
        lock = self._folder / f"pull-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
        while True:
            with try_lock(lock) as mine:
                if mine:
                    if not await self.has(name):
                        await obtain(name, deadline_at_s)
                    return
            if self._now() + _TURN_S > deadline_at_s:
                raise SandboxStartError(f"image {name}: another process is still at it", kind="image_wait")
            await self._sleep(_TURN_S)

    async def _pull(self, name: str, deadline_at_s: float) -> None:
        await self._make_room()
        for tries_left in reversed(range(_TRIES)):
            await self._wait_for_turn(name, deadline_at_s)
            _log.info("pulling %s", name)
            try:
                await self._daemon.pull(name, timeout_s=max(1.0, deadline_at_s - self._now()))
                break
            except DockerError as error:
                kind = error.fault.kind
                if kind == "rate_limited":
                    await asyncio.to_thread(self._back_off, registry_of(name))
                elif kind == "disk_full":
                    await self._evict(0)
                if kind not in ("rate_limited", "disk_full") or not tries_left:
                    raise start_error(error) from error
        await self._take_in(name)

    async def _build(self, context: BuildContext, name: str, deadline_at_s: float) -> None:
        await self._make_room()
        try:
            found = await asyncio.to_thread(digest_of, context.folder)
        except OSError as error:
            raise SandboxStartError(f"image of {context.folder}: {error}", kind="image", retryable=False) from error
        if found != context.digest:
            raise SandboxStartError(
                f"image of {context.folder}: the folder has changed since its tasks were read",
                kind="image",
                retryable=False,
            )
        _log.info("building %s of %s", name, context.folder)
        try:
            await self._daemon.build(str(context.folder), name, timeout_s=max(1.0, deadline_at_s - self._now()))
        except DockerError as error:
            raise start_error(error) from error
        await self._take_in(name)

    async def _take_in(self, name: str) -> None:
        """Write down that the farm brought it here."""
        size = int((await self._inspect(name))["Size"])
        await asyncio.to_thread(self._enter, name, size)
        await self._make_room(spare=name)

    async def _inspect(self, name: str) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = await self._daemon.call(
                f"image {name}", lambda client: client.inspect_image(name)
            )
        except DockerError as error:
            raise start_error(error) from error
        return found

    async def _wait_for_turn(self, name: str, deadline_at_s: float) -> None:
        """Until ``name`` may be pulled. A turn is taken when it has come, never ahead: whoever waits, gives up or dies
        waiting holds none, so the turns never run away from the pulls. Among those who wait there is no order."""
        while (wait_s := await asyncio.to_thread(self._take_turn, registry_of(name))) > 0.0:
            if self._now() + wait_s > deadline_at_s:
                raise SandboxStartError(
                    f"image {name}: no turn to pull it comes before the deadline; raise docker.pulls_per_minute, or "
                    "pull the images before the run with `farm images`",
                    kind="image_wait",
                )
            await self._sleep(wait_s)

    def _take_turn(self, registry: str) -> float:
        """0.0: it is taken; or in how many seconds to ask again, which is no earlier than it can come."""
        with locked(self._folder / "pulls.json") as paces:
            now_s = self._now()
            pace, at_s = pacing.reserve(Pace(**paces.get(registry, {})), now_s=now_s, per_s=self._per_s, by_s=now_s)
            paces[registry] = _plain(pace)
        return at_s - now_s

    def _back_off(self, registry: str) -> None:
        with locked(self._folder / "pulls.json") as paces:
            pace = Pace(**paces.get(registry, {}))
            paces[registry] = _plain(pacing.back_off(pace, now_s=self._now(), wait_s=_REFUSED_S))

    def _enter(self, name: str, size: int) -> None:
        with locked(self._ledger) as ledger:
            ledger[name] = {"bytes": size, "used_at_s": self._now()}

    def _touch(self, name: str) -> None:
        """So that eviction knows. Of images that are not the farm's nothing is noted."""
        with locked(self._ledger) as ledger:
            if name in ledger:
                ledger[name]["used_at_s"] = self._now()

    def _limit(self, held: list[HeldImage]) -> int | None:
        """What the farm's images may take; None: any amount."""
        if self._budget is not None:
            return self._budget or None
        return None if self._room is None else sum(image.bytes for image in held) + self._room()

    async def _make_room(self, *, spare: str = "") -> None:
        """Keep the budget: with room for one more, or beside ``spare``, which has just come."""
        held = await asyncio.to_thread(self.held)
        budget = self._limit(held)
        if budget is not None:
            await self._evict(budget, room_bytes=0 if spare else _typical(held), spare=spare)

    async def _evict(self, budget_bytes: int, *, room_bytes: int = 0, spare: str = "") -> None:
        """Remove what has to go. What the daemon refuses to remove stays, and is tried again next time."""
        in_use = {*await self._in_use(), *self._kept, spare}
        gone = evictions(
            self.held(),
            budget_bytes=budget_bytes,
            room_bytes=room_bytes,
            now_s=self._now(),
            in_use=in_use,
            keep_s=_KEEP_S,
        )
        for name in gone:
            with contextlib.suppress(DockerError):
                await self._remove(name)
                await asyncio.to_thread(self._strike, name)
                _log.info("removed %s to keep within the budget", name)

    async def _remove(self, name: str) -> None:
        try:
            await self._daemon.call(f"remove {name}", lambda client: client.remove_image(name))
        except DockerError as error:
            if error.status != 404:
                raise

    def _strike(self, name: str) -> None:
        with locked(self._ledger) as ledger:
            ledger.pop(name, None)

    async def _in_use(self) -> set[str]:
        try:
            containers = await self._daemon.call("containers", lambda client: client.containers(all=True))
        except DockerError as error:
            raise start_error(error) from error
        return {full_name(str(container.get("Image", ""))) for container in containers}


def known_as(image: str) -> str:
    """The name that the daemon knows ``image`` by, once it is there."""
    context = build_context(image)
    return full_name(image) if context is None else context.image


def start_error(error: DockerError) -> SandboxStartError:
    return SandboxStartError(str(error), kind=error.fault.kind, retryable=error.fault.retryable)


def _images(ledger: Mapping[str, Any]) -> list[HeldImage]:
    return [HeldImage(name=name, bytes=row["bytes"], used_at_s=row["used_at_s"]) for name, row in ledger.items()]


def _typical(images: list[HeldImage]) -> int:
    """How much the next one may need: as much as the largest so far."""
    return max((image.bytes for image in images), default=0)


def _plain(pace: Pace) -> dict[str, float]:
    return {"next_at_s": pace.next_at_s, "blocked_until_s": pace.blocked_until_s}
