"""The embedded server and a real SGLang, on the same weights, asked the same: the same fields, codes and numbers.

The real one is right, and the embedded one has nothing that it has not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from farm.engine.launch import EngineOptions, launch_engine

TOLERANCE = 1e-4
BUDGET, CONTEXT = 4096, 1024
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Answer:
    status: int
    value: Any  # JSON, or text where it is none


class Server:
    """One of the two."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def post(self, path: str, content: Any = None) -> Answer:
        async with self._session.post(self._url + path, json={} if content is None else content) as response:
            return await self._answer(response)

    async def get(self, path: str) -> Answer:
        async with self._session.get(self._url + path) as response:
            return await self._answer(response)

    async def _answer(self, response: aiohttp.ClientResponse) -> Answer:
        text = await response.text()
        try:
            return Answer(response.status, json.loads(text))
        except ValueError:
            return Answer(response.status, text)

    async def until(self, name: str, value: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.get("/v1/loads")).value["loads"][0][name] != value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Pair:
    real: str
    embedded: str
    policies: tuple[str, str]


@pytest.fixture(scope="module")
def pair(sglang_server: tuple[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    url, policies = sglang_server
    options = EngineOptions(model=policies[0], max_total_tokens=BUDGET, context_length=CONTEXT, max_running_requests=8)
    folder = tmp_path_factory.mktemp("embedded")
    process = asyncio.run(launch_engine(options, run_folder=folder, timeout_s=PATIENCE_S))
    yield Pair(real=url, embedded=process.url, policies=policies)
    asyncio.run(process.stop())


def both(pair: Pair, scenario: Callable[[Server], Awaitable[Any]]) -> tuple[Any, Any]:
    """The scenario's result on the real server, and on the embedded one, both with the first policy as "default"."""

    async def one(url: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            server = Server(session, url)
            await server.post("/continue_generation")
            await server.post("/abort_request", {"abort_all": True})
            async with asyncio.timeout(PATIENCE_S):
                while (await server.post("/flush_cache")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            loaded = await server.post(
                "/update_weights_from_disk", {"model_path": pair.policies[0], "weight_version": "default"}
            )
            assert loaded.status == 200, loaded
            return await scenario(server)

    async def whole() -> tuple[Any, Any]:
        return await one(pair.real), await one(pair.embedded)

    return asyncio.run(whole())


def body(new: int = 8, *, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
    return {"input_ids": ids or [5, 6, 7, 8, 9], "sampling_params": params, "return_logprob": True, **more}


# ----------------------------------------------------------------------------------------------- numbers


def test_greedy_ids_and_log_probs_are_the_same(pair: Pair) -> None:
    prompts = [[5 + n, *range(20 + n, 60 + 3 * n)] for n in range(8)]

    async def scenario(server: Server) -> list[Answer]:
        return await asyncio.gather(
            *(server.post("/generate", body(24, ids=ids, logprob_start_len=0)) for ids in prompts)
        )

    real, embedded = both(pair, scenario)
    for theirs, ours in zip(real, embedded, strict=True):
        assert theirs.status == ours.status == 200
        assert ours.value["output_ids"] == theirs.value["output_ids"]
        assert ours.value["text"] == theirs.value["text"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            their, our = theirs.value["meta_info"][name], ours.value["meta_info"][name]
            assert [entry[1:] for entry in our] == [entry[1:] for entry in their]
            assert [entry[0] for entry in our if entry[0] is not None] == pytest.approx(
                [entry[0] for entry in their if entry[0] is not None], abs=TOLERANCE
            )


def test_other_weights_score_alike(pair: Pair) -> None:
    """Log-probs of one transcript under the other policy, scored without sampling, after a swap of weights."""
    ids = [(7 * n) % 500 + 5 for n in range(300)]

    async def scenario(server: Server) -> list[float]:
        swapped = await server.post(
            "/update_weights_from_disk", {"model_path": pair.policies[1], "weight_version": "step-000002"}
        )
        assert swapped.status == 200
        answer = await server.post("/generate", body(0, ids=ids, logprob_start_len=0))
        assert answer.value["meta_info"]["weight_version"] == "step-000002"
        return [entry[0] for entry in answer.value["meta_info"]["input_token_logprobs"][1:]]

    real, embedded = both(pair, scenario)
    assert len(real) == 299
    assert embedded == pytest.approx(real, abs=TOLERANCE)


def test_temperature_does_not_change_what_is_reported(pair: Pair) -> None:
    """Log-probs are those of the policy itself, whatever the tokens were sampled by."""

    async def scenario(server: Server) -> float:
        params = {"temperature": 0.7, "top_p": 0.9, "sampling_seed": 3}
        answer = (await server.post("/generate", body(16, sampling=params))).value
        ids = [5, 6, 7, 8, 9, *answer["output_ids"]]
        scored = (await server.post("/generate", body(0, ids=ids, logprob_start_len=4))).value
        reported = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        plain = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]]
        return max(abs(a - b) for a, b in zip(reported, plain, strict=True))

    assert max(both(pair, scenario)) < TOLERANCE


# ------------------------------------------------------------------------------------------------ fields


def test_a_generation_has_the_same_fields(pair: Pair) -> None:
    async def scenario(server: Server) -> dict[str, Any]:
        answer = await server.post("/generate", body(4, rid="mine", logprob_start_len=0))
        return dict(answer.value)

    real, embedded = both(pair, scenario)
    assert embedded.keys() == real.keys()
    assert embedded["meta_info"].keys() == real["meta_info"].keys()
    same = (
        "id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens",
        "weight_version", "weight_versions", "num_retractions", "output_token_logprobs_length", "dp_rank",
    )  # fmt: skip
    for name in same:
        assert embedded["meta_info"][name] == real["meta_info"][name], name


def test_stop_reasons_are_alike(pair: Pair) -> None:
    async def scenario(server: Server) -> list[Any]:
        free = (await server.post("/generate", body(8))).value["output_ids"]
        stop = {"stop_token_ids": [free[3]], "ignore_eos": False}
        ended = (await server.post("/generate", body(8, sampling=stop))).value
        ignored = (await server.post("/generate", body(8, sampling={**stop, "ignore_eos": True}))).value
        none = (await server.post("/generate", body(0))).value
        kept = (await server.post("/generate", body(8, sampling={**stop, "no_stop_trim": True}))).value
        answers = (ended, ignored, none, kept)
        return [(answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]) for answer in answers]

    real, embedded = both(pair, scenario)
    assert embedded == real


def test_what_the_client_reads_is_there(pair: Pair) -> None:
    async def scenario(server: Server) -> dict[str, Any]:
        return {path: (await server.get(path)).value for path in ("/model_info", "/server_info", "/v1/loads")}

    real, embedded = both(pair, scenario)
    for path in real:
        extra = embedded[path].keys() - real[path].keys()
        assert not extra, f"{path}: SGLang does not have {sorted(extra)}"
    assert embedded["/model_info"].keys() == real["/model_info"].keys()
    ours, theirs = embedded["/v1/loads"]["loads"][0], real["/v1/loads"]["loads"][0]
    assert not ours.keys() - theirs.keys()
    assert not ours.get("queues", {}).keys() - theirs.get("queues", {}).keys()
    for name in ("max_total_num_tokens", "context_length", "max_running_requests"):
        assert embedded["/server_info"][name] == real["/server_info"][name], name
    states = [info["/server_info"]["internal_states"][0] for info in (embedded, real)]
    assert not states[0].keys() - states[1].keys()


def test_metrics_have_the_same_names(pair: Pair) -> None:
    async def scenario(server: Server) -> set[str]:
        await server.post("/generate", body(4))
        text = (await server.get("/metrics")).value
        return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line.startswith("sglang:")}

    real, embedded = both(pair, scenario)
    # Those that SGLang has only from their first event on.
    late = {"sglang:cached_tokens_total", "sglang:num_aborted_requests_total", "sglang:num_retracted_requests_total"}
    assert not embedded - real - late, "SGLang has no such metrics"


# ------------------------------------------------------------------------------------------------- codes

# Ids outside of the vocabulary are not among them: SGLang takes those above it and dies of those below 0.
BAD = [
    body(ids=[1] * CONTEXT),  # longer than the context
    body(CONTEXT - 4),  # prompt and answer together
    body(-1),
    body(sampling={"temperature": -1}),
    body(sampling={"top_p": 0}),
    body(sampling={"top_k": 0, "temperature": 1}),
    {"sampling_params": {}},
]


@pytest.mark.parametrize("bad", BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_requests_are_refused_alike(pair: Pair, bad: dict[str, Any]) -> None:
    async def scenario(server: Server) -> Answer:
        return await server.post("/generate", bad)

    real, embedded = both(pair, scenario)
    assert embedded.status == real.status == 400
    assert embedded.value["error"]["message"] == real.value["error"]["message"]


def test_a_duplicate_is_refused_alike(pair: Pair) -> None:
    async def scenario(server: Server) -> Answer:
        first = asyncio.create_task(server.post("/generate", body(300, rid="twice")))
        await server.until("num_running_reqs", 1)
        again = await server.post("/generate", body(4, rid="twice"))
        await server.post("/abort_request", {"rid": "twice"})
        await first
        return again

    real, embedded = both(pair, scenario)
    assert (embedded.status, embedded.value) == (real.status, real.value)


def test_weights_that_are_not_there_are_refused_alike(pair: Pair) -> None:
    async def scenario(server: Server) -> tuple[int, set[str], str]:
        answer = await server.post("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "x"})
        info = (await server.get("/model_info")).value
        return answer.status, set(answer.value), info["weight_version"]

    real, embedded = both(pair, scenario)
    assert embedded == real == (400, {"success", "message", "num_paused_requests"}, "default")


# ----------------------------------------------------------------------------------------- pause and swap


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_pause_modes(pair: Pair, mode: str) -> None:
    async def scenario(server: Server) -> dict[str, Any]:
        request = asyncio.create_task(server.post("/generate", body(200, rid=mode)))
        await server.until("num_running_reqs", 1)
        await asyncio.sleep(0.1)
        paused = await server.post("/pause_generation", {"mode": mode})
        done, _ = await asyncio.wait({request}, timeout=0.5)
        flushed = await server.post("/flush_cache")
        update = {"model_path": pair.policies[1], "weight_version": "step-000005", "flush_cache": mode != "in_place"}
        updated = await server.post("/update_weights_from_disk", update)
        resumed = await server.post("/continue_generation")
        answer = (await request).value
        meta = answer["meta_info"]
        return {
            "paused": (paused.status, paused.value),
            "ended by the pause": bool(done),
            "flushed": flushed.status,
            "updated": (updated.status, updated.value),
            "resumed": (resumed.status, resumed.value),
            "finish": meta["finish_reason"]["type"],
            "whole": len(answer["output_ids"]) == 200,
            "versions": [span["version"] for span in meta["weight_versions"]],
            "retractions": meta["num_retractions"],
        }

    real, embedded = both(pair, scenario)
    assert embedded == real


def test_an_abort_goes_by_the_beginning_of_the_id_and_leaves_the_others(pair: Pair) -> None:
    async def scenario(server: Server) -> list[Any]:
        requests = [asyncio.create_task(server.post("/generate", body(200, rid=rid))) for rid in ("e-1.", "e-10.")]
        await server.until("num_running_reqs", 2)
        aborted = await server.post("/abort_request", {"rid": "e-1."})
        first, second = await asyncio.gather(*requests)
        return [
            aborted.status,
            first.status,
            first.value["meta_info"]["finish_reason"],
            0 < len(first.value["output_ids"]) < 200,
            second.value["meta_info"]["finish_reason"],
        ]

    real, embedded = both(pair, scenario)
    assert embedded == real


def test_a_paused_engine_is_not_a_dead_one(pair: Pair) -> None:
    """While paused it answers everything but health, keeps what is asked of it, and is well again afterwards."""

    async def scenario(server: Server) -> list[Any]:
        await server.post("/pause_generation", {"mode": "retract"})
        waiting = asyncio.create_task(server.post("/generate", body(4)))
        seen = [(await server.get(path)).status for path in ("/model_info", "/server_info", "/v1/loads", "/metrics")]
        sick = await server.get("/health")
        await server.post("/continue_generation")
        answer = await waiting
        return [seen, sick.status, answer.status, len(answer.value["output_ids"]), (await server.get("/health")).status]

    real, embedded = both(pair, scenario)
    assert embedded == real == [[200] * 4, 503, 200, 4, 200]


def test_the_prefix_of_the_last_turn_is_reused(pair: Pair) -> None:
    async def scenario(server: Server) -> list[int]:
        await server.post("/flush_cache")
        prompt = list(range(5, 69))
        first = (await server.post("/generate", body(8, ids=prompt))).value
        following = [*prompt, *first["output_ids"], 9, 8, 7]
        second = (await server.post("/generate", body(2, ids=following))).value
        return [first["meta_info"]["cached_tokens"], second["meta_info"]["cached_tokens"]]

    real, embedded = both(pair, scenario)
    assert embedded == real == [0, 64 + 7]
