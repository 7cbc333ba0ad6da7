"""Weights from the trainer's side into embedded engines over a gloo process group, and what the pool makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import push_cases
import pytest

from farm.admission import Ask
from farm.engine.bench import BenchShape, write_random_model
from farm.engine.launch import EngineOptions, EngineProcess, launch_engine
from farm.engine.sglang import SGLangEngine
from farm.pool import EnginePool, PoolEvent
from trainer.megatron.push import PushRules, push
from trainer.megatron.push_group import PushError

SHAPE = BenchShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate(("one", "two")):
        write_random_model(folder / name, SHAPE, seed=seed)
    return str(folder / "one"), str(folder / "two")


@pytest.fixture(scope="module")
def servers(policies: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    folder = tmp_path_factory.mktemp("servers")
    options = EngineOptions(model=policies[0], context_length=1024, max_running_requests=8)

    async def start() -> list[EngineProcess]:
        names = ("a", "b")
        return list(await asyncio.gather(*(launch_engine(options, run_folder=folder, name=name) for name in names)))

    processes = asyncio.run(start())
    yield processes
    for process in processes:
        asyncio.run(process.stop())


@pytest.mark.parametrize("case", push_cases.CASES, ids=lambda case: case.__name__)
def test_a_push(
    case: Callable[[str, tuple[str, str]], None], servers: list[EngineProcess], policies: tuple[str, str]
) -> None:
    case(servers[0].url, policies)


def test_several_engines_get_it_by_one_broadcast(servers: list[EngineProcess], policies: tuple[str, str]) -> None:
    urls = [process.url for process in servers]
    version = push_cases.version_of(policies[1], 7)
    push(urls, push_cases.buckets_of(policies[1], max_bytes=30_000), version=version.pushed_name, rules=PushRules())
    answers = [push_cases.sample(url) for url in urls]
    assert answers[0].output_ids == answers[1].output_ids
    assert {span.step for answer in answers for span in answer.spans} == {7}


def test_the_pool_waits_for_a_push_and_loads_from_disk_when_none_comes(
    servers: list[EngineProcess], policies: tuple[str, str]
) -> None:
    url = servers[0].url
    push_cases.load(url, policies[0], 1)
    events: list[PoolEvent] = []

    async def scenario() -> None:
        pool = EnginePool(poll_s=0.05, push_wait_s=3.0, on_event=events.append)
        pool.add(SGLangEngine(url))
        keeper = asyncio.create_task(pool.supervise())

        async def until_step(step: int) -> None:
            async with asyncio.timeout(20):
                while pool.states()[0].step != step:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        try:
            pool.want(push_cases.version_of(policies[0], 1))
            await until_step(1)
            second = push_cases.version_of(policies[1], 2)
            pool.want(second)
            await asyncio.sleep(0.3)
            assert pool.states()[0].step == 1, "it serves on while the push is on its way"
            buckets = push_cases.buckets_of(policies[1])
            await asyncio.to_thread(push, [url], buckets, version=second.pushed_name, rules=PushRules())
            await until_step(2)
            info = pool.states()[0].info
            assert info is not None
            assert info.version == second.pushed_name
            pool.want(push_cases.version_of(policies[0], 3))
            await until_step(3)
            info = pool.states()[0].info
            assert info is not None
            assert (info.version, info.model_path) == ("step-000003", policies[0])
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
            await pool.close()

    asyncio.run(scenario())
    assert [event.step for event in events if event.kind == "live"] == [2, 3]


def test_an_engine_left_half_way_is_fenced_until_the_pool_has_mended_it(
    servers: list[EngineProcess], policies: tuple[str, str]
) -> None:
    url = servers[0].url
    push_cases.load(url, policies[0], 1)
    second = push_cases.version_of(policies[1], 2)

    async def scenario() -> None:
        pool = EnginePool(poll_s=0.05, push_wait_s=5.0)
        pool.add(SGLangEngine(url))
        keeper = asyncio.create_task(pool.supervise())
        try:
            pool.want(push_cases.version_of(policies[0], 1))
            async with asyncio.timeout(20):
                while pool.states()[0].step != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            pool.want(second)
            weights = push_cases.weights_of(policies[1])
            weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
            buckets = push_cases.buckets(weights)
            with pytest.raises(PushError):
                await asyncio.to_thread(push, [url], buckets, version=second.pushed_name, rules=PushRules())
            async with asyncio.timeout(20):
                while pool.states()[0].step != 2:
                    assert pool.states()[0].step is not None or pool.place(Ask(key="e", group="g", tokens=64)) is None
                    await asyncio.sleep(0.01)
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
            await pool.close()

    asyncio.run(scenario())
    assert [span.step for span in push_cases.sample(url).spans] == [2]
