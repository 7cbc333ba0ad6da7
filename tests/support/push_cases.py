"""What a push of weights must do at an engine, whichever it is: used against the embedded server and a real SGLang."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from farm.engine.sglang import SGLangEngine
from farm.protocols import EngineInfo, GenerateRequest, Generation
from farm.types import PUSH_GIVEN_UP, PolicyVersion, SamplingParams, version_name
from trainer.megatron.push import PushError, PushRules, push

PROMPT = [5, 6, 7, 8, 9]


def version_of(path: str, step: int) -> PolicyVersion:
    return PolicyVersion(step=step, path=path, digest=f"{step:x}" * 64, published_at_s=0.0)


def weights_of(path: str) -> dict[str, Tensor]:
    return dict(load_file(Path(path) / "model.safetensors"))


def sample(url: str, new: int = 12, *, rid: str = "r", timeout_s: float = 60.0) -> Generation:
    async def ask() -> Generation:
        engine = SGLangEngine(url)
        try:
            return await engine.generate(
                GenerateRequest(
                    rid=rid,
                    input_ids=PROMPT,
                    max_new_tokens=new,
                    stop_token_ids=(),
                    sampling=SamplingParams(temperature=0.0),
                ),
                timeout_s=timeout_s,
            )
        finally:
            await engine.close()

    return asyncio.run(ask())


def info(url: str) -> EngineInfo:
    async def ask() -> EngineInfo:
        engine = SGLangEngine(url)
        try:
            return await engine.info()
        finally:
            await engine.close()

    return asyncio.run(ask())


def load(url: str, path: str, step: int) -> None:
    async def ask() -> None:
        engine = SGLangEngine(url)
        try:
            await engine.pause()
            await engine.load_weights(path, step=step)
            await engine.resume()
        finally:
            await engine.close()

    asyncio.run(ask())


def pushed_weights_are_those_on_disk(url: str, policies: tuple[str, str]) -> None:
    """In several buckets; the same tokens and log-probs as after a load of the same folder from disk."""
    load(url, policies[1], 2)
    expected = sample(url)
    load(url, policies[0], 1)
    assert sample(url).output_ids != expected.output_ids
    version = version_of(policies[1], 2)
    paused_s = push([url], weights_of(policies[1]), version=version.pushed_name, rules=PushRules(bucket_bytes=50_000))
    assert paused_s > 0
    assert info(url).version == version.pushed_name
    pushed = sample(url)
    assert pushed.output_ids == expected.output_ids
    assert pushed.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert [span.step for span in pushed.spans] == [2]
    load(url, policies[0], 3)  # and disk works as before
    assert [span.step for span in sample(url).spans] == [3]


def _keep(found: list[Generation], url: str, rid: str) -> None:
    found.append(sample(url, 900, rid=rid))


def a_running_request_goes_on_under_the_pushed_weights(url: str, policies: tuple[str, str]) -> None:
    version = version_of(policies[1], 2)
    for number in range(20):  # until the push meets the request: small models are done in no time
        load(url, policies[0], 1)
        found: list[Generation] = []
        asker = threading.Thread(target=_keep, args=(found, url, f"across-{number}"))
        asker.start()
        time.sleep(0.02 * number)
        push([url], weights_of(policies[1]), version=version.pushed_name, rules=PushRules())
        asker.join(60)
        spans = found[0].spans
        if len(spans) == 2:
            break
    assert [span.step for span in spans] == [1, 2]
    assert spans[-1].end == len(found[0].output_ids) == 900
    assert found[0].retractions == 1


def a_refused_push_is_over_at_once_and_can_be_repaired(url: str, policies: tuple[str, str]) -> None:
    """A tensor that the model does not have as announced: the sender is not left in its broadcast, the engine is fenced
    by its name, and a load from disk mends it."""
    load(url, policies[0], 1)
    weights = weights_of(policies[1])
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name][:-1]
    started = time.monotonic()
    with pytest.raises(PushError):
        push([url], weights, version=version_of(policies[1], 2).pushed_name, rules=PushRules(timeout_s=20.0))
    assert time.monotonic() - started < 40
    assert info(url).version == PUSH_GIVEN_UP
    load(url, policies[1], 2)
    assert [span.step for span in sample(url).spans] == [2]
    push([url], weights_of(policies[0]), version=version_of(policies[0], 4).pushed_name, rules=PushRules())
    assert [span.step for span in sample(url).spans] == [4]


def an_engine_that_is_not_there_stops_nobody(url: str, policies: tuple[str, str]) -> None:
    load(url, policies[0], 1)
    with pytest.raises(PushError, match=r"127\.0\.0\.1:9/server_info"):
        push(
            [url, "http://127.0.0.1:9"],
            weights_of(policies[1]),
            version=version_of(policies[1], 2).pushed_name,
            rules=PushRules(timeout_s=10.0),
        )
    assert info(url).version == version_name(1)
    assert [span.step for span in sample(url).spans] == [1]


CASES = (
    pushed_weights_are_those_on_disk,
    a_running_request_goes_on_under_the_pushed_weights,
    a_refused_push_is_over_at_once_and_can_be_repaired,
    an_engine_that_is_not_there_stops_nobody,
)
