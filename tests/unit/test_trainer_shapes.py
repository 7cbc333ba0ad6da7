"""Names, shapes and numbers of parameters, against what is published and what was counted by hand."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from trainer.shapes import (
    MODELS,
    active_parameters,
    count,
    hf_parts,
    hf_shapes,
    is_expert,
    known_model,
    megatron_shapes,
    parameters,
)

SMALL = {
    "model_type": "qwen3", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "tie_word_embeddings": True,
}  # fmt: skip
SMALL_MOE = SMALL | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 5, "num_experts": 3, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "total", "without_embeddings", "active"),
    [  # the model cards, in billions
        ("qwen3-30b-a3b", 30.5, 29.9, 3.3),
        ("qwen3-32b", 32.8, 31.2, 32.8),
        ("qwen3-8b", 8.2, 6.95, 8.2),
        ("qwen3-0.6b", 0.6, 0.44, 0.6),
    ],
)
def test_published_numbers_of_parameters(name: str, total: float, without_embeddings: float, active: float) -> None:
    hf = known_model(name)
    embeddings = hf["vocab_size"] * hf["hidden_size"] * (1 if hf["tie_word_embeddings"] else 2)
    assert parameters(hf) / 1e9 == pytest.approx(total, abs=0.06)
    assert (parameters(hf) - embeddings) / 1e9 == pytest.approx(without_embeddings, abs=0.06)
    assert active_parameters(hf) / 1e9 == pytest.approx(active, abs=0.06)


def test_the_reference_model_to_the_last_parameter() -> None:
    hf = known_model("qwen3-30b-a3b")
    attention = 2048 * (4096 + 512 + 512) + 4096 * 2048 + 2 * 128
    expert = 3 * 2048 * 768
    layer = attention + 2 * 2048 + 128 * 2048 + 128 * expert
    outer = 2 * 151_936 * 2048 + 2048
    assert parameters(hf) == 48 * layer + outer == 30_532_122_624
    assert active_parameters(hf) == 48 * (layer - 120 * expert) + outer == 3_353_032_704


def test_counted_by_hand() -> None:
    layer = 4 + 4 * 24 + 3 + 3 + 12 * 4 + 4 + 12 * 4 + 4 * 6
    assert parameters(SMALL) == 40 + 2 * layer + 4
    moe_layer = 4 + 4 * 24 + 3 + 3 + 12 * 4 + 4 + 3 * 4 + 3 * (10 * 4 + 4 * 5)
    assert parameters(SMALL_MOE) == 40 + 2 * moe_layer + 4 + 40
    assert active_parameters(SMALL_MOE) == parameters(SMALL_MOE) - 2 * 60


@pytest.mark.parametrize("hf", [SMALL, SMALL_MOE, *MODELS.values()])
def test_hugging_face_and_megatron_hold_the_same_elements(hf: dict[str, object]) -> None:
    for name, shape in megatron_shapes(hf).items():
        assert sum(count(part) for _, part in hf_parts(name, hf)) == count(shape)
    assert sum(map(count, hf_shapes(hf).values())) == parameters(hf)


def test_names() -> None:
    names = hf_shapes(SMALL_MOE)
    assert names["model.layers.1.self_attn.q_proj.weight"] == (12, 4)
    assert names["model.layers.1.self_attn.k_proj.weight"] == (6, 4)
    assert names["model.layers.0.self_attn.o_proj.weight"] == (4, 12)
    assert names["model.layers.0.post_attention_layernorm.weight"] == (4,)
    assert names["model.layers.1.mlp.gate.weight"] == (3, 4)
    assert names["model.layers.1.mlp.experts.2.up_proj.weight"] == (5, 4)
    assert names["model.layers.1.mlp.experts.2.down_proj.weight"] == (4, 5)
    assert names["lm_head.weight"] == (10, 4)
    assert "lm_head.weight" not in hf_shapes(SMALL)
    assert hf_shapes(SMALL)["model.layers.1.mlp.down_proj.weight"] == (4, 6)
    assert sum(map(is_expert, megatron_shapes(SMALL_MOE))) == 2 * 3 * 2


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'qwen9' is unknown; known: qwen3-30b-a3b"):
        known_model("qwen9")
