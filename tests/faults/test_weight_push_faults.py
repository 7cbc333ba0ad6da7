"""A push of weights that goes wrong: whoever dies, hangs or comes late, no engine serves what it should not, the farm's
pool loads the published folder instead, and the trainer is not held up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import push_cases
import pytest
import torch
from push_engine import PushEngine, push_engine

from farm.admission import Ask
from farm.engine.bench import BenchShape, write_random_model
from farm.engine.launch import EngineOptions, EngineProcess, launch_engine
from farm.engine.sglang import SGLangEngine
from farm.pool import EnginePool, Health
from farm.types import PUSH_GIVEN_UP, PUSH_UNDER_WAY, PolicyVersion, version_name
from trainer.megatron.buckets import Outgoing
from trainer.megatron.push import PushRules, push
from trainer.megatron.push_group import PushError

SHAPE = BenchShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
BUCKET = 10_000  # bytes: about ten buckets
LONG_S = 600.0  # nothing here may wait for it


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[PolicyVersion]:
    folder = tmp_path_factory.mktemp("policies")
    found = []
    for step in range(2):
        write_random_model(folder / version_name(step), SHAPE, seed=step)
        found.append(push_cases.version_of(str(folder / version_name(step)), step))
    return found


async def engine(version: PolicyVersion, folder: Path, name: str) -> EngineProcess:
    options = EngineOptions(model=version.path, version=version.name, context_length=512, max_running_requests=4)
    return await launch_engine(options, run_folder=folder, name=name)


@pytest.fixture(scope="module")
def servers(versions: list[PolicyVersion], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Two engines for all that leave them alive."""
    folder = tmp_path_factory.mktemp("servers")

    async def start() -> list[EngineProcess]:
        return list(await asyncio.gather(*(engine(versions[0], folder, name) for name in ("one", "other"))))

    processes = asyncio.run(start())
    yield processes[0].url, processes[1].url
    for process in processes:
        asyncio.run(process.stop())


@pytest.fixture
def urls(servers: tuple[str, str], versions: list[PolicyVersion]) -> tuple[str, str]:
    """The two, serving the first policy."""
    for url in servers:
        push_cases.load(url, versions[0].path, 0)
    return servers


