"""kill -9 of a rank ends all ranks with a clear error; the resumed run is bit-equal on the same layout.

Real processes: ``trainer train`` with two ranks over gloo, as a person starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import row
from push_engine import push_engine
from safetensors.numpy import load_file, save_file

from farm.config import load_config, to_json
from farm.farm_state import write_status
from farm.policy_log import PolicyLog
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import Trajectory
from trainer.metrics import read_metrics
from trainer.shapes import hf_shapes

STEPS = 8
GROUP = 4
VOCABULARY = 50
MODEL = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip


def trajectory(number: int, chance: random.Random) -> Trajectory:
    def ids(n: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCABULARY) for _ in range(n))

    one = row(str(number // GROUP), number % GROUP, float(chance.random() > 0.5), step=number // GROUP // 2)
    (turn,) = one.turns
    output = ids(chance.randrange(2, 9))
    turn = replace(
        turn,
        context_ids=ids(chance.randrange(2, 20)),
        output_ids=output,
        output_logprobs=tuple(-4 + chance.random() for _ in output),
        spans=(replace(turn.spans[0], end=len(output)),),
    )
    return replace(one, turns=(turn,))


def make_run(path: Path, *more: str) -> RunFolder:
    """A run with the groups of STEPS steps, and its first policy. ``more``: settings of the farm's."""
    sets = [
        *more,
        "rollout.group_size=4",
        "rollout.groups_per_step=2",
        "rollout.min_attempts=4",
        "rollout.max_staleness=9",
    ]
    run = RunFolder.create(path, to_json(load_config(sets=sets)))
    chance = random.Random(3)
    with DirectoryLog(run.trajectories) as log:
        log.append_many([trajectory(i, chance) for i in range(STEPS * 2 * GROUP)])
        log.seal()

    def write(folder: Path) -> None:
        numbers = np.random.default_rng(0)
        weights = {name: numbers.normal(0, 0.2, shape).astype(np.float32) for name, shape in hf_shapes(MODEL).items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(MODEL))

    PolicyLog(run.policies).publish(0, write, consumed_groups=0)
    return run


def start(run: RunFolder, *, steps: int = STEPS) -> subprocess.Popen[str]:
    layout = ["parallel.tensor=2", "parallel.distributed_optimizer=true"]
    sets = [part for setting in ["lr=0.01", *layout] for part in ("--set", setting)]
    command = ["train", "--run", str(run.path), "--ranks", "2", "--steps", str(steps), *sets]
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ranks_of(starter: int) -> list[int]:
    """The processes of the ranks, by rank."""
    children = Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
    by_rank: dict[int, int] = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        by_rank |= {int(entry[5:]): int(child) for entry in environment if entry.startswith(b"RANK=")}
    return [by_rank[rank] for rank in sorted(by_rank)]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, errors


def state(run: RunFolder) -> dict[str, Any]:
    lines = read_metrics(run.metrics)
    return {
        "policies": {v.step: (v.digest, v.consumed_groups) for v in PolicyLog(run.policies).history()},
        "metrics": [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines],
    }


@pytest.mark.timeout(360)
def test_a_killed_rank_ends_all_and_the_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    calm, killed = make_run(tmp_path / "calm"), make_run(tmp_path / "killed")
    process = start(calm, steps=10**6)
    assert process.stdout is not None
    for _ in range(STEPS):
        assert process.stdout.readline().startswith("step ")
    process.terminate()  # passed on to rank 0, which sends the other home
    code, errors = finish(process)
    assert code == 0, errors
    expected = state(calm)
    assert sorted(expected["policies"]) == list(range(STEPS + 1))
    assert [p.name for p in sorted(calm.checkpoints.iterdir())] == [f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"]
    assert len({digest for digest, _ in expected["policies"].values()}) == STEPS + 1

    process = start(killed, steps=10**6)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline().startswith("step ")
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 1
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL); all ranks were ended" in errors.splitlines()[-1]
    assert not any(map(alive, ranks))
    assert 3 <= max(state(killed)["policies"]) <= STEPS

    # Now the starter itself: no rank outlives it.
    process = start(killed, steps=10**6)
    give_up_at = time.monotonic() + 60
    while len(ranks := ranks_of(process.pid)) < 2 and time.monotonic() < give_up_at:
        time.sleep(0.02)
    process.kill()
    finish(process)
    assert len(ranks) == 2
    while any(map(alive, ranks)) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert not any(map(alive, ranks))

    assert finish(start(killed))[0] == 0
    assert state(killed) == expected
    assert not list(killed.checkpoints.glob("*.tmp"))


@pytest.mark.timeout(240)
def test_two_ranks_push_what_they_publish(tmp_path: Path) -> None:
    """As a person starts it: tensor parallel, so that nobody has the whole weights before they are sent."""
    run = make_run(tmp_path / "run", "engine.weights=push")
    with push_engine() as engine:
        write_status(run, {"state": "running", "engines": [{"url": engine.url, "state": "up"}]})
        code, errors = finish(start(run, steps=2))
    assert code == 0, errors
    latest = PolicyLog(run.policies).latest()
    assert latest is not None
    assert (latest.step, engine.version) == (2, latest.pushed_name)
    published = load_file(Path(latest.path) / "model.safetensors")
    assert engine.tensors.keys() == published.keys()
    assert all(np.array_equal(engine.tensors[name].numpy(), published[name]) for name in published)
    assert [line["push_error"] for line in read_metrics(run.metrics)] == [None, None]
