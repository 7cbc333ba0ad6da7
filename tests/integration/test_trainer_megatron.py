"""Megatron's model, loss, gradient and checkpoint against transformers and plain torch."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from farm.durable import Disk
from farm.errors import FarmError, UsageError
from trainer.batch import MicroBatch, TokenSequence, micro_batches
from trainer.guard import SaveTimeoutError, within
from trainer.megatron import checkpoint, convert, losses
from trainer.megatron.learner import Learner
from trainer.megatron.model import start_megatron, stop_megatron

VOCABULARY = 60
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True,
}  # fmt: skip
MOE = DENSE | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "tied": DENSE,
    "untied": DENSE | {"tie_word_embeddings": False},
    "moe": MOE,
    "moe-not-renormalised": MOE | {"norm_topk_prob": False},
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    start_megatron()
    yield
    stop_megatron()


def reference(config: dict[str, Any], folder: Path) -> torch.nn.Module:
    """A transformers model with weights far from their initial symmetry, saved to ``folder``."""
    torch.manual_seed(1)
    moe = config["model_type"] == "qwen3_moe"
    values = {k: v for k, v in config.items() if k != "model_type"}
    if moe:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))
    model = model.float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def rows(lengths: tuple[int, ...] = (40, 23, 31, 8)) -> list[TokenSequence]:
    chance = np.random.default_rng(0)
    return [
        TokenSequence(
            ids=chance.integers(0, VOCABULARY, n),
            sampled=chance.random(n) < 0.4,
            logprobs=(-4.0 + chance.normal(0, 0.5, n)).astype(np.float32),
            advantage=float(chance.normal()),
        )
        for n in lengths
    ]


def reference_logprobs(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    logits = model(torch.from_numpy(batch.ids)).logits.log_softmax(-1)
    chosen = logits.gather(-1, torch.from_numpy(batch.labels)[..., None]).squeeze(-1)
    return chosen[torch.from_numpy(batch.mask)]


@pytest.mark.parametrize("name", MODELS)
def test_same_logprobs_and_gradient_as_transformers_and_an_exact_round_trip(name: str, tmp_path: Path) -> None:
    source, written = tmp_path / "hf", tmp_path / "written"
    model = reference(MODELS[name], source)
    learner = Learner(source, clip_grad=1e9)
    (batch,) = micro_batches(rows(), max_tokens=1000)
    torch.testing.assert_close(learner.logprobs(batch), reference_logprobs(model, batch).detach(), atol=2e-5, rtol=0)

    written.mkdir()
    learner.write(written, source=source)
    before, after = convert.read_hf_weights(source), convert.read_hf_weights(written)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert (written / "config.json").read_bytes() == (source / "config.json").read_bytes()

    # The GRPO loss, written down once more in plain torch.
    new = reference_logprobs(model, batch)
    ratio = torch.exp(new - torch.from_numpy(batch.old_logprobs))
    advantage = torch.from_numpy(batch.advantages)
    loss = -torch.minimum(ratio * advantage, torch.clamp(ratio, 0.8, 1.28) * advantage).mean()
    loss.backward()
    result = learner.step([batch], losses.grpo(0.2, 0.28), lr=0.0)
    assert result.sums["loss"] / result.tokens == pytest.approx(loss.item(), rel=1e-4)
    grads = convert.to_hf({k: p.main_grad for k, p in learner.model.named_parameters()}, learner.hf)
    scale = max(float(g.abs().max()) for g in grads.values())
    expected = dict(model.named_parameters())
    compared = grads.keys() & expected.keys()  # transformers fuses the experts of a layer
    assert len(compared) >= len(grads) - 2 * 4 * 3
    for key in compared:
        torch.testing.assert_close(grads[key], expected[key].grad, atol=2e-5 * scale, rtol=1e-3)
    assert result.grad_norm == pytest.approx(
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item(), rel=1e-4
    )


def test_how_rows_are_split_into_micro_batches_does_not_matter(tmp_path: Path) -> None:
    reference(DENSE, tmp_path)
    norms, grads = [], []
    for budget in (1000, 45):
        learner = Learner(tmp_path, clip_grad=1e9)
        batches = micro_batches(rows(), max_tokens=budget)
        norms.append(learner.step(batches, losses.grpo(0.2, 0.28), lr=0.0).grad_norm)
        grads.append({k: p.main_grad.clone() for k, p in learner.model.named_parameters()})
    assert len(micro_batches(rows(), max_tokens=45)) > 1
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for key, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][key], atol=1e-5 * norms[0], rtol=1e-4)


def test_clipping_counts_tokens_and_takes_their_gradient() -> None:
    old = np.zeros(4, np.float32)
    new = torch.log(torch.tensor([2.0, 0.5, 2.0, 0.5])).requires_grad_()
    batch = MicroBatch(
        ids=np.zeros((1, 4), np.int64), labels=np.zeros((1, 4), np.int64), mask=np.ones((1, 4), np.bool_),
        old_logprobs=old, advantages=np.array([1.0, 1.0, -1.0, -1.0], np.float32),
    )  # fmt: skip
    loss, sums = losses.grpo(0.2, 0.28)(new, batch)
    loss.backward()
    assert sums["clipped"] == 2
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, -0.5, 2.0, 0.0])
    assert loss.item() == pytest.approx(-(1.28 + 0.5 - 2.0 - 0.8))


def test_a_corrupt_recorded_logprob_gives_a_finite_step(tmp_path: Path) -> None:
    reference(DENSE, tmp_path)
    (row,) = rows((12,))
    row.logprobs[:] = -1e30
    result = Learner(tmp_path).step(micro_batches([row], max_tokens=99), losses.grpo(0.2, 0.28), lr=1e-3)
    assert all(np.isfinite(v) for v in (result.grad_norm, *result.sums.values()))


def test_resuming_from_a_checkpoint_is_bit_equal(tmp_path: Path) -> None:
    reference(DENSE, tmp_path / "hf")
    batches = micro_batches(rows(), max_tokens=60)
    loss = losses.grpo(0.2, 0.28)
    one = Learner(tmp_path / "hf")
    for _ in range(2):
        one.step(batches, loss, lr=1e-2)
    checkpoint.save(tmp_path, 2, learner=one.state(), loop={"cursor": [1, 2]}, keep=1)
    two = Learner(tmp_path / "hf", seed=7)
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    step, learner, loop = loaded
    assert (step, loop) == (2, {"cursor": [1, 2]})
    two.load_state(learner)
    for _ in range(2):
        assert one.step(batches, loss, lr=1e-2) == two.step(batches, loss, lr=1e-2)
    for key, value in one.state()["model"].items():
        assert torch.equal(value, two.state()["model"][key])


def test_old_checkpoints_and_half_written_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, learner={}, loop={}, keep=2)
    (tmp_path / "step-000004.pt.123.tmp").write_bytes(b"half")
    assert checkpoint.load(tmp_path) == (3, {}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002.pt", "step-000003.pt"]
    assert checkpoint.load(tmp_path / "none") is None


def test_unreadable_checkpoints_are_named(tmp_path: Path) -> None:
    (tmp_path / "step-000001.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UsageError, match=r"step-000001\.pt: not a readable checkpoint"):
        checkpoint.load(tmp_path)
    buffer = io.BytesIO()
    torch.save({"schema_version": 99}, buffer)
    (tmp_path / "step-000001.pt").write_bytes(buffer.getvalue())
    with pytest.raises(UsageError, match="schema version 99"):
        checkpoint.load(tmp_path)


def test_a_save_that_hangs_is_cut_by_its_time_out(tmp_path: Path) -> None:
    release = threading.Event()

    class Hanging(Disk):
        def write(self, path: Path, fill: Any) -> None:
            release.wait(30)
            raise OSError("released")

    def save() -> Path:
        return checkpoint.save(tmp_path, 1, learner={}, loop={}, keep=1, disk=Hanging())

    with pytest.raises(SaveTimeoutError, match=r"the checkpoint did not end within 0\.05 s"):
        within(0.05, "the checkpoint", save)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "save: the checkpoint":
            thread.join(5)
    assert checkpoint.load(tmp_path) is None
    with pytest.raises(FarmError, match="cannot write the checkpoint: released"):
        within(5, "the checkpoint", save)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; allowed: qwen3, qwen3_moe"),
        ({"head_dim": None}, "head_dim is None; allowed: a whole number above 0"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"num_hidden_layers": 3}, "does not hold the weight"),
        ({"hidden_size": 16}, "do not fit"),
    ],
)
def test_a_malformed_model_folder_is_one_clear_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    reference(DENSE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        Learner(tmp_path)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        Learner(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="can't be read as JSON"):
        Learner(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        Learner(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(UsageError, match="can't be read as safetensors"):
        Learner(tmp_path)
