"""A policy over NCCL into a real SGLang on another GPU. needs: gpu, two of them. **Not run by anybody so far.**

    export CUDA_VISIBLE_DEVICES=1 SGLANG_PYTHON=/path/of/a/python/with/sglang      # SGLang gets the first GPU
    pytest -p no:xdist -m gpu tests/gpu/test_gpu_push.py

What a push must do besides (time-outs, a receiver that dies, a wrong checksum) is the same code on gloo:
tests/integration/test_weight_push.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import push_cases
import pytest
import real_sglang
from safetensors.torch import load_file, save_file

from farm.engine.launch import EngineProcess
from farm.engine.sglang import SGLangEngine
from trainer.megatron.push import push

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    import torch

    assert torch.cuda.is_available(), "no GPU: these tests were asked for by -m gpu and can't run here"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") not in (None, "", "0"), "see the first lines: SGLang gets GPU 0"
    assert real_sglang.PYTHON, "SGLANG_PYTHON names a Python that has SGLang"


def bfloat16_model(folder: Path, *, seed: int) -> str:
    real_sglang.write_model(folder, seed=seed)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return str(folder)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("policies")
    return bfloat16_model(folder / "one", seed=1), bfloat16_model(folder / "two", seed=2)


def on_a_gpu(*more: str) -> tuple[str, ...]:
    return (
        "env", "CUDA_VISIBLE_DEVICES=0", "SGLANG_RETURN_ORIGINAL_LOGPROB=1", "HF_HUB_OFFLINE=1",
        real_sglang.PYTHON, "-m", "sglang.launch_server", "--model-path", "{model}", "--weight-version", "{version}",
        "--host", "{host}", "--port", "{port}", "--context-length", "{context_length}",
        "--max-total-tokens", "{max_total_tokens}", "--max-running-requests", "{max_running_requests}",
        "--enable-metrics", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(policies: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with real_sglang.real_server(policies[0], tmp_path_factory.mktemp("server"), how=on_a_gpu) as process:
        yield process


def load_from_disk(url: str, path: str, step: int) -> None:
    async def load() -> None:
        engine = SGLangEngine(url)
        try:
            await engine.load_weights(path, step=step)
        finally:
            await engine.close()

    asyncio.run(load())


def test_a_pushed_policy_samples_what_the_published_one_does(server: EngineProcess, policies: tuple[str, str]) -> None:
    before = push_cases.sample(server.url)
    version = push_cases.version_of(policies[1], 7)
    buckets = push_cases.buckets_of(policies[1], max_bytes=100_000)
    push([server.url], buckets, version=version.pushed_name, rules=replace(push_cases.RULES, backend="nccl"))
    pushed = push_cases.sample(server.url)
    assert {span.step for span in pushed.spans} == {7}
    assert pushed.output_ids != before.output_ids
    load_from_disk(server.url, policies[1], 8)
    loaded = push_cases.sample(server.url)
    assert loaded.output_ids == pushed.output_ids
    assert loaded.logprobs == pytest.approx(pushed.logprobs, abs=1e-3)
