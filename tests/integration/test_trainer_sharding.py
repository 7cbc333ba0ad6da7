"""On one rank: cutting and joining, Transformer Engine's names, checksums, packing, recomputation, many files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farm.engine.embedded import weight_group
from farm.errors import UsageError
from trainer.batch import TokenSequence, micro_batches
from trainer.config import ParallelConfig
from trainer.megatron import buckets, convert, losses, sharded
from trainer.megatron.learner import Learner
from trainer.megatron.model import start_megatron, stop_megatron
from trainer.megatron.sharding import Cut, canonical, cut_of, part_of, part_shape, whole_of, whole_weights
from trainer.shapes import megatron_shapes

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 60, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip
MOE = DENSE | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"dense": DENSE, "moe": MOE}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    start_megatron()
    yield
    stop_megatron()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, hf in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(hf))
        learner = Learner(folder / name, random_weights=True, seed=1)
        made = folder / f"{name}-made"
        made.mkdir()
        learner.write(made, source=folder / name)
    return folder


def rows() -> list[TokenSequence]:
    chance = np.random.default_rng(0)
    return [
        TokenSequence(
            ids=chance.integers(0, 60, n),
            sampled=chance.random(n) < 0.4,
            logprobs=(-4.0 + chance.normal(0, 0.5, n)).astype(np.float32),
            advantage=float(chance.normal()),
        )
        for n in (40, 23, 31, 8)
    ]


def weights_after(folder: Path, **parallel: Any) -> dict[str, torch.Tensor]:
    learner = Learner(folder, parallel=ParallelConfig(**parallel))
    batches = micro_batches(rows(), max_tokens=70, packed=learner.parallel.packing)
    for _ in range(2):
        learner.step(batches, losses.grpo(0.2, 0.28), lr=1e-2)
    return {k: v.clone() for k, v in learner.state()["model"].items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_cut_and_joined_to_the_bit(name: str) -> None:
    for key, shape in megatron_shapes(MODELS[name]).items():
        whole, cut = torch.randn(shape), cut_of(key)
        parts = [part_of(whole, cut, rank, 2) for rank in range(2)]
        assert all(tuple(part.shape) == part_shape(shape, cut, 2) for part in parts)
        assert whole_of(parts, cut).equal(whole)
        assert part_of(whole, cut, 0, 1) is whole


def test_gate_and_up_are_cut_apart() -> None:
    gate_up = torch.arange(8.0).reshape(8, 1)
    assert part_of(gate_up, Cut.HALVES, 1, 2).flatten().tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.7.input_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.6.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.6.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.6.mlp.linear_fc1.weight"),
        (
            "decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight",
            "decoder.layers.8.mlp.experts.local_experts.17.linear_fc2.weight",
        ),
        (
            "decoder.layers.2.mlp.experts.linear_fc1.weight3",
            "decoder.layers.8.mlp.experts.local_experts.19.linear_fc1.weight",
        ),
    ],
)
def test_names_of_a_rank_and_of_transformer_engine(local: str, expected: str) -> None:
    assert canonical(local, first_layer=6, first_expert=16) == expected


def test_a_checksum_sees_any_change() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5, 7), torch.randn(9).bfloat16(), torch.zeros(0), torch.randn(6).bfloat16()[1:]]
    right = buckets.checksum(tensors)
    assert weight_group.checksum(tensors) == right, "the engine's end has its own"
    assert buckets.checksum([t.clone() for t in tensors]) == right
    assert buckets.checksum([tensors[0].t().contiguous().t(), *tensors[1:]]) == right  # layout in memory: no matter
    wrong = [
        [tensors[1], tensors[0], *tensors[2:]],
        [tensors[0].flip(0), *tensors[1:]],
        tensors[:1],
    ]
    for bit in range(32):
        flipped = tensors[0].clone()
        flipped.view(torch.int32)[2, 3] ^= 1 << bit if bit < 31 else -(1 << 31)
        wrong.append([flipped, *tensors[1:]])
    assert len({buckets.checksum(one) for one in wrong} | {right}) == len(wrong) + 1


@pytest.mark.parametrize("name", MODELS)
def test_buckets_hold_the_published_weights(name: str, models: Path) -> None:
    learner = Learner(models / f"{name}-made")
    sent = list(learner.outgoing(max_bytes=5000))
    assert [one.bucket for one in sent] == buckets.buckets_of(MODELS[name], max_bytes=5000)
    assert len(sent) > 5
    got = {info.name: x for one in sent for info, x in zip(one.bucket.tensors, one.tensors, strict=True)}
    published = convert.read_hf_weights(models / f"{name}-made")
    assert got.keys() == published.keys() == learner.published().keys()
    assert all(got[k].equal(published[k]) and learner.published()[k].equal(published[k]) for k in got)
    halves = next(iter(learner.outgoing(max_bytes=5000, dtype="bfloat16")))
    assert {t.dtype for t in halves.tensors} == {torch.bfloat16}


def test_a_large_model_is_written_in_files_and_read_back(models: Path, tmp_path: Path) -> None:
    learner = Learner(models / "moe-made")
    weights = whole_weights(learner.model, learner.hf)
    convert.write_hf(tmp_path, weights, learner.hf, source=models / "moe-made", file_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    before, after = convert.read_hf_weights(models / "moe-made"), convert.read_hf_weights(tmp_path)
    assert before.keys() == after.keys()
    assert all(before[k].equal(after[k]) for k in before)
    (tmp_path / files[1]).unlink()
    with pytest.raises(UsageError, match=f"it has no {files[1]}"):
        Learner(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_do_not_see_each_other(name: str, models: Path) -> None:
    learner = Learner(models / f"{name}-made")
    packed = micro_batches(rows(), max_tokens=200, packed=True)
    assert len(packed) == 1
    alone = {}
    for row in rows():
        (one,) = micro_batches([row], max_tokens=200)
        alone[row.advantage] = learner.logprobs(one)
    together = learner.logprobs(packed[0])
    at = 0
    for row in sorted(rows(), key=lambda r: -len(r.ids)):
        expected = alone[row.advantage]
        torch.testing.assert_close(together[at : at + len(expected)], expected, atol=2e-6, rtol=0)
        at += len(expected)
    assert at == len(together)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(name: str, recompute: str, models: Path) -> None:
    plain = weights_after(models / f"{name}-made")
    again = weights_after(models / f"{name}-made", recompute=recompute)
    assert all(plain[k].equal(again[k]) for k in plain)


def test_what_is_not_a_checkpoint_of_this_model_is_refused(models: Path, tmp_path: Path) -> None:
    learner = Learner(models / "moe-made")
    assert learner.resume(tmp_path) is None
    place = tmp_path / "step-000003"
    place.mkdir()
    assert sharded.steps(tmp_path) == []  # not in place whole: it has no checkpoint.json
    (place / "checkpoint.json").write_text(json.dumps({"schema_version": 9}))
    with pytest.raises(UsageError, match="schema version 9, this program reads 1"):
        learner.resume(tmp_path)
    (place / "checkpoint.json").write_text(json.dumps({"schema_version": 1, "ranks": 1}))
    with pytest.raises(UsageError, match="not a readable checkpoint"):
        learner.resume(tmp_path)
    piece = {"name": "decoder.final_layernorm.weight", "tensor": [0, 1], "start": 0, "end": 3, "adam_step": 1}
    piece |= {key: torch.zeros(3) for key in ("weight", "exp_avg", "exp_avg_sq")}
    torch.save({"pieces": [piece], "rng": torch.get_rng_state()}, place / "rank-00000.pt")
    (place / "checkpoint.json").write_text(json.dumps({"schema_version": 1, "step": 3, "ranks": 1, "loop": {}}))
    with pytest.raises(UsageError, match=r"does not hold embedding.* another model"):
        learner.resume(tmp_path)


def test_layers_that_are_not_there_are_refused(models: Path) -> None:
    with pytest.raises(UsageError, match="needs a GPU and the package transformer-engine"):
        Learner(models / "dense-made", parallel=ParallelConfig(implementation="transformer_engine"))
