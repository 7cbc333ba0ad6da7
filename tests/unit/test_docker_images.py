"""When images are pulled, and which of them stay: on a clock and with a daemon of the test's own."""

from __future__ import annotations

import asyncio
import platform
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from farm.errors import SandboxStartError
from farm.sandbox import docker_faults
from farm.sandbox.docker_daemon import Daemon, DockerError
from farm.sandbox.docker_disk import room_for_images
from farm.sandbox.docker_images import ImageStore

NOW_S = 1_000_000.0
GONE = docker_faults.meaning(404, "No such image")
REFUSED = docker_faults.meaning(429, "toomanyrequests")

T = TypeVar("T")


class Clock:
    """Time passes only while all that :meth:`run` does is asleep, and then to the first wake-up: the same under any
    load of the machine."""

    def __init__(self) -> None:
        self.now_s = NOW_S
        self._at_work = 0
        self._wakes: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def run(self, *work: Awaitable[T]) -> list[T]:
        """At once; the first error is raised."""

        async def one(part: Awaitable[T]) -> T:
            try:
                return await part
            finally:
                self._at_work -= 1

        async def together() -> list[T]:
            self._at_work = len(work)
            return await asyncio.gather(*map(one, work))

        return asyncio.run(together())

    async def sleep(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        self._wakes.append(until_s)
        try:
            while self.now_s < until_s:
                await asyncio.sleep(0.001)
                if len(self._wakes) == self._at_work:
                    self.now_s = max(self.now_s, min(self._wakes))
        finally:
            self._wakes.remove(until_s)


class FakeDaemon:
    """Pulls what it is asked for at once. ``pulled``: (seconds since the start, name); ``refuse``: 429 so often."""

    def __init__(self, clock: Clock, *, size: int = 100) -> None:
        self._clock, self._size = clock, size
        self.pulled: list[tuple[float, str]] = []
        self.there: dict[str, int] = {}
        self.refuse = 0

    @property
    def used(self) -> int:
        return sum(self.there.values())

    async def call(self, what: str, work: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(0)
        return work(self)

    async def pull(self, image: str, *, timeout_s: float) -> None:
        self.pulled.append((self._clock.now_s - NOW_S, image))
        if self.refuse:
            self.refuse -= 1
            raise DockerError(f"pull {image}", "toomanyrequests", REFUSED, status=429)
        self.there[image] = self._size

    def inspect_image(self, image: str) -> dict[str, Any]:
        if image not in self.there:
            raise DockerError(f"image {image}", "No such image", GONE, status=404)
        return {"Size": self.there[image], "Config": {}}

    def remove_image(self, image: str) -> None:
        del self.there[image]

    def containers(self, **which: bool) -> list[dict[str, Any]]:
        return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def daemon(clock: Clock) -> FakeDaemon:
    return FakeDaemon(clock)


def store(daemon: FakeDaemon, clock: Clock, folder: Path, **changes: Any) -> ImageStore:
    given = {"pulls_per_minute": 6.0, "budget_bytes": 0, "now": clock, "sleep": clock.sleep, **changes}
    return ImageStore(cast(Daemon, daemon), folder, **given)


def test_each_registry_has_a_pace_of_its_own(daemon: FakeDaemon, clock: Clock, tmp_path: Path) -> None:
    """Of several processes together: two stores on one folder."""
    stores = [store(daemon, clock, tmp_path) for _ in range(2)]
    images = [f"{registry}/image-{n}:1" for registry in ("one.example", "two.example") for n in range(4)]

    clock.run(*(stores[n % 2].ensure(image, deadline_at_s=NOW_S + 600.0) for n, image in enumerate(images)))
    for registry in ("one.example", "two.example"):
        at_s = [seconds for seconds, name in daemon.pulled if name.startswith(registry)]
        assert at_s == [0.0, 10.0, 20.0, 30.0]
    assert sorted(name for _, name in daemon.pulled) == images


def test_who_gives_up_holds_no_turn(daemon: FakeDaemon, clock: Clock, tmp_path: Path) -> None:
    """Attempts whose deadline comes first fail, are issued again and fail again; the pulls go on at their pace."""
    made = store(daemon, clock, tmp_path, pulls_per_minute=0.3)

    async def run() -> None:
        await made.ensure("first", deadline_at_s=NOW_S)
        for number in range(50):
            with pytest.raises(SandboxStartError, match="farm images") as caught:
                await made.ensure(f"late-{number}", deadline_at_s=NOW_S + 150.0)
            assert (caught.value.kind, caught.value.retryable) == ("image_wait", True)
        await made.ensure("next", deadline_at_s=NOW_S + 250.0)

    clock.run(run())
    assert [name for _, name in daemon.pulled] == ["first:latest", "next:latest"]
    assert daemon.pulled[-1][0] == 200.0


def test_a_run_that_is_stopped_leaves_no_turns_taken(daemon: FakeDaemon, clock: Clock, tmp_path: Path) -> None:
    made = store(daemon, clock, tmp_path, pulls_per_minute=0.3)
    asleep: asyncio.Queue[float] = asyncio.Queue()

    async def for_ever(seconds: float) -> None:
        asleep.put_nowait(seconds)
        await asyncio.Event().wait()

    stopped = store(daemon, clock, tmp_path, pulls_per_minute=0.3, sleep=for_ever)

    async def run() -> None:
        await made.ensure("first", deadline_at_s=NOW_S)
        waiting = [asyncio.create_task(stopped.ensure(f"{n}", deadline_at_s=NOW_S + 9e6)) for n in range(28)]
        for _ in waiting:
            await asleep.get()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert all(task.cancelled() for task in waiting)
        await made.ensure("next", deadline_at_s=NOW_S + 250.0)

    clock.run(run())
    assert [name for _, name in daemon.pulled] == ["first:latest", "next:latest"]


def test_a_registry_that_has_had_enough_is_left_alone_for_a_minute(
    daemon: FakeDaemon, clock: Clock, tmp_path: Path
) -> None:
    daemon.refuse = 1
    made, other = (store(daemon, clock, tmp_path) for _ in range(2))

    async def run() -> None:
        await made.ensure("one", deadline_at_s=NOW_S + 600.0)
        await other.ensure("elsewhere.example/two", deadline_at_s=NOW_S + 600.0)

    clock.run(run())
    assert [seconds for seconds, _ in daemon.pulled] == [0.0, 60.0, 60.0]


# --------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("given", ["budget", "disk"])
def test_what_is_made_ready_together_has_to_fit_together(
    given: str, daemon: FakeDaemon, clock: Clock, tmp_path: Path
) -> None:
    """However old the first of them are by then: none of them gives way, and what does not fit is not pulled."""
    fits = {"budget_bytes": 350} if given == "budget" else {"budget_bytes": None, "room": lambda: 350 - daemon.used}
    old = store(daemon, clock, tmp_path, pulls_per_minute=600.0)
    made = store(daemon, clock, tmp_path, pulls_per_minute=600.0, **fits)

    async def run() -> None:
        await old.ensure("of-an-old-run", deadline_at_s=NOW_S + 60.0)
        for number in range(3):
            await clock.sleep(1_000.0)
            await made.keep(f"image-{number}", deadline_at_s=clock.now_s + 60.0)
        for number in (3, 4):
            await clock.sleep(1_000.0)
            with pytest.raises(SandboxStartError, match="does not fit beside the 3 that were made ready") as caught:
                await made.keep(f"image-{number}", deadline_at_s=clock.now_s + 60.0)
            assert (caught.value.kind, caught.value.retryable) == ("image_budget", False)

    clock.run(run())
    assert [*daemon.there] == ["image-0:latest", "image-1:latest", "image-2:latest"]
    assert len(daemon.pulled) == 1 + 3


def test_a_run_goes_on_with_more_images_than_the_disk_holds(daemon: FakeDaemon, clock: Clock, tmp_path: Path) -> None:
    """Without a word in the configuration: the longest unused gives way to the next."""
    made = store(daemon, clock, tmp_path, pulls_per_minute=600.0, budget_bytes=None, room=lambda: 250 - daemon.used)

    async def run() -> None:
        for number in range(5):
            await clock.sleep(1_000.0)
            await made.ensure(f"image-{number}", deadline_at_s=clock.now_s + 60.0)

    clock.run(run())
    assert [*daemon.there] == ["image-3:latest", "image-4:latest"]


@pytest.mark.parametrize("limits", [{"budget_bytes": 0, "room": lambda: -1}, {"budget_bytes": None}])
def test_where_no_limit_is_known_or_wanted_nothing_is_removed(
    limits: dict[str, Any], daemon: FakeDaemon, clock: Clock, tmp_path: Path
) -> None:
    made = store(daemon, clock, tmp_path, pulls_per_minute=600.0, **limits)

    async def run() -> None:
        for number in range(3):
            await clock.sleep(1_000.0)
            await made.keep(f"image-{number}", deadline_at_s=clock.now_s + 60.0)

    clock.run(run())
    assert len(daemon.there) == 3


def test_the_daemons_disk_is_seen_only_where_it_is_this_machines(tmp_path: Path) -> None:
    here = {"Name": platform.node(), "DockerRootDir": str(tmp_path)}
    room = room_for_images(here)
    assert room is not None
    assert room() < shutil.disk_usage(tmp_path).free
    for changes in ({"Name": "elsewhere"}, {"DockerRootDir": "/no/such/folder"}, {"DockerRootDir": ""}):
        assert room_for_images({**here, **changes}) is None
