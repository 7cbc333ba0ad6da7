from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from farm.admission import Ask
from farm.circuit import CircuitState
from farm.engine.scripted import ScriptedEngine
from farm.errors import EngineError
from farm.pool import EnginePool, Health, Move, PoolEvent, next_move, serves
from farm.protocols import EngineInfo
from farm.types import PUSH_GIVEN_UP, PUSH_UNDER_WAY, PolicyVersion, version_name


def policy(step: int) -> PolicyVersion:
    return PolicyVersion(step=step, path=f"/policies/{version_name(step)}", digest=f"d{step}", published_at_s=10.0)


def engine(url: str = "http://a", *, version: str = "default") -> ScriptedEngine:
    return ScriptedEngine(lambda request: [1] * request.max_new_tokens, url=url, version=version, control_timeout_s=0.2)


def ask(key: str, tokens: int = 512) -> Ask:
    return Ask(key=key, group=key, tokens=tokens)


class Watched:
    """A supervised pool with its events."""

    def __init__(self) -> None:
        self.events: list[PoolEvent] = []
        self.pool = EnginePool(poll_s=0.02, on_event=self.events.append, now=lambda: 12.0)

    def live(self) -> list[tuple[str, int | None]]:
        return [(event.url, event.step) for event in self.events if event.kind == "live"]


@contextlib.asynccontextmanager
async def supervised(*engines: ScriptedEngine) -> AsyncIterator[Watched]:
    watched = Watched()
    for one in engines:
        watched.pool.add(one)
    task = asyncio.create_task(watched.pool.supervise())
    try:
        yield watched
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait({task})
        await watched.pool.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (a condition over several objects)
            await asyncio.sleep(0.005)


def info(version: str, path: str) -> EngineInfo:
    return EngineInfo(model_path=path, version=version, max_total_tokens=1, context_length=1, max_running_requests=1)


def test_an_engine_serves_only_what_it_proves() -> None:
    assert next_move(info("step-000003", "/policies/step-000003/"), policy(3)) is Move.SERVE
    assert next_move(info("step-000002", "/policies/step-000002"), policy(3)) is Move.UPDATE
    assert next_move(info("step-000003", "base"), policy(3)) is Move.UPDATE, "a name alone proves nothing"
    assert next_move(info("default", "base"), policy(3)) is Move.UPDATE
    assert next_move(info("default", "base"), None) is Move.REFUSE
    assert next_move(info("step-000003", "anywhere"), None) is Move.SERVE


def test_engines_are_loaded_verified_and_resumed_side_by_side() -> None:
    async def scenario() -> None:
        a, b = engine("http://a"), engine("http://b")
        async with supervised(a, b) as watched:
            watched.pool.want(policy(1))
            await until(lambda: len(watched.live()) == 2)
            assert {url for url, _ in watched.live()} == {"http://a", "http://b"}
            for one in (a, b):
                methods = [m for m, _ in one.calls]
                start = methods.index("pause")
                assert methods[start : start + 4] == ["pause", "load_weights", "info", "resume"]
                assert not one.paused
            assert {event.seconds for event in watched.events if event.kind == "live"} == {2.0}
            await until(lambda: all(state.step == 1 for state in watched.pool.states()))

    asyncio.run(scenario())


def test_a_stalled_engine_does_not_hold_up_the_others() -> None:
    async def scenario() -> None:
        a, b = engine("http://a"), engine("http://b")
        a.stall("load_weights")
        async with supervised(a, b) as watched:
            watched.pool.want(policy(1))
            await until(lambda: ("http://b", 1) in watched.live())
            grant = await watched.pool.acquire(ask("e"), timeout_s=1)
            assert grant.url == "http://b"
            await until(lambda: any(event.kind == "down" and event.url == "http://a" for event in watched.events))
            assert not a.paused, "resumed after the time-out"
            a.release("load_weights")
            await until(lambda: ("http://a", 1) in watched.live())

    asyncio.run(scenario())


def test_no_traffic_before_verification() -> None:
    async def scenario() -> None:
        a = engine()
        async with supervised(a) as watched:
            await until(lambda: watched.pool.states()[0].health is Health.DOWN)
            assert watched.pool.place(ask("e")) is None
            watched.pool.want(policy(4))
            grant = await watched.pool.acquire(ask("e"), timeout_s=2)
            assert grant.step == 4

    asyncio.run(scenario())


def test_a_restarted_engine_is_loaded_again_before_it_gets_traffic() -> None:
    async def scenario() -> None:
        a = engine()
        async with supervised(a) as watched:
            watched.pool.want(policy(2))
            await until(lambda: watched.live() == [("http://a", 2)])
            a.stall("load_weights")
            a.restart()
            await until(lambda: watched.pool.states()[0].step is None)
            assert watched.pool.place(ask("e")) is None
            a.release("load_weights")
            await until(lambda: watched.live() == [("http://a", 2)] * 2)
            assert watched.pool.place(ask("e")) is not None

    asyncio.run(scenario())


