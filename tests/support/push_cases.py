"""What a push of weights must do at an engine, whichever it is: used against the embedded server and a real SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from farm.engine.sglang import SGLangEngine
from farm.protocols import EngineInfo, GenerateRequest, Generation
from farm.types import PUSH_GIVEN_UP, PUSH_UNDER_WAY, PolicyVersion, SamplingParams
from trainer.buckets import TensorInfo, plan_buckets
from trainer.megatron.buckets import Outgoing, checksum
from trainer.megatron.push import PushRules, push
from trainer.megatron.push_group import PushError, PushGroup

PROMPT = [5, 6, 7, 8, 9]
PATIENCE_S = 500.0  # a real server on a machine at work elsewhere


RULES = PushRules(timeout_s=PATIENCE_S)


def version_of(path: str, step: int) -> PolicyVersion:
    return PolicyVersion(step=step, path=path, digest=f"{step:x}" * 64, published_at_s=0.0)


def weights_of(path: str) -> dict[str, Tensor]:
    return dict(load_file(Path(path) / "model.safetensors"))


def buckets(weights: dict[str, Tensor], *, max_bytes: int = 512 << 20) -> Iterator[Outgoing]:
    """As a learner gives them out."""
    infos = [
        TensorInfo(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in weights.items()
    ]
    for bucket in plan_buckets(infos, max_bytes=max_bytes):
        tensors = [weights[info.name].contiguous() for info in bucket.tensors]
        yield Outgoing(bucket=bucket, tensors=tensors, checksum=checksum(tensors))


def buckets_of(path: str, *, max_bytes: int = 512 << 20) -> Iterator[Outgoing]:
    return buckets(weights_of(path), max_bytes=max_bytes)


def sample(url: str, new: int = 12, *, rid: str = "r", timeout_s: float = PATIENCE_S) -> Generation:
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


async def info_of(url: str) -> EngineInfo:
    engine = SGLangEngine(url)
    try:
        return await engine.info()
    finally:
        await engine.close()


def info(url: str) -> EngineInfo:
    return asyncio.run(info_of(url))


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
    several = buckets_of(policies[1], max_bytes=50_000)
    pushed = push([url], several, version=version.pushed_name, rules=RULES)
    assert (pushed.engines, pushed.left_out) == ((url,), {})
    assert pushed.paused_s > 0
    assert info(url).version == version.pushed_name
    after = sample(url)
    assert after.output_ids == expected.output_ids
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert [span.step for span in after.spans] == [2]
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
        push([url], buckets_of(policies[1]), version=version.pushed_name, rules=RULES)
        asker.join(PATIENCE_S)
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
        push([url], buckets(weights), version=version_of(policies[1], 2).pushed_name, rules=RULES)
    assert time.monotonic() - started < PATIENCE_S / 2
    assert info(url).version == PUSH_GIVEN_UP
    load(url, policies[1], 2)
    assert [span.step for span in sample(url).spans] == [2]
    push([url], buckets_of(policies[0]), version=version_of(policies[0], 4).pushed_name, rules=RULES)
    assert [span.step for span in sample(url).spans] == [4]


def weights_that_are_damaged_on_the_way_are_not_served(url: str, policies: tuple[str, str]) -> None:
    """One number of one tensor, of those that SGLang keeps as they are and of those that it joins with others."""
    version = version_of(policies[1], 2)
    names = list(weights_of(policies[1]))
    send = PushGroup.send
    for damaged in ("input_layernorm", "mlp.down_proj", "mlp.up_proj", "self_attn.k_proj"):
        load(url, policies[0], 1)
        at = names.index(f"model.layers.1.{damaged}.weight")

        def send_damaged(self: PushGroup, tensors: Sequence[Tensor], *, timeout_s: float, at: int = at) -> None:
            other = tensors[at].clone()
            other.view(-1)[-1] += 0.5
            send(self, [*tensors[:at], other, *tensors[at + 1 :]], timeout_s=timeout_s)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PushGroup, "send", send_damaged)
            with pytest.raises(PushError, match=r"checksum|holds other weights than were sent: model\.layers\.1\."):
                push([url], buckets_of(policies[1]), version=version.pushed_name, rules=RULES)
        assert info(url).version == PUSH_GIVEN_UP
    load(url, policies[1], 2)
    assert [span.step for span in sample(url).spans] == [2]


def one_push_after_the_other(url: str, policies: tuple[str, str]) -> None:
    load(url, policies[0], 1)
    expected = [sample(url).output_ids]
    load(url, policies[1], 1)
    expected.append(sample(url).output_ids)
    for step in range(2, 5):
        version = version_of(policies[step % 2], step)
        push([url], buckets_of(version.path, max_bytes=70_000), version=version.pushed_name, rules=RULES)
        answer = sample(url)
        assert [span.step for span in answer.spans] == [step]
        assert answer.output_ids == expected[step % 2]


_KILLED = """
import os, signal, sys
from itertools import count
import push_cases
from trainer.megatron.push import PushRules, push
url, path, name = sys.argv[1:]
def buckets():
    for number, bucket in zip(count(), push_cases.buckets_of(path, max_bytes=20_000)):
        if number == 3:  # with one bucket made ahead, one was sent
            os.kill(os.getpid(), signal.SIGKILL)
        yield bucket
push([url], buckets(), version=name, rules=PushRules())
"""


def killed_in_a_push(url: str, version: PolicyVersion) -> None:
    """What a trainer that is killed in its third bucket leaves of an engine."""
    support = str(Path(__file__).parent)
    python_path = os.pathsep.join([support, *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, url, version.path, version.pushed_name],
        env=os.environ | {"PYTHONPATH": python_path}, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL


def after_a_killed_trainer_a_load_and_the_next_push_go_through(url: str, policies: tuple[str, str]) -> None:
    load(url, policies[0], 1)
    killed_in_a_push(url, version_of(policies[1], 2))
    assert info(url).version == PUSH_UNDER_WAY, "no pool gives it an episode"
    load(url, policies[1], 2)
    assert [span.step for span in sample(url).spans] == [2]
    version = version_of(policies[0], 3)
    push([url], buckets_of(version.path), version=version.pushed_name, rules=RULES)
    assert [span.step for span in sample(url).spans] == [3]


def an_engine_that_is_not_there_is_left_out(url: str, policies: tuple[str, str]) -> None:
    load(url, policies[0], 1)
    nowhere, version = "http://127.0.0.1:9", version_of(policies[1], 2)
    pushed = push([url, nowhere], buckets_of(policies[1]), version=version.pushed_name, rules=RULES)
    assert pushed.engines == (url,)
    assert "127.0.0.1:9/server_info" in pushed.left_out[nowhere]
    assert [span.step for span in sample(url).spans] == [2]
    with pytest.raises(PushError, match=r"127\.0\.0\.1:9/server_info"):
        push([nowhere], buckets_of(policies[1]), version=version.pushed_name, rules=RULES)


CASES = (
    pushed_weights_are_those_on_disk,
    a_running_request_goes_on_under_the_pushed_weights,
    a_refused_push_is_over_at_once_and_can_be_repaired,
    weights_that_are_damaged_on_the_way_are_not_served,
    one_push_after_the_other,
    after_a_killed_trainer_a_load_and_the_next_push_go_through,
    an_engine_that_is_not_there_is_left_out,
)