class Watched:
    """A supervised pool."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool

    def step(self, url: str) -> int | None:
        return next(state.step for state in self.pool.states() if state.url == url)

    async def until_step(self, step: int, *urls: str) -> None:
        async with asyncio.timeout(100):
            while any(self.step(url) != step for url in urls):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watched(version: PolicyVersion, *urls: str, push_wait_s: float) -> AsyncIterator[Watched]:
    pool = EnginePool(poll_s=0.1, push_wait_s=push_wait_s)
    for url in urls:
        pool.add(SGLangEngine(url))
    pool.want(version)
    keeper = asyncio.create_task(pool.supervise())
    try:
        seen = Watched(pool)
        await seen.until_step(version.step, *urls)
        yield seen
        assert not keeper.done(), keeper
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})
        await pool.close()


def test_an_engine_killed_in_a_push_does_not_hold_up_the_trainer_nor_the_other_engine(
    versions: list[PolicyVersion], urls: tuple[str, str], tmp_path: Path
) -> None:
    other = urls[1]

    async def scenario() -> None:
        dying = await engine(versions[0], tmp_path, "dying")

        def buckets() -> Iterator[Outgoing]:
            for number, bucket in enumerate(push_cases.buckets_of(versions[1].path, max_bytes=BUCKET)):
                if number == 3:
                    os.kill(dying.process.pid, signal.SIGKILL)
                    dying.process.wait()
                yield bucket

        try:
            async with watched(versions[0], dying.url, other, push_wait_s=LONG_S) as farm:
                farm.pool.want(versions[1])
                rules = PushRules(timeout_s=LONG_S)
                with pytest.raises(PushError):
                    await asyncio.to_thread(
                        push, [dying.url, other], buckets(), version=versions[1].pushed_name, rules=rules
                    )
                await farm.until_step(1, other)
                info = await push_cases.info_of(other)
                assert (info.version, info.model_path) == (versions[1].name, versions[1].path), "from disk"
        finally:
            await dying.stop()

    asyncio.run(scenario())


def test_an_engine_that_never_answers_begin_costs_the_push_its_time_and_no_more(
    versions: list[PolicyVersion], urls: tuple[str, str]
) -> None:
    good = urls[0]

    async def scenario(hung: PushEngine) -> None:
        async with watched(versions[0], good, push_wait_s=LONG_S) as farm:
            farm.pool.want(versions[1])
            started = time.monotonic()
            with pytest.raises(PushError, match="begin_weight_update"):
                await asyncio.to_thread(
                    push,
                    [good, hung.url],
                    push_cases.buckets_of(versions[1].path, max_bytes=BUCKET),
                    version=versions[1].pushed_name,
                    rules=PushRules(timeout_s=3.0),
                )
            assert time.monotonic() - started < LONG_S / 10
            await farm.until_step(1, good)
            assert (await push_cases.info_of(good)).version == versions[1].name
        assert hung.version == PUSH_GIVEN_UP
        assert not hung.tensors

    with push_engine(hang_at="/begin_weight_update") as hung:
        asyncio.run(scenario(hung))


def test_a_trainer_killed_in_a_push_leaves_a_fenced_engine_that_the_pool_loads_from_disk(
    versions: list[PolicyVersion], urls: tuple[str, str]
) -> None:
    url = urls[0]

    async def scenario() -> None:
        async with watched(versions[0], url, push_wait_s=6.0) as farm:
            farm.pool.want(versions[1])
            await asyncio.to_thread(push_cases.killed_in_a_push, url, versions[1])
            ask = Ask(key="e", group="g", tokens=64)
            while (await push_cases.info_of(url)).version == PUSH_UNDER_WAY:
                if farm.step(url) is None:
                    assert farm.pool.place(ask) is None
                    assert farm.pool.states()[0].health is not Health.DOWN, "paused is not dead"
                await asyncio.sleep(0.05)
            await farm.until_step(1, url)
            assert (await push_cases.info_of(url)).version == versions[1].name
            answer = await asyncio.to_thread(push_cases.sample, url)
            assert [span.step for span in answer.spans] == [1]

    asyncio.run(scenario())


def test_an_engine_that_joins_after_a_push_loads_from_disk_without_waiting_for_another(
    versions: list[PolicyVersion], urls: tuple[str, str]
) -> None:
    first, late = urls

    async def scenario() -> None:
        async with watched(versions[0], first, push_wait_s=LONG_S) as farm:
            farm.pool.want(versions[1])
            buckets = push_cases.buckets_of(versions[1].path, max_bytes=BUCKET)
            name = versions[1].pushed_name
            await asyncio.to_thread(push, [first], buckets, version=name, rules=PushRules())
            farm.pool.add(SGLangEngine(late))
            await farm.until_step(1, first, late)
            assert (await push_cases.info_of(first)).version == name
            assert (await push_cases.info_of(late)).version == versions[1].name

    asyncio.run(scenario())


def test_a_bucket_that_is_not_what_was_sent_is_refused(versions: list[PolicyVersion], urls: tuple[str, str]) -> None:
    def damaged() -> Iterator[Outgoing]:
        for number, bucket in enumerate(push_cases.buckets_of(versions[1].path, max_bytes=BUCKET)):
            if number == 2:
                tensors = [torch.zeros_like(tensor) for tensor in bucket.tensors]
                yield Outgoing(bucket=bucket.bucket, tensors=tensors, checksum=bucket.checksum)
            else:
                yield bucket

    with pytest.raises(PushError, match="checksum") as caught:
        push([urls[0]], damaged(), version=versions[1].pushed_name, rules=PushRules())
    assert caught.value.kind == "refused"
    assert push_cases.info(urls[0]).version == PUSH_GIVEN_UP
