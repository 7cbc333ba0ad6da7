"""A real SGLang with little room: a full queue, retraction for want of KV, and what client and pool make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import real_sglang

from farm.admission import Ask
from farm.engine.sglang import SGLangEngine
from farm.errors import EngineError
from farm.pool import EnginePool, Health
from farm.protocols import EngineLoad, GenerateRequest
from farm.types import PolicyVersion, SamplingParams, version_name

BUDGET, CONTEXT = 600, 512
PATIENCE_S = 300.0  # on a machine at work elsewhere


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("policies")
    one, two = (real_sglang.write_model(folder / version_name(step), seed=step) for step in (0, 1))
    return one, two


@pytest.fixture(scope="module")
def url(policies: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--max-queued-requests", "3", "--schedule-conservativeness", "0.05", "--disable-radix-cache")
    with real_sglang.real_server(
        policies[0],
        tmp_path_factory.mktemp("server"),
        *options,
        max_total_tokens=BUDGET,
        context_length=CONTEXT,
        max_running_requests=4,
        version=version_name(0),
    ) as process:
        yield process.url


def run(url: str, scenario: Callable[[SGLangEngine], Awaitable[None]]) -> None:
    async def whole() -> None:
        engine = SGLangEngine(url, health_s=30.0)
        try:
            await engine.resume()
            await scenario(engine)
        finally:
            await engine.abort()
            await engine.close()

    asyncio.run(whole())


def ask(rid: str, new: int, *, prompt: int = 8) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=[(ord(rid[-1]) + n) % 500 + 5 for n in range(prompt)],
        max_new_tokens=new,
        stop_token_ids=(),
        sampling=SamplingParams(temperature=0.0),
    )


async def until(engine: SGLangEngine, condition: Callable[[EngineLoad], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await engine.load()):  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(0.02)


def test_it_says_what_it_has(url: str, policies: tuple[str, str]) -> None:
    async def scenario(engine: SGLangEngine) -> None:
        info = await engine.info()
        assert (info.version, info.model_path) == (version_name(0), policies[0])
        assert (info.max_total_tokens, info.context_length, info.max_running_requests) == (BUDGET, CONTEXT, 4)

    run(url, scenario)


def test_a_full_queue_and_a_long_prompt_have_kinds_of_their_own(url: str) -> None:
    async def scenario(engine: SGLangEngine) -> None:
        running = []
        for n in range(7):  # one by one: those that come together would all be in the queue for a moment
            running.append(asyncio.create_task(engine.generate(ask(f"r{n}", 400), timeout_s=PATIENCE_S)))
            await asyncio.sleep(0.2)
        await until(engine, lambda load: load.queued == 3)
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("one more", 4), timeout_s=PATIENCE_S)
        assert caught.value.kind == "queue_full"
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("long", 4, prompt=CONTEXT), timeout_s=PATIENCE_S)
        assert caught.value.kind == "status_400"
        await engine.abort()
        answers = await asyncio.gather(*running, return_exceptions=True)
        # A retracted request stands in the queue again, so it may have been full for one of the seven, too.
        turned_away = [answer for answer in answers if isinstance(answer, EngineError)]
        assert {error.kind for error in turned_away} <= {"queue_full"}
        aborted = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert {answer.finish_reason for answer in aborted} == {"abort"}
        assert len(aborted) + len(turned_away) == 7
        assert len(aborted) > 3, "more than the queue holds"

    run(url, scenario)


def test_retraction_for_want_of_kv_changes_no_token(url: str) -> None:
    """Requests whose ends can't be seen coming (there might be a stop token) are admitted on hope, and retracted."""

    async def scenario(engine: SGLangEngine) -> None:
        before = await engine.load()
        requests = [ask(f"r{n}", 300) for n in range(4)]
        together = await asyncio.gather(*(engine.generate(request, timeout_s=PATIENCE_S) for request in requests))
        after = await engine.load()
        assert after.retracted_total > before.retracted_total
        assert sum(answer.retractions for answer in together) > 0
        for request, answer in zip(requests, together, strict=True):
            alone = await engine.generate(request, timeout_s=PATIENCE_S)
            assert len(answer.output_ids) == len(answer.logprobs)
            assert answer.output_ids[:20] == alone.output_ids[:20]

    run(url, scenario)


def test_the_pool_fences_and_updates_it(url: str, policies: tuple[str, str]) -> None:
    """Pause, load, verify, resume on the real thing; nothing is admitted beyond its KV."""
    versions = [
        PolicyVersion(step=step, path=path, digest=f"{step}" * 64, published_at_s=0.0)
        for step, path in enumerate(policies)
    ]

    async def scenario(engine: SGLangEngine) -> None:
        pool = EnginePool(poll_s=0.2)
        pool.add(engine)
        keeper = asyncio.create_task(pool.supervise())
        try:
            pool.want(versions[0])
            first = await pool.acquire(Ask(key="a", group="g", tokens=CONTEXT), timeout_s=PATIENCE_S)
            assert first.step == 0
            assert pool.place(Ask(key="b", group="g", tokens=CONTEXT)) is None
            pool.release("a")
            pool.want(versions[1])
            async with asyncio.timeout(PATIENCE_S):
                while pool.states()[0].step != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert (await engine.generate(ask("x", 4), timeout_s=PATIENCE_S)).spans[0].step == 1
            await engine.pause()  # by somebody who then forgot
            async with asyncio.timeout(PATIENCE_S):
                while not await engine.healthy():  # noqa: ASYNC110 (the pool resumes it)
                    await asyncio.sleep(0.1)
            assert pool.states()[0].health is Health.UP
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
        await engine.load_weights(policies[0], step=0)

    run(url, scenario)


def test_cancelled_and_late_requests_end_on_the_server(url: str) -> None:
    async def scenario(engine: SGLangEngine) -> None:
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("late", 400), timeout_s=0.5)
        assert caught.value.kind == "timeout"
        cancelled = asyncio.create_task(engine.generate(ask("cancelled", 400), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        await until(engine, lambda load: load.running + load.queued == 0)

    run(url, scenario)
