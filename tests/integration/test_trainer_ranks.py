"""Two ranks on gloo against one: the same step, the same bytes out of a conversion, any checkpoint on any layout.

Real processes: this file run as a program imports Megatron once and forks two ranks, which go through all layouts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.batch import MicroBatch, TokenSequence, micro_batches
from trainer.config import ParallelConfig
from trainer.ranks import RENDEZVOUS, Seat

VOCABULARY = 60
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense": DENSE,
    "moe": DENSE | {
        "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("dense", {"tensor": 2, "recompute": "full"}),
    "data-distributed-packed": ("dense", {"distributed_optimizer": True, "packing": True}),
    "pipeline": ("dense", {"pipeline": 2}),
    "moe-data": ("moe", {"recompute": "selective"}),
    "moe-expert": ("moe", {"expert": 2, "distributed_optimizer": True}),
    "moe-tensor-expert": ("moe", {"tensor": 2, "expert": 2, "packing": True}),
    "moe-pipeline": ("moe", {"pipeline": 2, "packing": True}),
    "tensor-bfloat16": ("dense", {"tensor": 2, "precision": "bfloat16", "distributed_optimizer": True}),
}
RESHARDED = {"data-distributed-packed": "tensor", "pipeline": "data-distributed-packed",
             "moe-expert": "moe-data", "moe-tensor-expert": "moe-expert",
             "moe-pipeline": "moe-tensor-expert"}  # fmt: skip
"""Layout -> the one before it whose checkpoint it loads as well."""
STEPS = 2
LR = 1e-2


def parallel(name: str) -> ParallelConfig:
    return ParallelConfig(ranks=2, timeout_s=60, **LAYOUTS[name][1])


def batches(*, packed: bool) -> list[MicroBatch]:
    """Three micro-batches: the second data rank gets a blank one."""
    chance = np.random.default_rng(0)
    rows = [
        TokenSequence(
            ids=chance.integers(0, VOCABULARY, n),
            sampled=chance.random(n) < 0.4,
            logprobs=(-4.0 + chance.normal(0, 0.5, n)).astype(np.float32),
            advantage=float(chance.normal()),
        )
        for n in (40, 23, 31, 8, 19)
    ]
    found = micro_batches(rows, max_tokens=48 if packed else 64, packed=packed)
    assert len(found) % 2
    return found


def make_models(folder: Path) -> None:
    """Random weights far from their initial symmetry."""
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.utils.logging.disable_progress_bar()
    for name, values in MODELS.items():
        settings = {k: v for k, v in values.items() if k != "model_type"}
        if values["model_type"] == "qwen3_moe":
            model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings))
        else:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
        model.save_pretrained(folder / name)
        place = folder / name / "model.safetensors"
        chance = np.random.default_rng(1)
        weights = load_file(place)
        for key in sorted(weights):
            noise = chance.normal(1.0 if weights[key].dim() == 1 else 0.0, 0.2, tuple(weights[key].shape))
            weights[key].copy_(weights[key].new_tensor(noise))
        save_file(weights, place, metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------ one rank of two


def main(folder: Path, engine_url: str) -> int:
    """Import once, then be two ranks; 0 when both end well. The first that does not takes the other with it."""
    import trainer.megatron.ranks  # noqa: F401

    children = set()
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                rank_main(folder, rank, engine_url)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.add(child)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def rank_main(folder: Path, rank: int, engine_url: str) -> None:
    from trainer.megatron import buckets, losses
    from trainer.megatron.learner import mpu
    from trainer.megatron.model import stop_megatron
    from trainer.megatron.push import PushRules, push
    from trainer.megatron.ranks import RankedLearner, join

    line = join(Seat(rank=rank, ranks=2, local_rank=rank), ParallelConfig(ranks=2, timeout_s=60))
    for name, (model, _) in LAYOUTS.items():
        how = parallel(name)
        here = folder / name
        if rank == 1:
            _help(line)
        else:
            here.mkdir()
            learner = RankedLearner(line, folder / model, parallel=how)
            (here / "before").mkdir()
            learner.write(here / "before", source=folder / model)
            results = [learner.step(batches(packed=how.packing), losses.grpo(0.2, 0.28), lr=LR) for _ in range(STEPS)]
            (here / "after").mkdir()
            learner.write(here / "after", source=folder / model)
            learner.save(here / "checkpoints", STEPS, loop={"at": name}, keep=1)
            sums = [[r.tokens, r.grad_norm, r.sums["loss"], r.sums["kl"], r.sums["clipped"]] for r in results]
            (here / "steps.json").write_text(json.dumps(sums))
            sent = learner.outgoing(max_bytes=20_000)
            push([engine_url], sent, version=name, rules=PushRules(timeout_s=60.0))
            for one in learner.outgoing(max_bytes=20_000):  # given up half-way: the other rank must not hang
                assert one.checksum == buckets.checksum(one.tensors)
                break
            for where in ("own", "other"):
                source = name if where == "own" else RESHARDED.get(name)
                if source is None:
                    continue
                assert learner.resume(folder / source / "checkpoints") == (STEPS, {"at": source})
                (here / where).mkdir()
                learner.write(here / where, source=folder / model)
            learner.step(batches(packed=how.packing), losses.grpo(0.2, 0.28), lr=LR)
            line.say("next")
        mpu.destroy_model_parallel()
    stop_megatron()


def _help(line: Any) -> None:
    """As ``serve`` does, until the next layout."""
    from trainer.megatron.learner import Learner

    learner: Any = None
    while True:
        call, args, kw = line.hear()
        if call == "next":
            return
        if call == "build":
            learner = Learner(*args, **kw)
        else:
            getattr(learner, call)(*args, **kw)


# ------------------------------------------------------------------------------------------------ the tests


pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which two ranks have gone through all layouts."""
    from push_engine import push_engine
    from safetensors.torch import save_file

    def keep(version: str, tensors: dict[str, Any]) -> None:
        save_file(tensors, folder / f"{version}-pushed.safetensors", metadata={"format": "pt"})

    folder = tmp_path_factory.mktemp("ranks")
    make_models(folder)
    environment = os.environ | {RENDEZVOUS: str(folder / "rendezvous"), "GLOO_SOCKET_IFNAME": "lo"}
    with push_engine(on_end=keep) as engine:
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder), engine.url],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=200)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, errors[-6000:]
    yield folder
    shutil.rmtree(folder)


