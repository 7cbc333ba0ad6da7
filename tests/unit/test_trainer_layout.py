"""What can lie on how many ranks, and what it needs of each GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farm.errors import UsageError
from harness.twin.sheets import GPUS
from trainer.check import check, memory_bytes, model_config, remedies
from trainer.cli import cli
from trainer.config import PROFILES, ParallelConfig, TrainerConfig, load_config
from trainer.layout import Layout, check_layout
from trainer.memory import EXPERT_IMBALANCE, GIB, GPU_BYTES, RESERVED_BYTES, estimate
from trainer.shapes import known_model, parameters

REFERENCE = known_model("qwen3-30b-a3b")
DENSE = known_model("qwen3-8b")
TIED = known_model("qwen3-0.6b")


def need(hf: dict[str, Any], layout: Layout, **how: Any) -> dict[str, float]:
    settings: dict[str, Any] = {
        "tokens": 1024, "precision": "bfloat16", "distributed_optimizer": True, "recompute": "none",
    } | how  # fmt: skip
    return asdict(estimate(hf, layout, **settings))


def test_groups_of_a_layout() -> None:
    layout = Layout(ranks=16, tensor=4, pipeline=2, expert=8)
    assert (layout.data, layout.expert_data, layout.sequence_parallel) == (2, 1, True)
    assert [layout.stage_of(layer, 6) for layer in range(6)] == [0, 0, 0, 1, 1, 1]
    assert not Layout(ranks=8).sequence_parallel


@pytest.mark.parametrize(
    ("hf", "layout", "message"),
    [
        (
            REFERENCE,
            Layout(ranks=6, tensor=4),
            r"tensor is 4, which does not divide the ranks of one .* \(6\); .* 1, 2, 3, 6",
        ),
        (REFERENCE, Layout(ranks=8, pipeline=3), r"pipeline is 3, which does not divide the number of ranks \(8\)"),
        (REFERENCE, Layout(ranks=8, tensor=8), r"tensor is 8, .* num_key_value_heads \(4\); allowed: 1, 2, 4$"),
        (REFERENCE, Layout(ranks=3, expert=3), r"expert is 3, .* num_experts \(128\); allowed: 1, 2, 4, 8"),
        (REFERENCE, Layout(ranks=5, pipeline=5), r"pipeline is 5, .* num_hidden_layers \(48\)"),
        (DENSE, Layout(ranks=2, expert=2), r"expert is 2, but qwen3 has no experts; set it to 1"),
        (REFERENCE, Layout(ranks=2, tensor=2), r"expert is 1 and .*tensor 2, .* set expert to 2 or more"),
        (TIED, Layout(ranks=2, pipeline=2), r"pipeline is 2, but this model's output layer is its embedding"),
    ],
)
def test_what_can_not_lie_so_is_refused(hf: dict[str, Any], layout: Layout, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_layout(layout, hf)


def test_one_rank_holds_all() -> None:
    got = need(DENSE, Layout(), distributed_optimizer=False)
    assert got["weights"] == 2 * parameters(DENSE)
    assert got["gradients"] == 4 * parameters(DENSE)
    assert got["optimizer"] == 12 * parameters(DENSE)
    assert got["reserved"] == RESERVED_BYTES
    full = need(DENSE, Layout(), precision="float32", distributed_optimizer=False)
    assert (full["weights"], full["optimizer"]) == (4 * parameters(DENSE), 8 * parameters(DENSE))


def test_the_reference_on_eight_gpus_by_hand() -> None:
    got = need(REFERENCE, Layout(ranks=8, tensor=4, expert=8), recompute="full", tokens=32_768)
    experts = 48 * 128 * 3 * 2048 * 768 / 8
    cut = 48 * (2048 * 5120 + 4096 * 2048) + 2 * 151_936 * 2048
    whole = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    shared = cut / 4 + whole
    assert got["weights"] == pytest.approx(2 * (shared + experts))
    assert got["gradients"] == pytest.approx(4 * (shared + experts))
    assert got["optimizer"] == pytest.approx(12 * (shared / 2 + experts))  # two data ranks, one copy of each expert
    per_token = 4 * 2048 + 3 * 4096 + 3 * 512 + 8 * EXPERT_IMBALANCE * (2 * 2048 + 3 * 768) + 4 * 128 / 2
    kept = 47 * 2048 + per_token  # every layer's input, and one layer as it is computed again
    assert got["activations"] == pytest.approx(kept * 2 * 32_768 / 4)
    assert got["logits"] == pytest.approx(32_768 * 151_936 / 4 * 8)


def test_layouts_divide_what_they_say() -> None:
    one = need(DENSE, Layout())
    two = need(DENSE, Layout(ranks=2, tensor=2))
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert two["weights"] == pytest.approx((one["weights"] - 2 * norms) / 2 + 2 * norms)
    assert two["activations"] == pytest.approx(one["activations"] / 2)
    assert need(DENSE, Layout(ranks=2))["optimizer"] == pytest.approx(one["optimizer"] / 2)
    stages = need(DENSE, Layout(ranks=2, pipeline=2))
    assert stages["weights"] == pytest.approx(one["weights"] / 2, rel=0.001)
    # The first of two stages holds two micro-batches of half the layers.
    assert stages["activations"] == pytest.approx(one["activations"])


def test_recomputation_and_tokens() -> None:
    sizes = [need(REFERENCE, Layout(), recompute=mode)["activations"] for mode in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)
    twice = need(REFERENCE, Layout(), tokens=2048)
    once = need(REFERENCE, Layout())
    for part in ("activations", "logits"):
        assert twice[part] == pytest.approx(2 * once[part])


def test_gpus_are_those_of_the_twin() -> None:
    assert {name: gpu.hbm_bytes for name, gpu in GPUS.items()} == GPU_BYTES
    assert memory_bytes("96GiB") == 96 * GIB
    assert memory_bytes("80 gb") == 80e9
    with pytest.raises(UsageError, match=r"'h900' has no data sheet; known: mi355x"):
        memory_bytes("h900")


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_profiles_fit_where_they_say(profile: Path) -> None:
    config = load_config(Path(profile.stem))
    hf = known_model(profile.stem)
    for gpu in ("h200", "mi355x"):
        fit = check(config, hf, memory=GPU_BYTES[gpu])
        assert fit.fits, gpu
    assert not check(config, hf, memory=24 * GIB).fits


def test_remedies_help() -> None:
    hf, memory = dict(DENSE), GPU_BYTES["h100"]
    parallel = ParallelConfig(ranks=8, tensor=4, precision="bfloat16", distributed_optimizer=True)
    config = TrainerConfig(micro_batch_tokens=262_144, parallel=parallel)
    assert not check(config, hf, memory=memory).fits
    found = remedies(config, hf, memory=memory)
    sizes = [int(text.partition("=")[2]) for text in found if text.startswith("micro_batch_tokens=")]
    assert len(sizes) == 1
    assert check(config.model_copy(update={"micro_batch_tokens": sizes[0]}), hf, memory=memory).fits
    hopeless = remedies(TrainerConfig(), dict(REFERENCE), memory=GIB)
    assert hopeless == ["more GPUs with a larger parallel.tensor, expert or pipeline, or GPUs with more memory"]


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    fits = run(cli, ["check", "--config", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"])
    assert (fits.exit_code, fits.output.splitlines()[-1]) == (0, "fits")
    assert "30.53 B parameters, 3.35 B active, on 8 ranks: tensor 4 x pipeline 1 x data 2" in fits.output
    small = run(cli, ["check", "--config", "qwen3-30b-a3b", "--gpu", "40GiB"])
    assert small.exit_code == 1
    assert "does not fit; what would help: " in small.output
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    own = run(cli, ["check", "--model", str(tmp_path), "--gpu", "mi355x"])
    assert "8.19 B parameters" in own.output
    for arguments, message in [
        (["--model", "nothing"], "neither a model folder nor known; known: qwen3-30b-a3b"),
        (["--gpus", "8", "--set", "parallel.tensor=8"], "tensor is 8, which does not divide num_key_value_heads (4)"),
        (["--set", 'parallel.recompute="all"'], "parallel.recompute: given 'all'"),
        (["--config", "qwen3-30b"], "shipped profile: qwen3-30b-a3b"),
    ]:
        refused = run(cli, ["check", *arguments])
        assert isinstance(refused.exception, UsageError), arguments
        assert message in str(refused.exception)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="model_type is 'llama'"):
        model_config(str(tmp_path))
