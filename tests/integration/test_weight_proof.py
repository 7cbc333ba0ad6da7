"""What is held against an SGLang server's digests of its weights, and what is not."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.megatron.proof import Digests, Form, digest_of_words

CPU = {"device": "cpu", "dtype": "float32", "tp_size": 1, "quantization": None}
LAYER = "model.layers.0."
WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(128.0).view(64, 2),
    LAYER + "input_layernorm.weight": torch.arange(2.0),
    LAYER + "self_attn.k_proj.weight": torch.full((1, 2), 2.0),
    LAYER + "self_attn.q_proj.weight": torch.full((2, 2), 1.0),
    LAYER + "self_attn.v_proj.weight": torch.full((1, 2), 3.0),
    LAYER + "self_attn.q_norm.weight": torch.arange(4.0),
    LAYER + "self_attn.o_proj.weight": torch.full((2, 2), 4.0),
    LAYER + "mlp.gate.weight": torch.full((2, 2), 5.0),
    LAYER + "mlp.experts.0.down_proj.weight": torch.full((2, 2), 6.0),
    "lm_head.weight": torch.arange(10.0).view(5, 2),
}


GIVEN = {1: "3d93a6540b54ef2a", 300: "3ac25c875e53d53c", 20_001: "90fa22620c891f2f"}
GIVEN_SHORT = "138f0178a76bf39e"


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def digests(**info: Any) -> dict[str, str]:
    form = Form.of({**CPU, **info})
    assert form is not None
    found = Digests(form)
    for name, tensor in WEIGHTS.items():
        found.add(name, tensor)
    return found.by_name


def test_a_server_on_one_device_is_asked_for_what_it_keeps_or_joins() -> None:
    found = digests()
    joined = torch.cat([WEIGHTS[LAYER + f"self_attn.{part}_proj.weight"] for part in "qkv"])
    assert found.pop(LAYER + "self_attn.qkv_proj.weight") == sha(joined)
    assert found == {
        name: sha(WEIGHTS[name])
        for name in (
            "model.embed_tokens.weight",
            LAYER + "input_layernorm.weight",
            LAYER + "self_attn.q_norm.weight",
            LAYER + "self_attn.o_proj.weight",
            LAYER + "mlp.gate.weight",
        )
    }


@pytest.mark.parametrize("how", [{"tp_size": 2}, {"quantization": "fp8"}])
def test_one_that_cuts_or_quantizes_matrices_is_asked_for_vectors(how: dict[str, Any]) -> None:
    assert set(digests(**how)) == {LAYER + "input_layernorm.weight", LAYER + "self_attn.q_norm.weight"}


def test_weights_are_compared_as_the_server_holds_them() -> None:
    name = LAYER + "input_layernorm.weight"
    in_half = WEIGHTS[name].to(torch.bfloat16)
    assert digests(dtype="bfloat16")[name] == sha(in_half.view(torch.int16))
    assert digests(dtype="auto")[name] == sha(WEIGHTS[name])
    assert digests(device="cuda")[name] == digest_of_words(WEIGHTS[name])
    assert Form.of({**CPU, "device": "npu"}) is None
    assert Form.of({**CPU, "dtype": "fp8"}) is None


def test_what_differs_on_any_rank_is_named() -> None:
    form = Form.of(CPU)
    assert form is not None
    sent = Digests(form)
    for name, tensor in WEIGHTS.items():
        sent.add(name, tensor)
    good = {**sent.by_name, "model.rotary.cache": "0" * 16}
    bad = {**good, LAYER + "mlp.gate.weight": "0" * 16}
    assert sent.against([{"checksums": good}]) == (6, [])
    assert sent.against([{"checksums": good}, {"checksums": bad}]) == (12, [LAYER + "mlp.gate.weight"])
    assert sent.against([{"checksums": {"other": "0"}}]) == (0, [])


def test_the_digest_of_words_is_as_sglangs_kernel_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that the kernel gave; `make test-sglang` runs it."""
    for size, digest in GIVEN.items():
        assert digest_of_words(torch.arange(size, dtype=torch.int32)) == digest
    assert digest_of_words(torch.arange(7, dtype=torch.int16)) == GIVEN_SHORT
    assert digest_of_words(torch.zeros(0)) == "0" * 16
    monkeypatch.setattr("trainer.megatron.proof._CHUNK", 8192)
    assert digest_of_words(torch.arange(20_001, dtype=torch.int32)) == GIVEN[20_001], "however much is read at once"