def same_weights(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def single(folder: Path, model: str, **how: Any) -> Any:
    from trainer.megatron.learner import Learner

    return Learner(folder / model, parallel=ParallelConfig(**how))


@pytest.fixture(scope="module")
def expected(done: Path) -> Iterator[dict[str, tuple[list[list[float]], dict[str, Any]]]]:
    """Model -> (figures of the steps, weights after them), on one rank."""
    from trainer.megatron import convert, losses
    from trainer.megatron.model import stop_megatron

    found = {}
    for model in MODELS:
        learner = single(done, model)
        results = [learner.step(batches(packed=False), losses.grpo(0.2, 0.28), lr=LR) for _ in range(STEPS)]
        figures = [[r.tokens, r.grad_norm, r.sums["loss"], r.sums["kl"], r.sums["clipped"]] for r in results]
        (done / f"{model}-single").mkdir()
        learner.write(done / f"{model}-single", source=done / model)
        found[model] = (figures, convert.read_hf_weights(done / f"{model}-single"))
    yield found
    stop_megatron()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_conversion_on_ranks_is_bit_equal(name: str, done: Path) -> None:
    model = LAYOUTS[name][0]
    if parallel(name).precision == "float32":
        assert same_weights(done / name / "before", done / model)
    else:
        from trainer.megatron import convert

        before, after = convert.read_hf_weights(done / model), convert.read_hf_weights(done / name / "before")
        assert all(after[k].equal(before[k].bfloat16().float()) for k in before)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_pushed_from_ranks_is_what_they_publish(name: str, done: Path) -> None:
    """To the byte: the receiver's file is the published one."""
    pushed = (done / f"{name}-pushed.safetensors").read_bytes()
    assert pushed == (done / name / "after" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_on_ranks_equals_the_step_on_one(name: str, done: Path, expected: Any) -> None:
    from trainer.megatron import convert

    figures, weights = expected[LAYOUTS[name][0]]
    exact = parallel(name).precision == "float32"
    got = json.loads((done / name / "steps.json").read_text())
    assert [row[0] for row in got] == [row[0] for row in figures]
    assert got[0][1:4] == pytest.approx(figures[0][1:4], rel=1e-4 if exact else 0.05)
    if exact:
        assert got[1][1:4] == pytest.approx(figures[1][1:4], rel=2e-3)
    after = convert.read_hf_weights(done / name / "after")
    # Adam's first steps are lr times the gradient's sign, so a near-zero gradient may turn: few, by two steps at most.
    far = sum(int(((after[k] - weights[k]).abs() > 1e-4).sum()) for k in weights)
    total = sum(w.numel() for w in weights.values())
    assert max(float((after[k] - weights[k]).abs().max()) for k in weights) <= 2 * STEPS * LR + 0.01
    if exact:
        assert far <= 0.002 * total
    assert not same_weights(done / name / "after", done / name / "before")


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_loads_on_its_own_layout_on_another_and_on_one_rank(name: str, done: Path) -> None:
    assert same_weights(done / name / "own", done / name / "after")
    if name in RESHARDED:
        assert same_weights(done / name / "other", done / RESHARDED[name] / "after")
    learner = single(done, LAYOUTS[name][0], precision=parallel(name).precision)
    assert learner.resume(done / name / "checkpoints") == (STEPS, {"at": name})
    out = done / f"{name}-one"
    out.mkdir()
    learner.write(out, source=done / LAYOUTS[name][0])
    assert same_weights(out, done / name / "after")


@pytest.mark.usefixtures("expected")
def test_a_resharded_run_goes_on_as_the_first_one_would(done: Path) -> None:
    """The optimizer's moments and step count are resharded too: the next step on one rank is that of two."""
    from trainer.megatron import losses

    single_run = single(done, "dense")
    for _ in range(STEPS):
        single_run.step(batches(packed=False), losses.grpo(0.2, 0.28), lr=LR)
    resharded = single(done, "dense")
    assert resharded.resume(done / "data-distributed-packed" / "checkpoints")
    one, other = (x.step(batches(packed=False), losses.grpo(0.2, 0.28), lr=LR) for x in (single_run, resharded))
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=5e-3)
    moments = [next(iter(x._optimizer.optimizer.state.values())) for x in (single_run, resharded)]
    assert int(moments[0]["step"]) == int(moments[1]["step"]) == STEPS + 1
    assert float((moments[0]["exp_avg"] - moments[1]["exp_avg"]).norm() / moments[0]["exp_avg"].norm()) < 0.01


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
