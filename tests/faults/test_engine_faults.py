"""Engines that die, hang, are misconfigured or swap weights under running requests."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farm.engine.bench import BenchShape, write_random_model
from farm.engine.launch import EngineOptions, launch_engine
from farm.engine.sglang import SGLangEngine
from farm.errors import EngineError, UsageError
from farm.protocols import EngineLoad, GenerateRequest
from farm.types import SamplingParams

SHAPE = BenchShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_random_model(folder / str(seed), SHAPE, seed=seed)
    return str(folder / "0"), str(folder / "1")


def ask(rid: str, new: int) -> GenerateRequest:
    return GenerateRequest(
        rid=rid, input_ids=[1, 2, 3], max_new_tokens=new, stop_token_ids=(), sampling=SamplingParams(seed=1)
    )


async def until(engine: SGLangEngine, condition: Callable[[EngineLoad], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition(await engine.load()):  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(0.01)


def options(model: str, **more: object) -> EngineOptions:
    return EngineOptions(model=model, version="step-000000", context_length=2048, **more)  # type: ignore[arg-type]


def test_a_life_with_swaps_and_a_sudden_death(models: tuple[str, str], tmp_path: Path) -> None:
    async def scenario() -> None:
        process = await launch_engine(options(models[0]), run_folder=tmp_path)
        engine = SGLangEngine(process.url)
        try:
            requests = [asyncio.create_task(engine.generate(ask(f"r{n}", 600), timeout_s=60)) for n in range(3)]
            await until(engine, lambda load: load.generated_tokens_total >= 30)
            await engine.pause()
            await engine.load_weights(models[1], step=1)
            await engine.resume()
            for answer in await asyncio.gather(*requests):
                assert [span.step for span in answer.spans] == [0, 1]
                assert answer.spans[0].end == answer.spans[1].start > 0
                assert answer.spans[1].end == len(answer.output_ids) == 600
                assert answer.retractions == 1

            with pytest.raises(EngineError) as caught:
                await engine.load_weights(str(tmp_path / "nowhere"), step=2)
            assert caught.value.kind == "status_400"
            assert (await engine.info()).version == "step-000001"

            doomed = asyncio.create_task(engine.generate(ask("doomed", 2000), timeout_s=60))
            await until(engine, lambda load: load.running == 1)
            process.process.kill()
            async with asyncio.timeout(5):
                with pytest.raises(EngineError) as caught:
                    await doomed
            assert caught.value.kind == "unreachable"
            with pytest.raises(EngineError) as caught:
                await engine.info()
            assert caught.value.kind == "unreachable"
            assert not await engine.healthy()
        finally:
            await engine.close()
            await process.stop()

    asyncio.run(scenario())


def test_what_can_not_start_says_why_and_leaves_nothing(models: tuple[str, str], tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(UsageError, match=r"nowhere/config\.json is missing"):
            await launch_engine(options(str(tmp_path / "nowhere")), run_folder=tmp_path, name="a")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=f"port in use: 127.0.0.1:{port}; choose another --port"):
                await launch_engine(options(models[0], port=port), run_folder=tmp_path, name="b")
        (tmp_path / "torn").mkdir()
        (tmp_path / "torn" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
        with pytest.raises(UsageError, match="architecture 'GPT2LMHeadModel' is not one of Qwen3ForCausalLM"):
            await launch_engine(options(str(tmp_path / "torn")), run_folder=tmp_path, name="c")
        with pytest.raises(EngineError, match=r"not up within 0\.01 s") as caught:
            await launch_engine(options(models[0]), run_folder=tmp_path, name="d", timeout_s=0.01)
        assert caught.value.kind == "start"

    asyncio.run(scenario())


def test_a_server_ends_when_its_parent_has_gone(models: tuple[str, str], tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, os, time\n"
        "server = subprocess.Popen([sys.executable, '-m', 'farm.engine.embedded', '--model', sys.argv[1],"
        " '--port', '0', '--url-file', sys.argv[2], '--parent-pid', str(os.getpid())])\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.02)\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, models[0], str(tmp_path / "url")]
    parent = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=False)
    pid = int(parent.stdout)

    async def gone() -> None:
        async with asyncio.timeout(10):
            while _lives(pid):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    asyncio.run(gone())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_answers_that_make_no_sense_are_engine_errors() -> None:
    """A server that speaks HTTP but not this API, or hangs up, or never answers."""

    def reply(status: int, content: bytes) -> bytes:
        return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content)

    replies = {
        b"/html": reply(200, b"<a/>"),
        b"/list": reply(200, b"[]"),
        b"/oom": reply(500, b'{"message": "Out of memory even after retracting all other requests"}'),
        b"/full": reply(503, b'{"message": "The request queue is full."}'),
        b"/teapot": reply(418, b"{}"),
    }
    kinds = {
        "/html": "malformed",
        "/list": "malformed",
        "/hangup": "unreachable",
        "/oom": "out_of_memory",
        "/full": "queue_full",
        "/teapot": "status_418",
        "/silent": "timeout",
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].removesuffix(b"/generate").removesuffix(b"/abort_request")
        if path == b"/silent":
            await reader.read()
        writer.write(replies.get(path, b""))
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            for path, kind in kinds.items():
                engine = SGLangEngine(f"http://127.0.0.1:{port}{path}")
                with pytest.raises(EngineError) as caught:
                    await engine.generate(ask("r", 1), timeout_s=0.3)
                assert caught.value.kind == kind, path
                await engine.close()

    asyncio.run(scenario())
