"""What only a GPU can show of the trainer. needs: gpu. **Not run by CI, and by nobody so far.**

    pip install -e .[dev] -c constraints.txt            # with a CUDA or ROCm build of torch in place of the CPU's
    pip install transformer-engine[pytorch]             # for the tests of its layers
    pytest -p no:xdist -m gpu tests/gpu/test_gpu_trainer.py

The local layers against transformers, in float32 and bfloat16; Transformer Engine's layers against the local ones;
conversion and checkpoints under both; the memory of a step against ``trainer check``. One GPU is enough. On a machine
with two, tests/integration/test_trainer_ranks.py goes over NCCL by itself.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.batch import TokenSequence, micro_batches
from trainer.config import ParallelConfig, TrainerConfig
from trainer.shapes import hf_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "dense": DENSE,
    "moe": DENSE | {
        "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}  # fmt: skip
LOCAL = {"precision": "bfloat16"}
ENGINE = LOCAL | {"implementation": "transformer_engine"}


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    import torch

    assert torch.cuda.is_available(), "no GPU: these tests were asked for by -m gpu and can't run here"
    yield
    from trainer.megatron.model import stop_megatron

    stop_megatron()


def make_model(folder: Path, name: str) -> Path:
    """A model folder with random bfloat16 weights."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights = {
        key: (torch.randn(shape) * 0.05 + (1.0 if len(shape) == 1 else 0.0)).bfloat16()
        for key, shape in hf_shapes(MODELS[name]).items()
    }
    out = folder / name
    out.mkdir()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(MODELS[name]))
    return out


def rows(lengths: tuple[int, ...] = (700, 300, 512)) -> list[TokenSequence]:
    chance = np.random.default_rng(0)
    return [
        TokenSequence(
            ids=chance.integers(0, 1024, n),
            sampled=chance.random(n) < 0.4,
            logprobs=(-6.0 + chance.normal(0, 0.2, n)).astype(np.float32),
            advantage=float(chance.normal()),
        )
        for n in lengths
    ]


def learner(folder: Path, **parallel: Any) -> Any:
    from trainer.megatron.learner import Learner

    if parallel.get("implementation") == "transformer_engine":
        assert importlib.util.find_spec("transformer_engine"), "pip install transformer-engine[pytorch]"
    return Learner(folder, parallel=ParallelConfig(**parallel))


@pytest.mark.parametrize("name", MODELS)
def test_the_local_layers_give_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    folder = make_model(tmp_path, name)
    kind = transformers.Qwen3MoeForCausalLM if name == "moe" else transformers.Qwen3ForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).cuda()
    (batch,) = micro_batches(rows(), max_tokens=10**6)
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.ids).cuda()).logits.log_softmax(-1)
    chosen = logits.gather(-1, torch.from_numpy(batch.labels).cuda()[..., None]).squeeze(-1)
    expected = chosen[torch.from_numpy(batch.mask).cuda()]
    torch.testing.assert_close(learner(folder).logprobs(batch), expected, atol=1e-4, rtol=0)
    assert float((learner(folder, **LOCAL).logprobs(batch) - expected).abs().mean()) < 0.02


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_transformer_engines_layers_agree_with_the_local_ones(name: str, packed: bool, tmp_path: Path) -> None:
    folder = make_model(tmp_path, name)
    (batch,) = micro_batches(rows(), max_tokens=10**6, packed=packed)
    local, engine = learner(folder, **LOCAL).logprobs(batch), learner(folder, **ENGINE).logprobs(batch)
    assert float((local - engine).abs().mean()) < 0.02


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [LOCAL, ENGINE], ids=["local", "transformer_engine"])
def test_conversion_and_resume_are_bit_equal(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    from trainer.megatron import losses
    from trainer.megatron.convert import read_hf_weights

    folder = make_model(tmp_path, name)
    one = learner(folder, **how)
    (tmp_path / "written").mkdir()
    one.write(tmp_path / "written", source=folder)
    before, after = read_hf_weights(folder), read_hf_weights(tmp_path / "written")
    assert before.keys() == after.keys()
    assert all(before[k].equal(after[k]) for k in before)
    batches = micro_batches(rows(), max_tokens=1024, packed=how is ENGINE)
    loss = losses.grpo(0.2, 0.28)
    one.step(batches, loss, lr=1e-4)
    one.save(tmp_path / "checkpoints", 1, loop={}, keep=1)
    two = learner(folder, **how)
    assert two.resume(tmp_path / "checkpoints") == (1, {})
    for learned in (one, two):
        learned.step(batches, loss, lr=1e-4)
    states = [x.state()["model"] for x in (one, two)]
    # Attention's backward pass adds in any order on a GPU: equal to rounding, not to the bit.
    for key, value in states[0].items():
        assert float((value.float() - states[1][key].float()).abs().max()) < 5e-4, key


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_step_needs_no_more_memory_than_the_check_says(recompute: Any, tmp_path: Path) -> None:
    import torch

    from trainer.check import check
    from trainer.megatron import losses
    from trainer.memory import RESERVED_BYTES

    folder = make_model(tmp_path, "moe")
    config = TrainerConfig(micro_batch_tokens=4096, parallel=ParallelConfig(recompute=recompute, **LOCAL))
    chance = np.random.default_rng(0)
    long = TokenSequence(
        ids=chance.integers(0, 1024, 4097), sampled=np.ones(4097, np.bool_),
        logprobs=np.full(4097, -7.0, np.float32), advantage=1.0,
    )  # fmt: skip
    trained = learner(folder, recompute=recompute, **LOCAL)
    torch.cuda.reset_peak_memory_stats()
    batches = micro_batches([long], max_tokens=4096)
    trained.step(batches, losses.grpo(0.2, 0.28), lr=1e-4)
    need = check(config, MODELS["moe"], memory=1e12).need
    assert torch.cuda.max_memory_allocated() <= need.total - RESERVED_BYTES + (64 << 20)
