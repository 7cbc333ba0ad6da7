"""Rates, leases and evictions: pure rules, and the file that several processes share."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.errors import SandboxStartError
from farm.sandbox import pacing
from farm.sandbox.account_limit import AccountLimit
from farm.sandbox.image_plan import HeldImage, evictions, full_name, registry_of
from farm.sandbox.pacing import Pace
from farm.sandbox.shared_state import locked, peek, try_lock

STEP = st.tuples(st.floats(0, 5), st.none() | st.floats(0, 3), st.floats(0, 20))


@given(st.lists(STEP, max_size=30), st.floats(0.1, 10))  # (time since the step before, refusal, patience)
def test_starts_are_apart_and_never_within_a_refusal(
    steps: list[tuple[float, float | None, float]], per_s: float
) -> None:
    pace, now_s, last_s, blocked_s = Pace(), 100.0, 0.0, 0.0
    for elapsed_s, refused_s, patience_s in steps:
        now_s += elapsed_s
        if refused_s is not None:
            pace = pacing.back_off(pace, now_s=now_s, wait_s=refused_s)
            blocked_s = max(blocked_s, now_s + refused_s)
        after, at_s = pacing.reserve(pace, now_s=now_s, per_s=per_s, by_s=now_s + patience_s)
        assert at_s >= max(now_s, blocked_s)
        assert at_s - last_s >= 1 / per_s - 1e-6
        if at_s > now_s + patience_s:  # too late for this one: nobody behind it waits longer for that
            assert after == pace
        else:
            last_s = at_s
        pace = after


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 100)), st.floats(0, 100), st.integers(1, 5))
def test_leases_expire(leases: dict[str, float], now_s: float, limit: int) -> None:
    held = pacing.held(leases, now_s=now_s)
    assert all(leases[name] > now_s for name in held)
    assert pacing.has_room(leases, now_s=now_s, limit=limit) == (len(held) < limit)


IMAGES = st.lists(
    st.builds(
        HeldImage,
        name=st.sampled_from([f"image-{n}" for n in range(9)]),
        bytes=st.integers(0, 50),
        used_at_s=st.floats(0, 100),
    ),
    unique_by=lambda image: image.name,
)


@given(IMAGES, st.integers(0, 100), st.integers(0, 60), st.sets(st.sampled_from(["image-1", "image-2"])))
def test_evictions(images: list[HeldImage], budget: int, room: int, in_use: set[str]) -> None:
    gone = evictions(images, budget_bytes=budget, room_bytes=room, now_s=100.0, in_use=in_use, keep_s=20.0)
    known = {image.name: image for image in images}
    may_go = [image for image in images if image.name not in in_use and image.used_at_s <= 80.0]
    assert set(gone) <= {image.name for image in may_go}
    left = sum(image.bytes for image in images if image.name not in gone) + room
    assert left <= budget or len(gone) == len(may_go)
    if gone:  # not one more than needed, and the longest unused first
        assert left + known[gone[-1]].bytes > budget
        newest = max(known[name].used_at_s for name in gone)
        assert all(image.used_at_s >= newest for image in may_go if image.name not in gone)


@pytest.mark.parametrize(
    ("image", "registry", "whole"),
    [
        ("swebench/sweb.eval.x86_64.a_1776_a-1", "docker.io", "swebench/sweb.eval.x86_64.a_1776_a-1:latest"),
        ("ubuntu", "docker.io", "ubuntu:latest"),
        ("ghcr.io/a/b:2", "ghcr.io", "ghcr.io/a/b:2"),
        ("127.0.0.1:5000/a", "127.0.0.1:5000", "127.0.0.1:5000/a:latest"),
        ("localhost/a@sha256:0", "localhost", "localhost/a@sha256:0"),
    ],
)
def test_names_of_images(image: str, registry: str, whole: str) -> None:
    assert (registry_of(image), full_name(image)) == (registry, whole)


def test_a_shared_file_loses_no_change_of_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    add = (
        "import sys\nfrom pathlib import Path\nfrom farm.sandbox.shared_state import locked\n"
        "for _ in range(50):\n"
        "    with locked(Path(sys.argv[1])) as state:\n"
        "        state['n'] = state.get('n', 0) + 1\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", add, str(path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert peek(path) == {"n": 150}
    path.write_text('{"n": 1')
    with locked(path) as state:
        assert state == {}


def test_a_lock_that_is_held(tmp_path: Path) -> None:
    with try_lock(tmp_path / "lock") as first, try_lock(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with try_lock(tmp_path / "lock") as third:
        assert third


def test_an_account_holds_no_more_than_it_may(tmp_path: Path) -> None:
    clock = [1000.0]
    one, two = (AccountLimit(tmp_path, creates_per_s=1000.0, concurrent=2, now=lambda: clock[0]) for _ in range(2))

    async def run() -> None:
        await one.acquire("a", until_s=1010.0, deadline_at_s=1100.0)
        await two.acquire("b", until_s=1020.0, deadline_at_s=1100.0)
        with pytest.raises(SandboxStartError, match="2 at once"):
            await one.acquire("c", until_s=1020.0, deadline_at_s=1000.1)
        assert two.held() == 2
        clock[0] = 1011.0  # whoever held a has died: its lease is over
        await one.acquire("c", until_s=1020.0, deadline_at_s=1100.0)
        await two.release("b")
        await two.release("b")
        assert one.held() == 1

    asyncio.run(run())


def test_who_finds_no_place_in_time_puts_nobody_off(tmp_path: Path) -> None:
    """However often it is tried: only the creations that happen count."""
    clock = [1000.0]
    limit = AccountLimit(tmp_path, creates_per_s=0.01, concurrent=99, now=lambda: clock[0])

    async def run() -> None:
        await limit.acquire("first", until_s=5000.0, deadline_at_s=1000.0)
        for number in range(20):
            with pytest.raises(SandboxStartError):
                await limit.acquire(f"late-{number}", until_s=5000.0, deadline_at_s=1050.0)
            with pytest.raises(SandboxStartError):
                await limit.another(deadline_at_s=1050.0)
        assert limit.held() == 1
        clock[0] = 1100.0
        await limit.acquire("next", until_s=5000.0, deadline_at_s=1100.0)

    asyncio.run(run())


def test_a_refusal_holds_for_everybody(tmp_path: Path) -> None:
    clock = [1000.0]
    one, two = (AccountLimit(tmp_path, creates_per_s=5.0, concurrent=9, now=lambda: clock[0]) for _ in range(2))

    async def run() -> None:
        await one.back_off(30.0)
        with pytest.raises(SandboxStartError) as caught:
            await two.acquire("a", until_s=1100.0, deadline_at_s=1020.0)
        assert (caught.value.kind, caught.value.retryable) == ("account_wait", True)

    asyncio.run(run())
