"""kill -9 at any moment, and resume: the same weights after every step as without.

Real processes: this file run as a program imports the trainer once and forks one trainer after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from farm.config import load_config, to_json
from farm.durable import Disk
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Boundary,
    Cursor,
    EndReason,
    Evidence,
    Failed,
    Graded,
    Outcome,
    SamplingParams,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)  # fmt: skip
from trainer.metrics import read_metrics

STEPS = 24
GROUP = 4
VOCABULARY = 50
MODEL = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip


def trajectory(number: int, chance: random.Random) -> Trajectory:
    def ids(n: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCABULARY) for _ in range(n))

    turns = []
    for _ in range(chance.randrange(1, 4)):
        output = ids(chance.randrange(1, 6))
        turns.append(
            Turn(
                segment=0,
                context_ids=ids(chance.randrange(2, 9)),
                output_ids=output,
                output_logprobs=tuple(-4 + chance.random() for _ in output),
                spans=(VersionSpan(step=number // GROUP // 3 % 24, start=0, end=len(output)),),
                finish_reason="stop",
                action="",
                observation="",
                exit_code=0,
                cached_tokens=0,
                retractions=0,
            )
        )
    outcome: Outcome = Failed(boundary=Boundary.ENGINE, kind="k", message="")
    if chance.random() > 0.1:
        good = chance.random() > 0.5
        evidence = Evidence(statuses={}, resolved=good, patch_applied=True, exit_code=0, log_tail="")
        outcome = Graded(reward=float(good), evidence=evidence)
    return Trajectory(
        episode_id=f"{number:04d}", group_id=str(number // GROUP), group_size=GROUP, index=number % GROUP,
        instance_id="i", task_digest="", dataset="", repo="", strata={}, weight=1.0, seed=0, purpose="rl",
        sampling=SamplingParams(), attempt=1, worker="", engine_url="", outcome=outcome,
        end_reason=EndReason.SUBMITTED, turns=tuple(turns), patch="", timeline=(), usage=Usage(),
        ended_at_s=number + chance.randrange(12),
    )  # fmt: skip


def make_run(path: Path) -> RunFolder:
    """A run whose log holds more groups than STEPS steps take, landed out of order, in several shards."""
    run = RunFolder.create(
        path,
        to_json(
            load_config(sets=["rollout.group_size=4", "rollout.groups_per_step=3", "rollout.min_attempts=3",
                              "rollout.max_staleness=1"])
        ),
    )  # fmt: skip
    chance = random.Random(3)
    with DirectoryLog(run.trajectories) as log:
        for start in range(0, 320, 64):
            log.append_many([trajectory(i, chance) for i in range(start, start + 64)])
            log.seal()
    return run


def digests(run: RunFolder) -> dict[int, tuple[str, int]]:
    from farm.policy_log import PolicyLog

    return {v.step: (v.digest, v.consumed_groups) for v in PolicyLog(run.policies).history()}


class DyingDisk(Disk):
    """The process is killed at its n-th operation: before it when n is even, after it when n is odd."""

    def __init__(self, die_at: int) -> None:
        self._left = die_at // 2
        self._after = bool(die_at % 2)

    def _operation(self, action: Callable[[], None]) -> None:
        if self._left == 0 and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        action()
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        self._operation(lambda: Disk.write(self, path, fill))

    def rename(self, source: Path, target: Path) -> None:
        self._operation(lambda: Disk.rename(self, source, target))

    def unlink(self, path: Path) -> None:
        self._operation(lambda: Disk.unlink(self, path))

    def sync_folder(self, path: Path) -> None:
        self._operation(lambda: Disk.sync_folder(self, path))


def train(run: RunFolder, every: int, disk: Disk) -> None:
    """Train to the end in a forked child, unless the disk kills it first."""
    from trainer.config import load_config as trainer_config
    from trainer.loop import Trainer

    trainer = Trainer(run, trainer_config(sets=["lr=0.01", f"checkpoint_every={every}"]), disk=disk)
    trainer.run(steps=STEPS)
    trainer.close()


def forked(action: Callable[[], None], *, kill_after_s: float | None = None) -> bool:
    """Run ``action`` in a child; True when it ended well, False when it was killed."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def state(run: RunFolder) -> dict[str, Any]:
    return {
        "policies": digests(run),
        "steps": [line["step"] for line in read_metrics(run.metrics)],
        "metrics": [{k: v for k, v in line.items() if not k.endswith("_s")} for line in read_metrics(run.metrics)],
    }


def _import_all(folder: Path) -> None:
    """What a trainer imports on first use too: once here, not in every child. Leaves no thread behind."""
    import torch._dynamo

    import trainer.loop  # noqa: F401
    from trainer.megatron import checkpoint

    assert list(DirectoryLog(folder / "template" / "trajectories").read(Cursor()))
    checkpoint.save(folder / "warm", 1, learner={"x": torch.zeros(1)}, loop={}, keep=1)
    assert checkpoint.load(folder / "warm")


def main(folder: Path) -> None:
    """Compare runs that are killed with one that is not."""
    _import_all(folder)
    assert forked(lambda: publish_random_policy(folder))
    calm, by_operation, by_time = (shutil.copytree(folder / "template", folder / n) for n in ("calm", "ops", "time"))

    assert forked(lambda: train(RunFolder(calm), 1, Disk()))
    expected = state(RunFolder(calm))
    assert expected["steps"] == list(range(1, STEPS + 1))
    assert len({digest for digest, _ in expected["policies"].values()}) == STEPS + 1

    # Each life gets one half-operation further than the last: every point is died at, on what earlier deaths left.
    killed = RunFolder(by_operation)
    kills = 0
    while not forked(partial(train, killed, 1, DyingDisk(kills))):
        kills += 1
        seen = digests(killed)
        assert seen == {k: v for k, v in expected["policies"].items() if k in seen}
    assert kills >= 25
    assert state(killed) == expected

    # With a checkpoint every third step, published steps are done again.
    killed = RunFolder(by_time)
    chance = random.Random(5)
    for _ in range(5):
        forked(lambda: train(killed, 3, Disk()), kill_after_s=chance.uniform(0.1, 0.7))
    assert forked(lambda: train(killed, 3, Disk()))
    assert state(killed) == expected


def publish_random_policy(folder: Path) -> None:
    from farm.policy_log import PolicyLog
    from trainer.megatron.learner import Learner

    learner = Learner(folder / "model", random_weights=True)
    PolicyLog(RunFolder(folder / "template").policies).publish(
        0, lambda into: learner.write(into, source=folder / "model"), consumed_groups=0
    )


@pytest.mark.timeout(300)
def test_killed_trainers_give_the_same_weights_after_every_step(tmp_path: Path) -> None:
    make_run(tmp_path / "template")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=280)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, errors[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
