"""What is checked of a server before a farm starts on it, on real ones that were started well and badly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import real_sglang

from farm.engine.fitness import check_server, tempers
from farm.errors import UsageError
from farm.types import SamplingParams

COLD = SamplingParams(temperature=0.5)


@pytest.fixture(scope="module")
def unfit(sglang_server: tuple[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    policy = sglang_server[1][0]
    folder = tmp_path_factory.mktemp("unfit")
    with real_sglang.real_server(policy, folder, how=real_sglang.unfit_command) as process:
        yield process.url


def test_a_server_as_the_farm_starts_it_is_fit(sglang_server: tuple[str, tuple[str, str]]) -> None:
    url = sglang_server[0]
    assert not tempers(url)
    policy = Path(sglang_server[1][1])
    check_server(url, where="x", policy=policy, prompt_tokens=real_sglang.CONTEXT - 6, sampling=COLD)
    with pytest.raises(UsageError, match=f"--context-length {real_sglang.CONTEXT + 1}"):
        check_server(url, where="x", policy=policy, prompt_tokens=real_sglang.CONTEXT - 5, sampling=COLD)


def test_a_server_of_another_model_is_refused(sglang_server: tuple[str, tuple[str, str]], tmp_path: Path) -> None:
    url = sglang_server[0]
    wider = Path(real_sglang.write_model(tmp_path / "wider", seed=0, shape=replace(real_sglang.SHAPE, intermediate=64)))
    with pytest.raises(UsageError, match="its intermediate_size is 128, the policy's 64"):
        check_server(url, where="x", policy=wider, prompt_tokens=100, sampling=COLD)
    config = json.loads((wider / "config.json").read_text()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    (wider / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="its architectures is Qwen3ForCausalLM, the policy's Qwen3MoeForCausalLM"):
        check_server(url, where="x", policy=wider, prompt_tokens=100, sampling=COLD)


def test_a_server_that_lacks_what_a_farm_needs_is_refused(
    unfit: str, sglang_server: tuple[str, tuple[str, str]]
) -> None:
    assert tempers(unfit)
    with pytest.raises(UsageError, match="start it with --enable-metrics"):
        check_server(unfit, where="x", policy=Path(sglang_server[1][0]), prompt_tokens=100, sampling=COLD)
