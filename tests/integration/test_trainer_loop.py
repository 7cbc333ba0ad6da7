"""The trainer on a small run: learning, stopping and resuming, publication, export, supervised training."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner
from push_engine import push_engine
from safetensors.torch import load_file

from farm.config import load_config, to_json
from farm.durable import Disk, FolderLock
from farm.errors import UsageError
from farm.farm_state import write_status
from farm.policy_log import PolicyLog
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import EndReason, Evidence, Graded, SamplingParams, Trajectory, Turn, Usage, VersionSpan
from trainer.cli import cli
from trainer.config import PushConfig, TrainerConfig
from trainer.guard import SaveTimeoutError
from trainer.loop import Trainer
from trainer.megatron.learner import Learner
from trainer.megatron.model import start_megatron, stop_megatron
from trainer.metrics import read_metrics
from trainer.publish import export
from trainer.replay import replay
from trainer.sft import SftStep, learning_rate, train_sft
from trainer.start import await_run, first_policy

VOCABULARY = 20
GROUP = 4
MODEL = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    start_megatron()
    yield
    stop_megatron()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    empty, folder = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("model")
    (empty / "config.json").write_text(json.dumps(MODEL))
    (empty / "tokenizer.json").write_text('{"made": "here"}')
    Learner(empty, random_weights=True).write(folder, source=empty)
    return folder


def trajectory(
    number: int, *, step: int, reward: float, ids: tuple[int, ...], context: tuple[int, ...] = (1, 2)
) -> Trajectory:
    turn = Turn(
        segment=0, context_ids=context, output_ids=ids, output_logprobs=tuple(-3.0 for _ in ids),
        spans=(VersionSpan(step=step, start=0, end=len(ids)),), finish_reason="stop", action="", observation="",
        exit_code=0, cached_tokens=0, retractions=0,
    )  # fmt: skip
    evidence = Evidence(statuses={}, resolved=reward > 0, patch_applied=True, exit_code=0, log_tail="")
    return Trajectory(
        episode_id=f"{number:05d}", group_id=str(number // GROUP), group_size=GROUP, index=number % GROUP,
        instance_id="i", task_digest="", dataset="", repo="", strata={}, weight=1.0, seed=0, purpose="rl",
        sampling=SamplingParams(), attempt=1, worker="", engine_url="",
        outcome=Graded(reward=reward, evidence=evidence),
        end_reason=EndReason.SUBMITTED, turns=(turn,), patch="", timeline=(), usage=Usage(), ended_at_s=float(number),
    )  # fmt: skip


def make_run(path: Path, *, steps: int = 6, flat: bool = False, sets: tuple[str, ...] = ()) -> RunFolder:
    """Two groups a step; an episode is rewarded when it says 7."""
    sizes = ("rollout.group_size=4", "rollout.groups_per_step=2", "rollout.min_attempts=4")
    run = RunFolder.create(path, to_json(load_config(sets=[*sizes, *sets])))
    chance = random.Random(0)
    with DirectoryLog(run.trajectories) as log:
        for step in range(steps):
            rows = []
            for i in range(2 * GROUP):
                good = i % 2 == 0 and not flat
                ids = tuple(7 if good else chance.choice((3, 4, 5)) for _ in range(3))
                rows.append(trajectory(step * 2 * GROUP + i, step=step, reward=float(good), ids=ids))
            log.append_many(rows)
            log.seal()
    return run


def train(run: RunFolder, *, policy: Path | None = None, disk: Disk | None = None, **how: Any) -> int:
    settings = {k: how.pop(k) for k in list(how) if k in TrainerConfig.model_fields}
    trainer = Trainer(run, TrainerConfig(lr=0.01, **settings), policy=policy, wait_s=0.1, disk=disk or Disk())
    try:
        return trainer.run(**how)
    finally:
        trainer.close()


def digests(run: RunFolder) -> list[str]:
    return [v.digest for v in PolicyLog(run.policies).history()]


def test_it_learns_what_is_rewarded_and_says_what_it_did(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run")
    said: list[Any] = []
    assert train(run, policy=model, steps=6, report=said.append) == 6
    versions = PolicyLog(run.policies).history()
    assert [v.step for v in PolicyLog(run.policies).versions()] == [0, 3, 4, 5, 6]
    assert [(v.step, v.consumed_groups) for v in versions] == [(s, 2 * s) for s in range(7)]
    assert len({v.digest for v in versions}) == 7
    lines = read_metrics(run.metrics)
    assert [line["step"] for line in lines] == [line["step"] for line in said] == list(range(1, 7))
    assert lines[0] | {
        "groups": 2, "episodes": 8, "trained_episodes": 8, "reward_mean": 0.5, "pass_rate": 0.5, "staleness_max": 0,
        "tokens": 40, "loss_tokens": 24, "dropped": [], "failed_episodes": 0, "consumed_groups": 2,
    } == lines[0]  # fmt: skip
    assert all(line["grad_norm"] > 0 and line["approx_kl"] >= 0 and line["wait_s"] >= 0 for line in lines)
    assert (Path(versions[-1].path) / "tokenizer.json").read_text() == '{"made": "here"}'
    from trainer.batch import micro_batches, sequences

    (probe,) = micro_batches(sequences(trajectory(0, step=0, reward=1.0, ids=(7,))), max_tokens=99)
    before, after = (float(Learner(Path(v.path)).logprobs(probe)[0]) for v in (versions[0], versions[-1]))
    assert after > before + 0.1


def test_stopping_and_resuming_equals_running_through(tmp_path: Path, model: Path) -> None:
    through, parts = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    train(through, policy=model, steps=5)
    for steps in (2, 2, 3, 5):
        assert train(parts, policy=model, steps=steps, checkpoint_every=2) == steps
    assert digests(parts) == digests(through)
    assert [line["step"] for line in read_metrics(parts.metrics)] == [1, 2, 3, 4, 5]


def test_a_replay_comes_to_the_same_batches_and_weights(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run")
    for steps in (2, 3, 5):  # stopped and resumed: a replay goes through in one
        train(run, policy=model, steps=steps, checkpoint_every=2)
    PolicyLog(run.policies).prune(keep=1)  # all but the first and the last are gone
    said: list[int] = []
    replayed = replay(run, report=lambda step: said.append(step.step))
    assert said == [1, 2, 3, 4, 5]
    assert all(step.same and step.same_batch for step in replayed)
    assert len({step.weights for step in replayed}) == len({step.batch for step in replayed}) == 5
    assert [step.step for step in replay(run, steps=2)] == [1, 2]

    lines = read_metrics(run.metrics)
    lines[1]["batch_digest"] = "other"
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = run.policies / "pruned" / "step-000004.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"digest": "other"}))
    out = tmp_path / "replay.json"
    done = CliRunner().invoke(cli, ["replay", str(run.path), "--out", str(out)])
    assert done.exit_code == 1
    assert "step 2  batch DIFFERENT  weights same\nstep 4  batch same  weights DIFFERENT\n3 of 5" in done.output
    assert [step["step"] for step in json.loads(out.read_text())["steps"]] == [1, 2, 3, 4, 5]


def test_a_replay_needs_steps_all_rows_and_the_first_policy(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with pytest.raises(UsageError, match=r"config\.json: unreadable"):
        replay(run)
    train(run, policy=model, steps=2)
    lines = read_metrics(run.metrics)
    del lines[0]["batch_digest"]  # as a run of an older version has it
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    old, _ = replay(run)
    assert (old.same_batch, old.same_weights, old.same) == (None, True, True)
    run.metrics.write_text(run.metrics.read_text() + json.dumps(lines[-1] | {"step": 3}) + "\n")
    with pytest.raises(UsageError, match="ends at step 2 of 3"):
        replay(run)
    shutil.rmtree(run.policies / "step-000000")
    with pytest.raises(UsageError, match="policy step 0 is gone"):
        replay(run)
    run.metrics.unlink()
    with pytest.raises(UsageError, match="holds no training step"):
        replay(run)


def test_a_batch_without_gradient_moves_on_with_the_same_weights(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, flat=True)
    assert train(run, policy=model, steps=2) == 2
    assert len(set(digests(run))) == 1
    line = read_metrics(run.metrics)[-1]
    assert (line["zero_variance_groups"], line["loss"], line["grad_norm"], line["tokens"]) == (2, None, None, 0)
    assert PolicyLog(run.policies).versions()[-1].consumed_groups == 4


def test_it_waits_for_shards_and_stops_when_told(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    stop = threading.Event()
    reached: list[int] = []
    trainer = Trainer(run, TrainerConfig(), policy=model, stop=stop)
    thread = threading.Thread(target=lambda: reached.append(trainer.run()))
    thread.start()
    give_up_at = time.monotonic() + 60
    while trainer.step < 1 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    stop.set()
    thread.join(60)
    trainer.close()
    assert reached == [1]


def test_a_save_that_hangs_ends_the_trainer_and_the_next_one_resumes(tmp_path: Path, model: Path) -> None:
    release = threading.Event()

    class Hanging(Disk):
        def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
            if path.name.startswith("step-000002.pt"):
                release.wait(60)
                raise OSError("released")
            super().write(path, fill)

    calm, run = make_run(tmp_path / "calm"), make_run(tmp_path / "run")
    train(calm, policy=model, steps=3)
    with pytest.raises(SaveTimeoutError, match="checkpoint of step 2 did not end within 3 s"):
        train(run, policy=model, steps=3, disk=Hanging(), save_timeout_s=3.0)
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("save:"):
            thread.join(10)
    assert len(digests(run)) == 2
    assert train(run, steps=3) == 3
    assert digests(run) == digests(calm)


def test_one_trainer_one_configuration_one_first_policy(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match="no policy was published"):
        train(run)
    with pytest.raises(UsageError, match=r"no config\.json"):
        train(run, policy=tmp_path)
    first = Trainer(run, TrainerConfig(lr=0.01), policy=model)
    with pytest.raises(UsageError, match="trainer already"):
        train(run)
    first.close()
    with pytest.raises(UsageError, match="seed: 0 -> 1"):
        train(run, seed=1)


def test_farm_and_trainer_may_start_in_any_order(tmp_path: Path, model: Path) -> None:
    said: list[str] = []
    run = tmp_path / "run"
    starting = threading.Thread(target=lambda: make_run(run, steps=1))
    starting.start()
    assert await_run(run, wait_s=30, stop=threading.Event(), say=said.append).path == run
    starting.join()
    policies = PolicyLog(RunFolder(run).policies)
    other = FolderLock(policies.path / "publisher.lock", "publisher")
    other.acquire()
    publishing = threading.Timer(0.2, other.release)
    publishing.start()
    assert first_policy(policies, model, wait_s=30, stop=threading.Event()).step == 0
    publishing.join()
    assert first_policy(policies, tmp_path / "ignored", wait_s=0, stop=threading.Event()).step == 0


def test_export_copies_a_verified_policy(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    train(run, policy=model, steps=2)
    policies = PolicyLog(run.policies)
    assert export(policies, tmp_path / "out").step == 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert export(policies, tmp_path / "first", step=0).step == 0
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        export(policies, tmp_path / "out")
    with pytest.raises(UsageError, match="policy 9 not found; there are 0, 1, 2; others"):
        export(policies, tmp_path / "nine", step=9)
    (Path(policies.versions()[1].path) / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(UsageError, match="not those that were published"):
        export(policies, tmp_path / "one", step=1)
    assert not (tmp_path / "one").exists()


def demonstrations(n: int) -> list[Trajectory]:
    return [trajectory(i, step=0, reward=1.0, ids=(3, 4, 5, 6), context=(1, 2, i % 3)) for i in range(n)]


def test_supervised_training_lowers_the_loss_and_repeats_bit_by_bit(tmp_path: Path, model: Path) -> None:
    outs = []
    for name in ("a", "b"):
        history = train_sft(
            demonstrations(40), policy=model, out=tmp_path / name, epochs=4, lr=0.01, batch=8, seed=3, init="random"
        )
        assert [h.step for h in history] == list(range(1, 21))
        assert history[-1].loss < history[0].loss / 2
        outs.append((tmp_path / name / "model.safetensors").read_bytes())
        assert (tmp_path / name / "tokenizer.json").exists()
    assert outs[0] == outs[1]


def test_supervised_training_can_take_all_ids_and_a_number_of_steps(tmp_path: Path, model: Path) -> None:
    said: list[SftStep] = []
    train_sft(demonstrations(3), policy=model, out=tmp_path / "o", loss="all", steps=5, batch=2, on_step=said.append)
    assert [(s.step, s.steps, s.tokens) for s in said] == [(1, 5, 14), (2, 5, 7), (3, 5, 14), (4, 5, 7), (5, 5, 14)]
    rates = [learning_rate(s, 100, 1.0) for s in range(100)]
    assert max(rates) == rates[4] == 1.0
    assert rates[0] == 0.25
    assert 0.1 <= rates[-1] < 0.11


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no sampled ids"),
        ([trajectory(0, step=0, reward=1.0, ids=(VOCABULARY,))], "token id 20, the model's vocabulary has 20"),
        ([trajectory(0, step=0, reward=1.0, ids=(1,) * 90)], "a sequence of 92 ids"),
    ],
)
def test_supervised_training_refuses_what_does_not_fit(
    rows: list[Trajectory], message: str, tmp_path: Path, model: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        train_sft(rows, policy=model, out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.timeout(240)
def test_the_commands_from_demonstrations_to_export(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """sft, train in a process of its own until SIGTERM, export."""
    with DirectoryLog(tmp_path / "demos") as log:
        log.append_many(demonstrations(16))
        log.seal()
    run = make_run(tmp_path / "run")
    demos, sft, out = (str(tmp_path / name) for name in ("demos", "sft", "out"))
    cli.main(["sft", "--log", demos, "--policy", str(model), "--out", sft, "--batch", "4"], standalone_mode=False)
    assert "step 4/4" in capsys.readouterr().out

    command = [sys.executable, "-m", "trainer.cli", "train", "--run", run.path, "--policy", sft, "--set", "lr=1e-3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("step 1 ")
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "stopped at step" in rest
    reached = len(digests(run)) - 1
    assert [line["step"] for line in read_metrics(run.metrics)] == list(range(1, reached + 1))

    cli.main(["export", "--run", str(run.path), "--step", "1", "--out", out], standalone_mode=False)
    assert "wrote step-000001" in capsys.readouterr().out


def test_policies_are_pushed_to_the_farms_engines_and_training_does_not_depend_on_it(
    tmp_path: Path, model: Path
) -> None:
    run = make_run(tmp_path / "run", sets=("engine.weights=push", "engine.push_wait_s=20"))
    with push_engine() as engine:
        engines = [{"url": engine.url, "state": "up"}, {"url": "http://127.0.0.1:9", "state": "down"}]
        write_status(run, {"state": "running", "engines": engines})
        assert train(run, policy=model, steps=2, push=PushConfig(bucket_bytes=2000)) == 2
        latest = PolicyLog(run.policies).latest()
        assert latest is not None
        assert engine.version == latest.pushed_name
        published = load_file(Path(latest.path) / "model.safetensors")
        assert engine.tensors.keys() == published.keys()
        assert all(engine.tensors[name].equal(published[name]) for name in published)
        assert engine.calls.count("/update_weights_from_distributed") > 4
    lines = read_metrics(run.metrics)
    assert all(line["push_error"] is None and line["push_s"] >= line["push_paused_s"] for line in lines)
    assert train(run, steps=3) == 3, "the engine is gone"
    assert engine.url in read_metrics(run.metrics)[-1]["push_error"]
    write_status(run, {"state": "running", "engines": []})
    assert train(run, steps=4) == 4
    assert read_metrics(run.metrics)[-1]["push_error"] == "there is no engine"
    through = make_run(tmp_path / "through")
    train(through, policy=model, steps=4)
    assert digests(run) == digests(through)
    assert all("push_s" not in line for line in read_metrics(through.metrics))
