"""A fleet of engines by the configuration's pools: what dies, hangs, comes back with old weights, is drained or
replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farm.config import EngineConfig, parse_config
from farm.engine.bench import BenchShape, write_random_model
from farm.engine.launch import EngineOptions, launch_engine
from farm.engine.sglang import SGLangEngine
from farm.engine_orders import Orders
from farm.errors import EngineError, UsageError
from farm.fleet import Fleet, start_fleet
from farm.protocols import GenerateRequest
from farm.types import PolicyVersion, SamplingParams, version_name

SHAPE = BenchShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
COMMAND = [
    sys.executable, "-m", "farm.engine.embedded", "--model", "{model}", "--weight-version", "{version}",
    "--host", "{host}", "--port", "{port}", "--context-length", "{context_length}",
    "--max-total-tokens", "{max_total_tokens}", "--max-running-requests", "{max_running_requests}",
]  # fmt: skip


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[PolicyVersion]:
    folder = tmp_path_factory.mktemp("policies")
    found = []
    for step in range(2):
        path = folder / version_name(step)
        write_random_model(path, SHAPE, seed=step)
        found.append(PolicyVersion(step=step, path=str(path), digest=f"{step}" * 64, published_at_s=0.0))
    return found


def engines(**given: Any) -> EngineConfig:
    base = {"max_total_tokens": 2048, "context_length": 512, "max_running_requests": 8}
    return parse_config({"engine": {**base, **given}}).engine


class Running:
    """A supervised fleet."""

    def __init__(self, fleet: Fleet, orders: list[Orders]) -> None:
        self.fleet = fleet
        self._orders = orders

    def order(self, change: Callable[[Orders], Orders]) -> None:
        self._orders[0] = change(self._orders[0])

    def engine(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next((e for e in self.fleet.status() if e["name"] == name), {})
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (processes)
                await asyncio.sleep(0.02)

    async def up(self, *names: str, step: int = 0) -> None:
        await self.until(lambda: all(self.engine(name).get("step") == step for name in names))

    def first_choice(self) -> tuple[str, str]:
        """Names of the engine that gets the next episode, and of the other one, while none has any."""
        url = self.place(0)
        self.fleet.release(("e0", 1))
        first = next(name for name in ("engine-0", "engine-1") if self.engine(name)["url"] == url)
        return first, "engine-1" if first == "engine-0" else "engine-0"

    def place(self, number: int, tokens: int = 512) -> str | None:
        placed = self.fleet.place((f"e{number}", 1), group_id=f"g{number}", tokens=tokens)
        return None if placed is None else placed.url


@asynccontextmanager
async def running(config: EngineConfig, version: PolicyVersion, logs: Path) -> AsyncIterator[Running]:
    orders = [Orders()]
    fleet = await start_fleet(config, version=version, logs=logs, orders=lambda: orders[0])
    supervisor = asyncio.create_task(fleet.supervise())
    try:
        yield Running(fleet, orders)
        assert not supervisor.done(), supervisor
    finally:
        supervisor.cancel()
        await asyncio.wait({supervisor})
        await fleet.close()


async def sample(url: str, new: int = 4) -> set[int]:
    """The policy steps that the engine sampled under."""
    engine = SGLangEngine(url)
    request = GenerateRequest(
        rid="r", input_ids=[1, 2, 3], max_new_tokens=new, stop_token_ids=(), sampling=SamplingParams(seed=1)
    )
    try:
        return {span.step for span in (await engine.generate(request, timeout_s=20)).spans}
    finally:
        await engine.close()


def test_launched_engines_that_die_are_started_again_and_fenced_until_verified(
    versions: list[PolicyVersion], tmp_path: Path
) -> None:
    config = engines(kind="launch", count=2, gpus_per_engine=0, command=COMMAND)

    async def scenario() -> None:
        async with running(config, versions[0], tmp_path) as farm:
            await farm.up("engine-0", "engine-1")
            first = farm.engine("engine-0")
            assert await sample(first["url"]) == {0}
            farm.fleet.want(versions[1])
            await farm.up("engine-0", "engine-1", step=1)
            os.kill(first["process"]["pid"], signal.SIGKILL)
            await farm.until(lambda: farm.engine("engine-0").get("url") != first["url"])
            for number in range(4):
                assert farm.place(number) == farm.engine("engine-1")["url"], "nothing goes to what is not there"
            await farm.up("engine-0", step=1)
            again = farm.engine("engine-0")
            assert (again["restarts"], again["version"]) == (1, versions[1].name)
            assert farm.place(9) == again["url"]
            assert await sample(again["url"]) == {1}

    asyncio.run(scenario())


def test_an_engine_of_others_that_comes_back_with_old_weights_is_fenced(
    versions: list[PolicyVersion], tmp_path: Path
) -> None:
    async def scenario() -> None:
        options = EngineOptions(model=versions[0].path, version=versions[0].name, context_length=512)
        process = await launch_engine(options, run_folder=tmp_path, name="theirs")
        port = int(process.url.rpartition(":")[2])
        config = engines(kind="sglang", urls=[process.url])
        try:
            async with running(config, versions[0], tmp_path) as farm:
                await farm.up(process.url)
                farm.fleet.want(versions[1])
                await farm.up(process.url, step=1)
                await process.stop()
                await farm.until(lambda: farm.engine(process.url)["circuit"] == "open")
                assert farm.place(0) is None
                old = EngineOptions(model=versions[0].path, version=versions[0].name, context_length=512, port=port)
                process = await launch_engine(old, run_folder=tmp_path, name="theirs-again")
                if farm.place(1) is not None:  # its pool was quicker than this test
                    assert await sample(process.url) == {1}, "it was given an episode with the old weights"
                await farm.up(process.url, step=1)
                assert farm.place(2) == process.url
                assert await sample(process.url) == {1}
                assert farm.engine(process.url)["circuit"] == "closed"
        finally:
            await process.stop()

    asyncio.run(scenario())


def test_an_engine_that_hangs_is_taken_out_and_taken_in_again(versions: list[PolicyVersion], tmp_path: Path) -> None:
    """Stopped, not dead: its socket still takes connections, and requests run into their time-outs."""

    async def scenario() -> None:
        async with running(engines(count=2), versions[0], tmp_path) as farm:
            await farm.up("engine-0", "engine-1")
            name, other = farm.first_choice()
            hung = farm.engine(name)
            os.kill(hung["process"]["pid"], signal.SIGSTOP)
            try:
                for number in range(1, 100):
                    if farm.engine(name)["circuit"] != "closed":
                        break
                    placed = farm.place(number)
                    farm.fleet.witness((f"e{number}", 1), failed="timeout" if placed == hung["url"] else None)
                    farm.fleet.release((f"e{number}", 1))
                assert farm.engine(name)["circuit"] == "open"
                for number in range(100, 103):
                    assert farm.place(number) == farm.engine(other)["url"]
            finally:
                os.kill(hung["process"]["pid"], signal.SIGCONT)
            await farm.up(name)
            assert farm.place(200) == hung["url"]
            assert farm.engine(name)["restarts"] == 0

    asyncio.run(scenario())


def test_an_engine_that_answers_looks_and_fails_requests_is_taken_out(
    versions: list[PolicyVersion], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running(engines(count=2), versions[0], tmp_path) as farm:
            await farm.up("engine-0", "engine-1")
            name, other = farm.first_choice()
            sick = farm.engine(name)["url"]
            number = 1
            while farm.engine(name)["circuit"] == "closed":
                assert number < 100
                placed = farm.place(number)
                farm.fleet.witness((f"e{number}", 1), failed="malformed" if placed == sick else None)
                farm.fleet.release((f"e{number}", 1))
                number += 1
            assert "requests in a row failed, the last with malformed" in farm.engine(name)["error"]
            assert farm.place(1000) == farm.engine(other)["url"]
            await farm.up(name)
            assert farm.engine(name)["circuit"] == "closed", "a look found it well"

    asyncio.run(scenario())


def test_drain_restore_replace_remove_and_add_at_run_time(versions: list[PolicyVersion], tmp_path: Path) -> None:
    async def scenario() -> None:
        options = EngineOptions(model=versions[0].path, context_length=512)
        theirs = await launch_engine(options, run_folder=tmp_path, name="theirs")
        try:
            async with running(engines(count=2), versions[0], tmp_path) as farm:
                await farm.up("engine-0", "engine-1")
                first = farm.place(0)
                name, kept = (
                    ("engine-0", "engine-1") if first == farm.engine("engine-0")["url"] else ("engine-1", "engine-0")
                )
                farm.order(lambda orders: orders.drain(name))
                await farm.until(lambda: farm.engine(name)["draining"])
                assert farm.fleet.capacity(512) == 4, "one engine's"
                assert farm.place(1) == farm.engine(kept)["url"]
                farm.fleet.want(versions[1])
                await farm.up(name, kept, step=1)
                assert farm.place(2) == farm.engine(kept)["url"], "updated for what runs there, still drained"

                farm.order(lambda orders: orders.renew(name))
                await asyncio.sleep(1.0)
                assert farm.engine(name)["url"] == first, "an episode still runs there"
                farm.fleet.release(("e0", 1))
                farm.order(lambda orders: orders.restore(name))
                await farm.until(lambda: farm.engine(name).get("url") not in (None, first))
                await farm.up(name, step=1)
                assert not farm.engine(name)["draining"]

                farm.order(lambda orders: orders.add(theirs.url, "others"))
                await farm.up(theirs.url, step=1)
                assert farm.engine(theirs.url)["pool"] == "others"
                farm.fleet.release(("e1", 1))
                farm.fleet.release(("e2", 1))
                ended = farm.engine(kept)["process"]["pid"]
                farm.order(lambda orders: orders.remove(name).remove(kept))
                await farm.until(lambda: [e["name"] for e in farm.fleet.status()] == [theirs.url])
                await farm.until(lambda: not Path(f"/proc/{ended}").exists())
                assert farm.place(7) == theirs.url
        finally:
            await theirs.stop()

    asyncio.run(scenario())


def test_pools_by_name_side_by_side(versions: list[PolicyVersion], tmp_path: Path) -> None:
    pools = {
        "small": {"count": 1, "max_total_tokens": 512},
        "large": {"kind": "launch", "gpus_per_engine": 0, "command": COMMAND, "context_length": 2048},
    }

    async def scenario() -> None:
        async with running(engines(pools=pools), versions[0], tmp_path) as farm:
            await farm.up("small-0", "large-0")
            assert {engine["pool"] for engine in farm.fleet.status()} == {"small", "large"}
            assert farm.place(0, tokens=1500) == farm.engine("large-0")["url"], "only there is room for it"
            assert farm.place(1, tokens=512) == farm.engine("small-0")["url"], "by its share in use"

    asyncio.run(scenario())


def test_an_engine_that_does_not_come_up_again_is_given_up_and_the_others_go_on(
    versions: list[PolicyVersion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.fleet._RESTART_DELAY_S", 0.0)
    once = tmp_path / "once"
    script = f'[ -e {once} ] && exit 1; touch {once}; exec "$@"'
    pools = {
        "good": {"count": 1},
        "bad": {"kind": "launch", "gpus_per_engine": 0, "command": ["bash", "-c", script, "bash", *COMMAND]},
    }

    async def scenario() -> None:
        async with running(engines(pools=pools), versions[0], tmp_path) as farm:
            await farm.up("good-0", "bad-0")
            os.kill(farm.engine("bad-0")["process"]["pid"], signal.SIGKILL)
            await farm.until(lambda: farm.engine("bad-0").get("state") == "failed")
            assert "did not come up in 10 tries" in farm.engine("bad-0")["error"]
            assert farm.place(0) == farm.engine("good-0")["url"]

    asyncio.run(scenario())


def test_an_episode_that_only_a_dead_engine_holds_waits_for_it_and_no_longer(
    versions: list[PolicyVersion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice: the first time it comes up again, the second time it never does."""
    monkeypatch.setattr("farm.fleet._RESTART_DELAY_S", 0.0)
    starts = tmp_path / "starts"
    script = f'echo >> {starts}; [ "$(wc -l < {starts})" -gt 2 ] && exit 1; exec "$@"'
    pools = {
        "small": {"count": 1},
        "large": {
            "kind": "launch", "gpus_per_engine": 0, "context_length": 2048,
            "command": ["bash", "-c", script, "bash", *COMMAND],
        },
    }  # fmt: skip

    async def scenario() -> None:
        async with running(engines(pools=pools), versions[0], tmp_path) as farm:
            await farm.up("small-0", "large-0")
            first = farm.engine("large-0")
            os.kill(first["process"]["pid"], signal.SIGKILL)
            await farm.until(lambda: farm.engine("large-0").get("url") != first["url"])
            assert farm.place(0, tokens=1500) is None, "not now"
            assert farm.fleet.capacity(1500) == 0
            await farm.up("large-0")
            assert farm.place(1, tokens=1500) == farm.engine("large-0")["url"]
            os.kill(farm.engine("large-0")["process"]["pid"], signal.SIGKILL)
            await farm.until(lambda: farm.engine("large-0").get("state") == "failed")
            assert farm.place(2, tokens=1500) is None
            assert farm.place(3) == farm.engine("small-0")["url"]
            with pytest.raises(
                EngineError, match=r"no engine is left .* 1500 tokens .*holds 512; large-0 did not come"
            ):
                farm.fleet.capacity(1500)

    asyncio.run(scenario())


