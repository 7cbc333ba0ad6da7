"""The embedded engine's HTTP surface, field for field as SGLang's native API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from farm.engine.bench import BenchShape, write_random_model
from farm.engine.launch import EngineOptions, EngineProcess, launch_engine

SHAPE = BenchShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
BUDGET, CONTEXT = 300, 256


class Http:
    """JSON, or text where it is none, with the status."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.sent = 0  # requests with a body that are on their way whole

    async def arrived(self, count: int) -> None:
        """Wait until ``count`` more requests with a body have reached the server."""
        async with asyncio.timeout(30):
            while self.sent < count:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await self.get("/model_info")  # it answers in turn

    async def post(self, path: str, content: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(path, json=content) as response:
            return response.status, await self._read(response)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(path) as response:
            return response.status, await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> Any:
        return await (response.json() if response.content_type == "application/json" else response.text())

    async def until(self, name: str, value: int) -> None:
        """Wait until a field of the engine's load has a value."""
        async with asyncio.timeout(30):
            while (await self.get("/v1/loads"))[1]["loads"][0][name] != value:  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "one"
    write_random_model(folder, SHAPE)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[EngineProcess]:
    options = EngineOptions(
        model=str(model), max_total_tokens=BUDGET, context_length=CONTEXT, max_running_requests=4, max_queued_requests=3
    )
    process = asyncio.run(launch_engine(options, run_folder=tmp_path_factory.mktemp("server")))
    yield process
    asyncio.run(process.stop())
    assert process.process.returncode == 0, "SIGTERM is a clean end"


def run(server: EngineProcess, scenario: Callable[[Http], Awaitable[None]]) -> None:
    async def whole() -> None:
        async def sent(*_: object) -> None:
            http.sent += 1

        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(sent)
        async with aiohttp.ClientSession(server.url, trace_configs=[trace]) as session:
            http = Http(session)
            await http.post("/continue_generation", {})
            await http.post("/update_weight_version", {"new_version": "default"})
            await http.post("/flush_cache", {})
            await scenario(http)

    asyncio.run(whole())


def body(new: int = 4, *, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "temperature": 0, **more.pop("sampling", {})}
    return {"input_ids": ids or [1, 2, 3, 4, 5], "sampling_params": params, "return_logprob": True, **more}


def test_a_generation_has_sglangs_fields(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        status, answer = await http.post("/generate", body(rid="mine", logprob_start_len=0))
        assert status == 200
        assert answer.keys() == {"text", "output_ids", "meta_info"}
        meta = answer["meta_info"]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 4, 0)
        assert meta["weight_version"] == "default"
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
        assert meta["num_retractions"] == 0
        assert 0 <= meta["queue_time"] <= meta["first_token_latency"] <= meta["e2e_latency"]
        assert meta["output_token_logprobs_length"] == 4
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert all(entry[0] <= 0 and entry[2] is None for entry in meta["output_token_logprobs"])
        assert [entry[1] for entry in meta["input_token_logprobs"]] == [1, 2, 3, 4, 5]
        assert meta["input_token_logprobs"][0] == [None, 1, None]
        _, plain = await http.post("/generate", {**body(), "return_logprob": False})
        assert "output_token_logprobs" not in plain["meta_info"]
        assert plain["output_ids"] == answer["output_ids"]

    run(server, scenario)


def test_scoring_without_sampling(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        _, sampled = await http.post("/generate", body(6))
        ids = [1, 2, 3, 4, 5, *sampled["output_ids"]]
        status, scored = await http.post("/generate", body(0, ids=ids, logprob_start_len=4))
        meta = scored["meta_info"]
        assert status == 200
        assert scored["output_ids"] == []
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["input_token_logprobs"][0] == [None, 5, None]
        expected = [entry[0] for entry in sampled["meta_info"]["output_token_logprobs"]]
        assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-4)

    run(server, scenario)


def test_stop_tokens_and_the_next_turn(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        prompt = list(range(30))
        _, free = await http.post("/generate", body(6, ids=prompt))
        stop = free["output_ids"][2]
        _, ended = await http.post("/generate", body(6, ids=prompt, sampling={"stop_token_ids": [stop]}))
        length = free["output_ids"].index(stop) + 1
        assert ended["output_ids"] == free["output_ids"][:length]
        assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        following = [*prompt, *free["output_ids"], 7, 8, 9]
        _, turn = await http.post("/generate", body(2, ids=following))
        assert turn["meta_info"]["cached_tokens"] == 30 + 5
        assert (await http.post("/flush_cache", {}))[0] == 200
        _, again = await http.post("/generate", body(2, ids=following))
        assert again["meta_info"]["cached_tokens"] == 0
        assert again["output_ids"] == turn["output_ids"]

    run(server, scenario)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (body(ids=[1] * 256), "The input (256 tokens) is longer than the model's context length (256 tokens)."),
        (
            body(57, ids=[1] * 200),
            "Requested token count exceeds the model's maximum context length of 256 tokens. You",
        ),
        (body(ids=[64]), "input_ids must be integers in [0, 63]"),
        (body(ids=[-1]), "input_ids must be integers in [0, 63]"),
        ({"input_ids": []}, "input_ids must be a non-empty list"),
        ({"input_ids": [1.5]}, "input_ids must be integers"),
        ({"text": "hello", "input_ids": [1]}, "text is not supported by the embedded engine"),
        (body(-1), "max_new_tokens must be at least 0, got -1."),
        (body(sampling={"temperature": -1}), "temperature must be a non-negative finite number, got -1."),
        (body(sampling={"top_p": 0}), "top_p must be in (0, 1], got 0."),
        (body(sampling={"top_k": 0, "temperature": 1}), "top_k must be -1 (disable) or at least 1, got 0."),
        (body(sampling={"sampling_seed": "x"}), "sampling_seed must be an integer"),
        (body(sampling={"frequency_penalty": 1}), "unsupported sampling parameter(s): frequency_penalty"),
        (body(sampling={"stop_token_ids": list(range(20))}), "stop_token_ids must be at most 16"),
        (body(stream=True), "stream is not supported"),
        (body(lora_path="x"), "unsupported field(s): lora_path"),
        (body(logprob_start_len=9), "logprob_start_len must be an integer below the input length 5"),
    ],
)
def test_bad_requests_are_told_apart(server: EngineProcess, bad: dict[str, Any], message: str) -> None:
    async def scenario(http: Http) -> None:
        status, answer = await http.post("/generate", bad)
        assert status == 400
        assert answer["error"]["message"].startswith(message)

    run(server, scenario)


