"""One conformance suite for every Engine: the SGLang client against the embedded server and, where ``ci/sglang.sh`` has
installed it, against a real SGLang server; and the scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import real_sglang

from farm.engine import make_engine
from farm.engine.bench import BenchShape, write_random_model
from farm.engine.launch import EngineOptions, launch_engine
from farm.engine.scripted import ScriptedEngine
from farm.errors import EngineError, UsageError
from farm.protocols import Engine, EngineLoad, GenerateRequest, Generation
from farm.types import SamplingParams

SHAPE = BenchShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
BUDGET, CONTEXT = 4096, 1024


@dataclass(frozen=True)
class Ground:
    """What a suite's engine stands on: how to make a client, and two policies' folders."""

    make: Callable[[str], Engine]
    policies: tuple[str, str]


KINDS = ["embedded", "scripted", *(["sglang"] if real_sglang.PYTHON else [])]


@pytest.fixture(scope="module", params=KINDS)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sglang":
        url, policies = request.getfixturevalue("sglang_server")
        yield Ground(make=lambda _version: make_engine(url), policies=policies)
        return
    for seed, name in enumerate(("one", "two")):
        write_random_model(folder / name, SHAPE, seed=seed)
    policies = (str(folder / "one"), str(folder / "two"))
    if request.param == "scripted":
        yield Ground(make=_scripted, policies=policies)
        return
    options = EngineOptions(model=policies[0], max_total_tokens=BUDGET, context_length=CONTEXT, max_running_requests=8)
    process = asyncio.run(launch_engine(options, run_folder=folder))
    yield Ground(make=lambda _version: make_engine(process.url), policies=policies)
    asyncio.run(process.stop())


def _scripted(version: str) -> Engine:
    def answer(asked: GenerateRequest) -> Sequence[int]:
        return [(asked.input_ids[-1] + n) % 64 for n in range(asked.max_new_tokens)]

    return ScriptedEngine(
        answer, version=version, max_total_tokens=BUDGET, context_length=CONTEXT, max_running_requests=8
    )


def run(ground: Ground, scenario: Callable[[Engine], Awaitable[None]], *, step: int | None = 1) -> None:
    """Run on an engine that serves policy ``step`` from the first folder."""

    async def whole() -> None:
        engine = ground.make("default")
        try:
            await engine.resume()
            if step is not None:
                await engine.pause()
                await engine.load_weights(ground.policies[0], step=step)
                await engine.resume()
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(whole())


def ask(
    rid: str, new: int = 8, *, prompt: Sequence[int] = (1, 2, 3), stop: tuple[int, ...] = (), temperature: float = 0.0
) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=prompt,
        max_new_tokens=new,
        stop_token_ids=stop,
        sampling=SamplingParams(temperature=temperature, seed=5),
    )


async def hold(engine: Engine) -> None:
    """Let requests last for a while. A real model takes its time; and what SGLang is sent while it is paused waits
    before its scheduler, where nothing can be seen or aborted of it."""
    if isinstance(engine, ScriptedEngine):
        await engine.pause()


async def until(engine: Engine, condition: Callable[[EngineLoad], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition(await engine.load()):  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(0.01)


def check_whole(answer: Generation) -> None:
    assert len(answer.output_ids) == len(answer.logprobs)
    assert all(logprob <= 0 for logprob in answer.logprobs)
    edges = [0, *(span.end for span in answer.spans)]
    assert [span.start for span in answer.spans] == edges[:-1]
    assert edges[-1] == len(answer.output_ids)


def test_it_samples_what_was_asked(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        answer = await engine.generate(ask("a", 8), timeout_s=60)
        check_whole(answer)
        assert len(answer.output_ids) == 8
        assert answer.finish_reason == "length"
        assert answer.prompt_tokens == 3
        assert [span.step for span in answer.spans] == [1]
        again = await engine.generate(ask("b", 8), timeout_s=60)
        assert again.output_ids == answer.output_ids

    run(ground, scenario)


def test_a_stop_token_ends_it_and_is_kept(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        free = await engine.generate(ask("a", 8), timeout_s=60)
        stop = free.output_ids[3]
        answer = await engine.generate(ask("b", 8, stop=(stop,)), timeout_s=60)
        check_whole(answer)
        assert answer.finish_reason == "stop"
        assert answer.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]

    run(ground, scenario)


def test_tokens_of_weights_that_are_no_policy_are_refused(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("a"), timeout_s=60)
        assert caught.value.kind == "unverified_weights"

    if isinstance(ground.make("default"), ScriptedEngine):
        run(ground, scenario, step=None)
        return

    async def renamed(engine: Engine) -> None:
        # The server is shared: make it forget that it serves a policy, as after a restart.
        import aiohttp

        body = {"new_version": "default"}
        async with aiohttp.ClientSession() as session, session.post(engine.url + "/update_weight_version", json=body):
            pass
        await scenario(engine)

    run(ground, renamed)


def test_weights_are_swapped_by_pause_load_verify_resume(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        before = await engine.info()
        assert before.version == "step-000001"
        await engine.pause()
        await engine.load_weights(ground.policies[1], step=2)
        after = await engine.info()
        await engine.resume()
        assert (after.version, after.model_path) == ("step-000002", ground.policies[1])
        assert (after.max_total_tokens, after.context_length, after.max_running_requests) == (BUDGET, CONTEXT, 8)
        answer = await engine.generate(ask("a"), timeout_s=60)
        assert [span.step for span in answer.spans] == [2]

    run(ground, scenario)


def test_a_paused_engine_keeps_requests_and_answers_after_it_is_resumed(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.pause()
        assert not await engine.healthy()
        waiting = asyncio.create_task(engine.generate(ask("a"), timeout_s=60))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        await engine.resume()
        check_whole(await waiting)
        assert await engine.healthy()

    run(ground, scenario)


def test_abort_ends_a_request_with_what_it_has(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        await hold(engine)
        requests = [asyncio.create_task(engine.generate(ask(rid, 900), timeout_s=60)) for rid in ("e-1", "e-10")]
        await until(engine, lambda load: load.running + load.queued == 2)
        await engine.abort("e-1")
        answer = await requests[0]
        assert answer.finish_reason == "abort"
        check_whole(answer)
        assert not requests[1].done(), "an rid that only begins alike goes on"
        await engine.abort()
        assert (await requests[1]).finish_reason == "abort"
        await engine.resume()

    run(ground, scenario)


def test_time_outs_and_cancellation_end_the_request_on_the_engine(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        await hold(engine)
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("a", 900), timeout_s=0.1)
        assert caught.value.kind == "timeout"
        cancelled = asyncio.create_task(engine.generate(ask("b", 900), timeout_s=60))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        await until(engine, lambda load: load.running + load.queued == 0)
        await engine.resume()

    run(ground, scenario)


def test_load_counts(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        before = await engine.load()
        await engine.generate(ask("a", 8), timeout_s=60)
        after = await engine.load()
        assert after.generated_tokens_total - before.generated_tokens_total == 8
        assert after.max_total_tokens == BUDGET
        assert (after.running, after.queued) == (0, 0)

    run(ground, scenario)


def test_many_at_once_are_all_answered(ground: Ground) -> None:
    async def scenario(engine: Engine) -> None:
        answers = await asyncio.gather(
            *(
                engine.generate(ask(f"r{n}", 1 + n % 7, prompt=[n % 64, 7], temperature=1.0), timeout_s=60)
                for n in range(200)
            )
        )
        for n, answer in enumerate(answers):
            check_whole(answer)
            assert len(answer.output_ids) == 1 + n % 7 or answer.finish_reason == "stop"

    run(ground, scenario)


def test_an_unknown_kind_and_a_bad_url_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="engine kind 'vllm' is unknown; allowed: sglang"):
        make_engine("http://x", kind="vllm")
    with pytest.raises(UsageError, match="must begin with http"):
        make_engine("localhost:30000")