def test_only_newer_policies_count_and_the_newest_of_several_wins() -> None:
    async def scenario() -> None:
        a = engine()
        async with supervised(a) as watched:
            watched.pool.want(policy(5))
            await until(lambda: watched.live() == [("http://a", 5)])
            for step in (5, 4, 6, 7, 8):
                watched.pool.want(policy(step))
            await until(lambda: watched.live()[-1] == ("http://a", 8))
            assert [detail for method, detail in a.calls if method == "load_weights"] == ["step-000005", "step-000008"]

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["pause", "load_weights"])
def test_an_error_in_an_update_never_leaves_the_engine_paused(method: str) -> None:
    async def scenario() -> None:
        a = engine()
        a.fail(method, EngineError("no", kind="status_400"))
        async with supervised(a) as watched:
            watched.pool.want(policy(1))
            await until(lambda: any(event.kind == "down" for event in watched.events))
            assert not a.paused
            assert watched.pool.place(ask("e")) is None
            await until(lambda: watched.live() == [("http://a", 1)])

    asyncio.run(scenario())


def test_a_resume_that_fails_is_tried_again() -> None:
    async def scenario() -> None:
        a = engine()
        a.fail("resume", EngineError("no", kind="timeout"), times=3)
        async with supervised(a) as watched:
            watched.pool.want(policy(1))
            await until(lambda: watched.pool.states()[0].step == 1)
            assert not a.paused

    asyncio.run(scenario())


def test_cancelling_the_supervision_resumes_a_paused_engine() -> None:
    async def scenario() -> None:
        a = engine()
        a.stall("load_weights")
        async with supervised(a) as watched:
            watched.pool.want(policy(1))
            await until(lambda: a.paused)
        assert not a.paused

    asyncio.run(scenario())


def test_an_engine_found_paused_is_resumed() -> None:
    async def scenario() -> None:
        a = engine(version="step-000001")
        a.model_path = policy(1).path
        await a.pause()
        async with supervised(a) as watched:
            watched.pool.want(policy(1))
            await until(lambda: watched.pool.states()[0].step == 1)
            assert not a.paused

    asyncio.run(scenario())


def test_one_failed_look_is_forgiven_two_are_not() -> None:
    async def scenario() -> None:
        a = engine()
        async with supervised(a) as watched:
            watched.pool.want(policy(1))
            await until(lambda: watched.pool.states()[0].step == 1)
            a.fail("info", EngineError("no", kind="timeout"))
            await until(lambda: watched.pool.states()[0].circuit.looks == 1)
            assert watched.pool.states()[0].step == 1
            await until(lambda: watched.pool.states()[0].circuit.looks == 0)
            a.fail("info", EngineError("no", kind="timeout"), times=2)
            await until(lambda: watched.pool.states()[0].health is Health.DOWN)
            assert watched.pool.capacity(512) == 0
            await until(lambda: watched.pool.states()[0].step == 1)
            assert watched.pool.capacity(512) == 32

    asyncio.run(scenario())


def test_a_drained_engine_keeps_what_runs_and_gets_nothing_new() -> None:
    async def scenario() -> None:
        a, b = engine("http://a"), engine("http://b")
        async with supervised(a, b) as watched:
            pool = watched.pool
            pool.want(policy(1))
            await until(lambda: all(state.step == 1 for state in pool.states()))
            first = pool.place(ask("e0"))
            assert first is not None
            pool.drain(first.url)
            other = {"http://a": "http://b", "http://b": "http://a"}[first.url]
            assert pool.capacity(512) == 32
            pool.want(policy(2))
            await until(lambda: all(state.step == 2 for state in pool.states()))
            for number in range(1, 4):
                grant = pool.place(ask(f"e{number}"))
                assert grant is not None
                assert grant.url == other
            assert pool.reserved_tokens(first.url) == 512
            pool.undrain(first.url)
            await asyncio.sleep(0.1)  # several looks
            assert pool.capacity(512) == 64
            assert {grant.url for n in range(40) if (grant := pool.place(ask(f"again{n}")))} == {"http://a", "http://b"}

    asyncio.run(scenario())