def test_engines_that_refuse_every_load_end_the_farm_with_what_they_said(
    versions: list[PolicyVersion], tmp_path: Path
) -> None:
    """A server of another model, which nothing told before the start."""
    write_random_model(tmp_path / "wider", replace(SHAPE, hidden=64))

    async def scenario() -> None:
        theirs = await launch_engine(
            EngineOptions(model=str(tmp_path / "wider"), context_length=512), run_folder=tmp_path, name="theirs"
        )
        config = engines(kind="sglang", urls=[theirs.url], start_timeout_s=0.5)
        fleet = await start_fleet(config, version=versions[0], logs=tmp_path)
        try:
            with pytest.raises(EngineError, match=r"no engine has served policy step-000000 .*hidden is 32") as caught:
                async with asyncio.timeout(60):
                    await fleet.supervise()
            assert caught.value.kind == "start"
        finally:
            await fleet.close()
            await theirs.stop()

    asyncio.run(scenario())


def test_what_can_not_be_launched_says_why_and_leaves_nothing(versions: list[PolicyVersion], tmp_path: Path) -> None:
    async def start(**given: Any) -> None:
        fleet = await start_fleet(engines(kind="launch", **given), version=versions[0], logs=tmp_path)
        await fleet.close()

    with pytest.raises(UsageError, match=r"no-such-server: can't be run: No such file"):
        asyncio.run(start(gpus_per_engine=0, command=["no-such-server", "{port}"]))
    with pytest.raises(EngineError, match="ended with 3 at start: bad flag") as caught:
        asyncio.run(start(gpus_per_engine=0, command=["bash", "-c", "echo bad flag; exit 3", "{port}"]))
    assert caught.value.kind == "start"
    with pytest.raises(EngineError, match=r"not up within 0\.5 s"):
        asyncio.run(start(gpus_per_engine=0, command=["sleep", "60", "{port}"], start_timeout_s=0.5))


def test_a_launched_engine_dies_with_the_farm(tmp_path: Path) -> None:
    """Killed, so that it can't clean up."""
    code = (
        "import asyncio, os, sys, time\n"
        "from pathlib import Path\n"
        "from farm.engine.launch import CommandOptions, free_port, launch_engine\n"
        "options = CommandOptions(command=('python3', '-m', 'http.server', '{port}'), model='', version='',"
        " port=free_port(), max_total_tokens=1, context_length=1, max_running_requests=1)\n"
        "async def main():\n"
        "    starting = asyncio.create_task(launch_engine(options, run_folder=Path(sys.argv[1]), timeout_s=60))\n"
        "    await asyncio.sleep(1)\n"
        "    children = Path(f'/proc/self/task/{os.getpid()}/children').read_text()\n"
        "    print(children.split()[0], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        pid = int(out)
        async with asyncio.timeout(10):
            while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    asyncio.run(scenario())
