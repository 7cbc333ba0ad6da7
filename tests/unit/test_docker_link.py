"""The attach stream of a container: blocks of two streams in, frames out, cut anywhere."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.sandbox.channel import Closed
from farm.sandbox.docker_link import DockerLink


def block(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(data)) + data


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.lists(st.integers(1, 30), min_size=1), st.binary())
def test_frames_survive_any_cut(frames: list[bytes], cuts: list[int], noise: bytes) -> None:
    stream = b"".join(struct.pack(">L", len(frame)) + frame for frame in frames)
    raw, at = b"", 0
    for n in range(len(stream) + 1):
        size = cuts[n % len(cuts)]
        raw += block(1, stream[at : at + size]) + block(2, noise)
        at += size
        if at >= len(stream):
            break

    async def run() -> list[bytes]:
        mine, its = socket.socketpair()
        mine.setblocking(False)
        link = await DockerLink.over(mine)
        with its:
            its.sendall(raw)
            found = [await link.receive(timeout_s=5) for _ in frames]
        with pytest.raises(Closed):
            await link.receive(timeout_s=5)
        assert link.said.startswith(noise)
        await link.close()
        return found

    assert asyncio.run(run()) == frames


async def send_often(link: DockerLink, frame: bytes, *, timeout_s: float) -> None:
    for _ in range(100):
        await link.send(frame, timeout_s=timeout_s)
        await asyncio.sleep(0.001)


def test_time_outs_and_ends() -> None:
    async def run() -> None:
        mine, its = socket.socketpair()
        mine.setblocking(False)
        link = await DockerLink.over(mine)
        with its:
            with pytest.raises(TimeoutError):
                await link.receive(timeout_s=0.01)
            await link.send(b"hello", timeout_s=1)
            assert its.recv(100) == b"\0\0\0\5hello"
            its.setblocking(False)
            with pytest.raises(TimeoutError):
                await send_often(link, b"x" * 100_000, timeout_s=0.01)
        with pytest.raises(Closed):
            await send_often(link, b"x", timeout_s=1)
        link.shut()
        await link.close()

    asyncio.run(run())
