"""Runs the stages that experiments share, through the public commands only, and keeps what is finished.

A stage is one folder below ``build/reproduce/<profile>``; its ``done.json`` is written last, so an interrupted
``harness reproduce`` goes on where it stopped. It also holds the key of what the stage depends on
(:mod:`harness.stage_key`): a finished stage is kept until its code, settings, data or back ends change. Experiments
read the logs a stage left, never its memory, and only what :mod:`harness.evidence` keeps of them, so that a report can
be made again from its logs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from farm.durable import write_json
from farm.run_folder import RunFolder
from farm.types import Boundary
from harness import progress
from harness.profiles import Profile
from harness.provenance import made_by
from harness.stage_key import changed, stage_key
from trainer.metrics import read_metrics

STAGE_LIMIT_S = 3600.0

_LOOK_S = 0.5
_END_S = 60.0
_SECOND_SIGNAL_S = 0.5  # two signals at once would be one
_TOLD_CHARACTERS = 2000
_KILL_LOOK_S, _KILL_WITHIN_S = 0.05, 1.0  # about a small step's time: a kill falls anywhere in it

# A step's last trajectories wait to be sealed: part of every synchronous step, and none of what is compared.
_SOON = "log.seal_age_s=0.3"

# Many quick steps: at a rate that the noise of such small batches does not turn into damage.
_SMALL_BATCHES = ("rollout.groups_per_step=2", "rollout.group_size=4", _SOON)
_SMALL_BATCH_LR = 1e-4


class StageError(Exception):
    """A public command failed; the message holds the end of what it printed."""


@dataclass(slots=True)
class Lab:
    """The bench on which experiments run. ``plan`` lists the stages to come, for the time left. An ``archive`` holds
    the kept logs of stages and runs nothing."""

    folder: Path
    profile: Profile
    console: Console
    plan: list[str] = field(default_factory=list)
    archive: bool = False
    used: list[str] = field(default_factory=list)  # the stages asked for, in order
    programs: Path = field(default_factory=lambda: Path(sys.executable).parent)  # where farm and trainer are

    # ------------------------------------------------------------------------------------------ stages

    def stage(self, name: str, work: Callable[[Path], None]) -> Path:
        """The folder of stage ``name``, made by ``work`` unless it is done and what it depends on is the same.

        Raises :class:`StageError` when an archive does not have it."""
        folder = self.folder / name
        if name not in self.used:
            self.used.append(name)
        if name in self.plan:
            self.plan.remove(name)
        if self.archive:
            if not (folder / "done.json").exists():
                raise StageError(f"no logs of stage {name}")
            return folder
        key, done = stage_key(work, self.profile), self._done(name)
        why = changed(done.get("key"), key) if done else []
        if not done or why:
            self._run(folder, work, key, f"again, for it changed: {', '.join(why)}" if why else "")
        return folder

    def has(self, name: str) -> bool:
        """Whether stage ``name`` is finished: whether an archive has logs of it."""
        return bool(self._done(name))

    def _run(self, folder: Path, work: Callable[[Path], None], key: dict[str, str], note: str) -> None:
        known_s = self.known_s()
        name, to_come = folder.name, tuple(self.plan)

        def left(elapsed_s: float = 0.0) -> str:
            return progress.words(progress.left_s(name, elapsed_s, to_come, known_s))

        self.console.print(f"[bold]{name}[/]  about {left()} left in all  {note}".rstrip())
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started_s = time.monotonic()
        with progress.saying(lambda s: self.console.print(f"  {name}: {progress.words(s)} so far, {left(s)} left")):
            work(folder)
        wall_s = time.monotonic() - started_s
        write_json(folder / "done.json", {"wall_s": wall_s, "key": key, **made_by()})

    def known_s(self) -> dict[str, float]:
        """How long each stage is said to take, or took when it was last done."""
        took = {path.parent.name: self._done(path.parent.name) for path in self.folder.glob("*/done.json")}
        return self.profile.expected_s | {name: float(done["wall_s"]) for name, done in took.items() if done}

    def _done(self, name: str) -> dict[str, Any]:
        """What a finished stage says of itself; empty when it is not finished."""
        try:
            done = json.loads((self.folder / name / "done.json").read_text())
        except (FileNotFoundError, ValueError):  # one that is damaged is made again
            return {}
        return done if isinstance(done, dict) and "wall_s" in done else {}

    def evaluate(self, name: str, policy: Path, *, settings: tuple[str, ...] = ()) -> Path:
        """The run folder of ``policy`` on the benchmark."""
        return self.rollout(f"eval-{name}", policy, tasks=self.profile.benchmark_tasks, settings=settings)

    def rollout(
        self,
        name: str,
        policy: Path,
        *,
        tasks: int | None,
        attempts: int | None = None,
        settings: tuple[str, ...] = (),
    ) -> Path:
        """The run folder of a rollout of ``policy`` over the first ``tasks`` of the benchmark. ``settings``:
        ``section.key=value``, over the profile's."""
        limit = () if tasks is None else ("--limit", str(tasks))

        def work(folder: Path) -> None:
            self._command(
                folder, "farm", "rollout", "--tasks", self.profile.benchmark,
                "--attempts", str(attempts or self.profile.attempts), "--policy", str(policy),
                "--workers", str(self.profile.workers), "--run", str(folder / "run"), *limit,
                *_sets((*self.profile.settings, *settings)),
            )  # fmt: skip

        return self.stage(name, work) / "run"

    def oracle(self, name: str, tasks: Path) -> Path:
        """The run folder of the gold patch, once for each task that ``farm make-tasks`` wrote into ``tasks``."""

        def work(folder: Path) -> None:
            self._command(
                folder, "farm", "rollout", "--tasks", f"made:{tasks.absolute()}", "--agent", "oracle",
                "--workers", str(self.profile.workers), "--run", str(folder / "run"), *_sets(self.profile.settings),
            )  # fmt: skip

        return self.stage(name, work) / "run"

    def faulty(self, policy: Path, *, rate: float, seed: int) -> Path:
        """The run folder of a rollout with failures injected at ``rate``, and no retry to hide them."""
        return self.rollout("infra", policy, tasks=self.profile.infra_tasks, settings=_failing(rate, seed))

    def sft(self) -> Path:
        """The policy after supervised fine-tuning."""

        def work(folder: Path) -> None:
            demonstrations, policy = folder / "demonstrations", folder / "policy"
            count = str(self.profile.demonstrations)
            self._command(folder, "trainer", "demonstrations", "--out", str(demonstrations), "--count", count)
            self._command(
                folder, "trainer", "sft", "--log", str(demonstrations), "--policy", str(self.profile.policy),
                "--out", str(policy), "--loss", "outputs",
            )  # fmt: skip

        return self.stage("sft", work) / "policy"

    def rl(
        self,
        *,
        mode: str = "async",
        steps: int | None = None,
        name: str = "rl",
        seed: int = 0,
        policy: Path | None = None,
        settings: tuple[str, ...] = (),
        training: tuple[str, ...] = (),
    ) -> Path:
        """The run folder of RL from ``policy`` (default: after SFT): the farm and the trainer, two processes that share
        the logs. ``settings`` are the farm's, ``training`` the trainer's."""
        start = policy or self.sft()
        given = (_SOON, f"rollout.groups_per_step={self.profile.rl_groups}", f"rollout.mode={mode}", *settings)

        def work(folder: Path) -> None:
            with self._farm(folder, start, (*given, f"rollout.seed={seed}")) as farm:
                command = _training(folder, start, steps or self.profile.rl_steps, seed, *training)
                self._command(folder, "trainer", *command, beside=farm)

        return self.stage(name, work) / "run"

    def restarted(self, *, kills: int, rate: float, seed: int) -> Path:
        """The folder of an asynchronous training with small batches whose trainer was killed (-9) ``kills`` times on
        the way, while failures were injected at ``rate``: ``run``, ``kills.json`` and ``replay.json``, which is the
        uninterrupted training over the same log."""
        start = self.sft()

        def work(folder: Path) -> None:
            steps = self.profile.restart_steps
            settings = (*_SMALL_BATCHES, *_failing(rate, seed))
            training = _training(folder, start, steps, seed, f"lr={_SMALL_BATCH_LR}")
            with self._farm(folder, start, settings) as farm:
                killed = self._killed(folder, training, [steps * n // (kills + 1) for n in range(1, kills + 1)], farm)
                write_json(folder / "kills.json", {"kills": killed})
                self._command(folder, "trainer", *training, beside=farm)
            replay = ("replay", str(folder / "run"), "--out", str(folder / "replay.json"))
            self._command(folder, "trainer", *replay, allowed=(0, 1))  # 1: a step differs, which the figures tell

        return self.stage("restart", work)

    # ------------------------------------------------------------------------------------------ doing

    @contextmanager
    def _farm(self, folder: Path, policy: Path, settings: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
        """A farm on ``folder/run``. At the end what still runs is given up: nobody waits for it."""
        farm = self._start(
            folder / "farm.log", "farm", "up", "--workers", str(self.profile.workers), "--tasks", self.profile.training,
            "--run", str(folder / "run"), "--policy", str(policy), *_sets((*self.profile.settings, *settings)),
        )  # fmt: skip
        try:
            yield farm
        finally:
            if farm.poll() is None:
                farm.send_signal(signal.SIGINT)
                _code(farm, _SECOND_SIGNAL_S)
            _stop(farm)

    def _killed(
        self, folder: Path, training: tuple[str, ...], after: Sequence[int], farm: subprocess.Popen[bytes]
    ) -> list[dict[str, float]]:
        """Start the trainer and kill it at any moment of the step after each of ``after``; when that was."""
        metrics, draw = RunFolder(folder / "run").metrics, random.Random(len(after))
        killed: list[dict[str, float]] = []
        for step in after:
            trainer = self._start(folder / "commands.log", "trainer", *training)
            try:
                give_up_at = time.monotonic() + STAGE_LIMIT_S
                while (reached := _last_step(metrics)) < step:
                    if trainer.poll() is not None or farm.poll() is not None or time.monotonic() > give_up_at:
                        raise StageError(f"the trainer came to step {reached} only:\n{_tail(folder / 'commands.log')}")
                    time.sleep(_KILL_LOOK_S)
                time.sleep(draw.uniform(0.0, _KILL_WITHIN_S))
                alive = trainer.poll() is None
            finally:
                trainer.kill()
                trainer.wait()
            if alive:
                killed.append({"after_step": _last_step(metrics), "at_s": time.time()})
        return killed

    def _command(
        self,
        folder: Path,
        program: str,
        *arguments: str,
        beside: subprocess.Popen[bytes] | None = None,
        allowed: tuple[int, ...] = (0,),
    ) -> None:
        """Run a public command to its end. ``beside``: the farm that it can't do without.

        Raises :class:`StageError` when it ends with a code that is not ``allowed``, takes longer than a stage may, or
        the farm beside it ends first."""
        log = folder / "commands.log"
        process = self._start(log, program, *arguments)
        told = f"`{program} {' '.join(arguments)}`"
        give_up_at = time.monotonic() + STAGE_LIMIT_S
        try:
            while (code := _code(process, _LOOK_S)) is None:
                if beside is not None and (ended := beside.poll()) is not None:
                    raise StageError(f"the farm beside {told} ended with {ended}:\n{_tail(folder / 'farm.log')}")
                if time.monotonic() > give_up_at:
                    raise StageError(f"{told} was still running after {STAGE_LIMIT_S:g} s:\n{_tail(log)}")
        finally:
            _stop(process)
        if code not in allowed:
            raise StageError(f"{told} ended with {code}:\n{_tail(log)}")

    def _start(self, log: Path, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """It dies with this process, whatever ends that: nothing runs on beside the next try."""
        tether = (sys.executable, "-m", "farm.engine.tether", str(os.getpid()))
        with log.open("ab") as file:
            return subprocess.Popen([*tether, str(self.programs / program), *arguments], stdout=file, stderr=file)


def _sets(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


def _failing(rate: float, seed: int) -> tuple[str, ...]:
    """Failures at every boundary, each of which ends its trajectory."""
    return (f"inject.rate={rate}", f"inject.seed={seed}", *(f"retry.{boundary.value}=0" for boundary in Boundary))


def _training(folder: Path, policy: Path, steps: int, seed: int, *settings: str) -> tuple[str, ...]:
    """``trainer train`` on ``folder/run``, from ``policy`` up to step ``steps``."""
    given = ("--run", str(folder / "run"), "--policy", str(policy), "--steps", str(steps))
    return ("train", *given, *_sets((f"seed={seed}", *settings)))


def _last_step(metrics: Path) -> int:
    lines = read_metrics(metrics)
    return int(lines[-1]["step"]) if lines else 0


def _code(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let it drain, and kill it when that takes too long. One that has ended already is fine."""
    process.send_signal(signal.SIGINT)
    if _code(process, _END_S) is None:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TOLD_CHARACTERS:]


def program_path(name: str) -> str:
    """A command of this project, from the environment that runs."""
    return str(Path(sys.executable).parent / name)


def command_output(program: str, *arguments: str) -> str:
    """What a command of this project prints. Raises StageError with the end of its complaints when it fails."""
    done = subprocess.run(
        [program_path(program), *arguments], capture_output=True, text=True, timeout=STAGE_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise StageError(f"`{program} {' '.join(arguments)}` ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