def test_requests_that_fail_in_a_row_take_an_engine_out_until_a_look_finds_it_well() -> None:
    async def scenario() -> None:
        a = engine()
        async with supervised(a) as watched:
            pool = watched.pool
            pool.want(policy(1))
            await until(lambda: pool.states()[0].step == 1)

            def episode(key: str, failed: str | None) -> None:
                assert pool.place(ask(key)) is not None
                pool.witness(key, failed=failed)
                pool.release(key)

            for number in range(7):
                episode(f"e{number}", "timeout")
            episode("refused", "status_400")
            episode("well", None)
            for number in range(7):
                episode(f"f{number}", "timeout")
            assert pool.states()[0].health is Health.UP
            a.stall("info")
            episode("last", "unreachable")
            state = pool.states()[0]
            assert (state.health, state.circuit.state, state.step) == (Health.DOWN, CircuitState.OPEN, None)
            assert pool.place(ask("none")) is None
            a.release("info")
            await until(lambda: pool.states()[0].circuit.state is CircuitState.CLOSED)
            assert [event.kind for event in watched.events if event.kind != "live"] == ["down", "up"]
            pool.witness("nobody", failed="timeout")

    asyncio.run(scenario())


def test_a_pushed_policy_is_awaited_and_known_by_its_digest() -> None:
    assert serves(info("step-000003+d3", "anywhere"), policy(3))
    assert not serves(info("step-000003+d4", "/policies/step-000003"), policy(3))
    assert next_move(info("step-000002", "/policies/step-000002"), policy(3), push_s=1.0) is Move.AWAIT
    assert next_move(info("step-000002", "/policies/step-000002"), policy(3), push_s=0.0) is Move.UPDATE
    assert next_move(info("step-000003+d3", "x"), policy(3), push_s=1.0) is Move.SERVE
    assert next_move(info(PUSH_UNDER_WAY, "x"), policy(3), push_s=1.0) is Move.AWAIT
    assert next_move(info(PUSH_GIVEN_UP, "x"), policy(3), push_s=1.0) is Move.UPDATE
    late = next_move(info("step-000002", "/policies/step-000002"), policy(3), push_s=1.0, pushed=True)
    assert late is Move.UPDATE, "the push has been elsewhere and is not coming here"
    assert next_move(info(PUSH_UNDER_WAY, "x"), policy(3), push_s=1.0, pushed=True) is Move.AWAIT

    async def scenario() -> None:
        a = engine()
        events: list[PoolEvent] = []
        pool = EnginePool(poll_s=0.02, push_wait_s=0.5, on_event=events.append)
        pool.add(a)
        keeper = asyncio.create_task(pool.supervise())
        try:
            pool.want(policy(1))
            await until(lambda: pool.states()[0].step == 1)
            pool.want(policy(2))
            await a.pause()  # by the trainer
            a.version = PUSH_UNDER_WAY
            await until(lambda: pool.states()[0].step is None)
            assert pool.place(ask("e")) is None
            await asyncio.sleep(0.05)
            assert a.paused, "the pool leaves it alone"
            a.version = policy(2).pushed_name
            await a.resume()
            await until(lambda: pool.states()[0].step == 2)
            pool.want(policy(3))
            await a.pause()
            a.version = PUSH_UNDER_WAY  # and then the trainer dies
            await until(lambda: pool.states()[0].step == 3)
            assert not a.paused
            assert a.model_path == policy(3).path
            assert [event.step for event in events if event.kind == "live"] == [1, 2, 3]
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
            await pool.close()

    asyncio.run(scenario())


def test_acquire_waits_in_order_and_gives_up_in_time() -> None:
    async def scenario() -> None:
        a = engine()
        async with supervised(a) as watched:
            pool = watched.pool
            pool.want(policy(1))
            await until(lambda: pool.states()[0].step == 1)
            for number in range(32):
                assert pool.place(ask(f"e{number}")) is not None
            first = asyncio.create_task(pool.acquire(ask("first"), timeout_s=5))
            second = asyncio.create_task(pool.acquire(ask("second"), timeout_s=5))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="no engine had room") as caught:
                await pool.acquire(ask("third"), timeout_s=0.01)
            assert caught.value.kind == "no_engine"
            pool.release("e0")
            assert (await first).key == "first"
            second.cancel()
            await asyncio.wait({second})
            pool.release("e1")
            assert pool.reserved_tokens("http://a") == 31 * 512

    asyncio.run(scenario())


def test_an_engine_can_be_removed_while_it_is_updated() -> None:
    async def scenario() -> None:
        a = engine()
        a.stall("load_weights")
        async with supervised(a) as watched:
            watched.pool.want(policy(1))
            await until(lambda: a.paused)
            assert await watched.pool.remove("http://a") == []
            assert not a.paused
            assert watched.pool.states() == ()
            b = engine("http://b")
            watched.pool.add(b)
            await until(lambda: watched.live() == [("http://b", 1)])

    asyncio.run(scenario())