def test_what_comes_during_a_pause_waits_before_the_scheduler(server: EngineProcess) -> None:
    """As in SGLang: no count shows it, no abort reaches it, and only after the pause does it meet the queue's limit."""

    async def scenario(http: Http) -> None:
        await http.post("/pause_generation", {"mode": "in_place"})
        before = http.sent
        names = [f"r{n}" for n in range(5)]
        requests = [asyncio.create_task(http.post("/generate", body(4, rid=name))) for name in names]
        await http.arrived(before + len(names))
        status, answer = await http.post("/generate", body(4, rid="r1"))
        assert (status, answer["error"]["message"]) == (400, "Duplicate request ID detected: r1")
        load = (await http.get("/v1/loads"))[1]["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
        assert (await http.get("/health"))[0] == 503
        assert (await http.post("/abort_request", {"abort_all": True}))[0] == 200
        assert not any(request.done() for request in requests)
        await http.post("/continue_generation", {})
        answers = await asyncio.gather(*requests)
        assert [status for status, _ in answers] == [200, 200, 200, 503, 503]
        assert (answers[4][1]["message"], answers[4][1]["code"]) == ("The request queue is full.", 503)
        assert all(answer["meta_info"]["finish_reason"]["type"] == "length" for _, answer in answers[:3])

    run(server, scenario)


def test_abort_all_reaches_what_waits_for_room(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        requests = [asyncio.create_task(http.post("/generate", body(200, ids=[n, 1], rid=f"r{n}"))) for n in range(2)]
        await http.until("num_waiting_reqs", 1)
        await http.post("/pause_generation", {"mode": "in_place"})
        assert (await http.post("/abort_request", {"abort_all": True}))[0] == 200
        (_, first), (_, second) = await asyncio.gather(*requests)
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        assert second["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert second["output_ids"] == []

    run(server, scenario)


def test_pause_modes(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        for mode, flushed in (("in_place", 400), ("retract", 200)):
            request = asyncio.create_task(http.post("/generate", body(200, rid=mode)))
            await http.until("num_running_reqs", 1)
            assert (await http.post("/pause_generation", {"mode": mode}))[0] == 200
            assert (await http.post("/flush_cache", {}))[0] == flushed
            assert not request.done()
            await http.post("/continue_generation", {})
            status, answer = await request
            assert status == 200
            assert len(answer["output_ids"]) == 200
            assert answer["meta_info"]["num_retractions"] == (mode == "retract")
        request = asyncio.create_task(http.post("/generate", body(200, rid="abort")))
        await http.until("num_running_reqs", 1)
        await http.post("/pause_generation", {"mode": "abort"})
        assert (await request)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await http.post("/pause_generation", {"mode": "sleep"}))[0] == 400

    run(server, scenario)


def test_weight_updates(server: EngineProcess, model: Path, tmp_path: Path) -> None:
    async def scenario(http: Http) -> None:
        status, answer = await http.post(
            "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "x"}
        )
        assert status == 400
        assert answer["success"] is False
        assert "config.json is missing" in answer["message"]
        wide = BenchShape(vocab=64, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
        write_random_model(tmp_path / "wide", wide)
        status, answer = await http.post("/update_weights_from_disk", {"model_path": str(tmp_path / "wide")})
        assert status == 400
        assert "hidden is 64, this server was started with 32" in answer["message"]
        (tmp_path / "torn").mkdir()
        (tmp_path / "torn" / "config.json").write_bytes((model / "config.json").read_bytes())
        (tmp_path / "torn" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:999])
        status, answer = await http.post("/update_weights_from_disk", {"model_path": str(tmp_path / "torn")})
        assert (status, "can't be read as safetensors" in answer["message"]) == (400, True)
        assert (await http.get("/model_info"))[1]["weight_version"] == "default"

        _, old = await http.post("/generate", body(8))
        write_random_model(tmp_path / "new", SHAPE, seed=9)
        update = {"model_path": str(tmp_path / "new"), "weight_version": "step-000007"}
        status, answer = await http.post("/update_weights_from_disk", update)
        assert (status, answer["success"]) == (200, True)
        info = (await http.get("/get_model_info"))[1]
        assert (info["weight_version"], info["model_path"]) == ("step-000007", str(tmp_path / "new"))
        _, new = await http.post("/generate", body(8))
        assert new["meta_info"]["weight_version"] == "step-000007"
        assert new["output_ids"] != old["output_ids"]
        await http.post("/update_weights_from_disk", {"model_path": str(model)})

    run(server, scenario)


def test_an_update_without_a_pause_lets_running_requests_end_first(server: EngineProcess, model: Path) -> None:
    async def scenario(http: Http) -> None:
        request = asyncio.create_task(http.post("/generate", body(200)))
        await http.until("num_running_reqs", 1)
        status, _ = await http.post(
            "/update_weights_from_disk", {"model_path": str(model), "weight_version": "step-000001"}
        )
        assert status == 200
        assert [s["version"] for s in (await request)[1]["meta_info"]["weight_versions"]] == ["default"]

    run(server, scenario)


def test_weights_swapped_in_place_split_a_request_into_spans(server: EngineProcess, model: Path) -> None:
    async def scenario(http: Http) -> None:
        request = asyncio.create_task(http.post("/generate", body(200)))
        await http.until("num_running_reqs", 1)
        await asyncio.sleep(0.02)
        await http.post("/pause_generation", {"mode": "in_place"})
        update = {"model_path": str(model), "weight_version": "step-000001"}
        status, answer = await http.post("/update_weights_from_disk", update)
        assert status == 400
        assert answer["message"].startswith("Weights were updated, but the cache was not flushed")
        assert (await http.post("/update_weights_from_disk", {**update, "flush_cache": False}))[0] == 200
        await http.post("/continue_generation", {})
        spans = (await request)[1]["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "step-000001"]
        assert spans[0]["end"] == spans[1]["start"] > 0
        assert spans[1]["end"] == 200

    run(server, scenario)


def test_budget_is_shared_by_queueing_and_retraction(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        answers = await asyncio.gather(*(http.post("/generate", body(120, ids=[n, 1], rid=f"r{n}")) for n in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        assert all(len(answer["output_ids"]) == 120 for _, answer in answers)
        status, metrics = await http.get("/metrics")
        assert status == 200
        for name in (
            "num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "max_total_num_tokens",
            "num_retracted_reqs", "num_retracted_requests_total", "cache_hit_rate", "gen_throughput", "new_token_ratio",
            "num_aborted_requests_total", "generation_tokens_total", "time_to_first_token_seconds_count",
            "queue_time_seconds_count",
        ):  # fmt: skip
            assert f"\nsglang:{name}{{" in metrics, name

    run(server, scenario)


def test_reports(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        status, info = await http.get("/server_info")
        assert status == 200
        assert (info["max_total_num_tokens"], info["context_length"], info["max_running_requests"]) == (
            BUDGET,
            CONTEXT,
            4,
        )
        assert (await http.get("/get_server_info"))[0] == 200
        assert (await http.get("/health_generate"))[0] == 200
        load = (await http.get("/v1/loads"))[1]["loads"][0]
        assert (load["num_running_reqs"], load["max_total_num_tokens"]) == (0, BUDGET)
        assert load["queues"]["retracted"] == 0
        assert (await http.get("/nowhere"))[0] == 404
        assert (await http.get("/generate"))[0] == 405

    run(server, scenario)


def test_a_client_that_goes_away_is_not_served_on(server: EngineProcess) -> None:
    async def scenario(http: Http) -> None:
        leaving = asyncio.create_task(http.post("/generate", body(200)))
        await http.until("num_running_reqs", 1)
        await http.post("/pause_generation", {"mode": "in_place"})
        before = _total((await http.get("/metrics"))[1], "num_aborted_requests_total")
        leaving.cancel()
        await http.post("/continue_generation", {})
        await http.until("num_running_reqs", 0)
        assert _total((await http.get("/metrics"))[1], "num_aborted_requests_total") == before + 1

    run(server, scenario)


def test_a_client_that_goes_away_in_a_pause_is_served_all_the_same(server: EngineProcess) -> None:
    """As in SGLang, whose pause holds requests where their clients' leaving is not seen."""

    async def scenario(http: Http) -> None:
        await http.post("/pause_generation", {"mode": "in_place"})
        before = _total((await http.get("/metrics"))[1], "generation_tokens_total")
        arrived = http.sent + 1
        leaving = asyncio.create_task(http.post("/generate", body(20)))
        await http.arrived(arrived)
        leaving.cancel()
        await asyncio.wait({leaving})
        await http.get("/model_info")  # by its answer the server knows
        await http.post("/continue_generation", {})
        async with asyncio.timeout(30):
            while _total((await http.get("/metrics"))[1], "generation_tokens_total") < before + 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(server, scenario)


def _total(metrics: str, name: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(f"sglang:{name}{{"))
    return float(line.rpartition(" ")[2])
