"""The machine at hand as a bench: rollouts and short trainings through the public commands of either tree."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from farm.errors import FarmError
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Trajectory
from harness.experiments.runs import steps
from harness.gate import figures
from harness.gate.evidence import Block, Counts
from harness.gate.looks import BenchError, Side
from harness.gate.trees import Tree

T = TypeVar("T")

# Far above what a step or an attempt takes: a hang becomes "not measured", and so fails.
_STEP_LIMIT_S, _START_LIMIT_S, _ROLLOUT_LIMIT_S, _DRAIN_S = 180.0, 300.0, 7200.0, 120.0


class LocalBench:
    """Runs below ``folder``; what each command said is in ``commands.log`` there.

    ``seed`` is of the first look; each later one has the next. A block's seed is its cycle's, equal for both sides."""

    def __init__(
        self,
        folder: Path,
        trees: Mapping[Side, Tree],
        *,
        policy: Path,
        tasks: str,
        limit: int | None,
        steps: int,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._trees = trees
        self._policy = policy
        self._tasks = tasks
        self._limit = limit
        self._steps = steps
        self._seed = seed
        self._say = say

    def rollouts(self, attempts: int, look: int) -> Counts:
        run = self._fresh(f"rollouts-{look + 1}")
        limit = () if self._limit is None else ("--limit", str(self._limit))
        self._command(
            self._trees[Side.CANDIDATE], _ROLLOUT_LIMIT_S, "farm", "rollout", "--tasks", self._tasks,
            "--attempts", str(attempts), "--policy", str(self._policy), "--workers", "2", "--run", str(run),
            "--set", f"rollout.seed={self._seed + look}", *limit,
        )  # fmt: skip
        return _read(run, lambda: figures.counts(_landed(run)))

    def block(self, side: Side, number: int) -> Block:
        tree, run = self._trees[side], self._fresh(f"block-{number:02d}-{side.value}")
        self._say(f"  block {number + 1}, {side.value} ({tree.name})")
        # Synchronous: then every step has the same episodes, and its time scatters half as much.
        settings = ("--set", f"rollout.seed={number // 4}", "--set", "rollout.mode=sync")
        farm = self._start(tree, "farm", "up", "--workers", "2", "--run", str(run), *settings)
        try:
            limit_s = _START_LIMIT_S + self._steps * _STEP_LIMIT_S
            self._command(tree, limit_s, "trainer", "train", "--run", str(run), "--steps", str(self._steps))
        finally:
            _stop(farm)
        found = _read(run, lambda: figures.block(steps(run), _landed(run)))
        shutil.rmtree(run / "policies", ignore_errors=True)  # the logs are kept, a policy per step is not needed
        shutil.rmtree(run / "trainer" / "checkpoints", ignore_errors=True)
        return found

    def _fresh(self, name: str) -> Path:
        run = self._folder / name
        shutil.rmtree(run, ignore_errors=True)
        return run

    def _command(self, tree: Tree, limit_s: float, program: str, *arguments: str) -> None:
        process = self._start(tree, program, *arguments)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"`{program} {arguments[0]}` of {tree.name} did not end in {limit_s:.0f} s") from None
        finally:
            _stop(process)
        if code != 0:
            log = self._folder / "commands.log"
            raise BenchError(f"`{program} {arguments[0]}` of {tree.name} ended with {code}; see {log}")

    def _start(self, tree: Tree, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / "commands.log").open("ab") as log:
            log.write(f"\n$ [{tree.name}] {program} {' '.join(arguments)}\n".encode())
            log.flush()
            return subprocess.Popen(
                tree.command(program, *arguments), cwd=self._folder, env=tree.environment, stdout=log, stderr=log
            )


def _landed(run: Path) -> list[Trajectory]:
    """From the log itself: the harness's own extract of it sums up the starts of a trajectory's sandboxes."""
    return [row for _, row in DirectoryLog(run / "trajectories", create=False).read(Cursor())]


def _read(run: Path, read: Callable[[], T]) -> T:
    """What a run's logs hold, which another commit's code may have written in another schema."""
    try:
        return read()
    except (FarmError, OSError, json.JSONDecodeError, KeyError) as error:
        raise BenchError(f"{run.name}: its logs can't be read here ({type(error).__name__}: {error})") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let it drain, and end it when it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_DRAIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
