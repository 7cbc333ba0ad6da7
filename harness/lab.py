"""Runs the stages that experiments share, through the public commands only, and keeps what is finished.

A stage is one folder below ``build/reproduce/<profile>``; its ``done.json`` is written last, so an interrupted
``harness reproduce`` goes on where it stopped. It also holds the key of what the stage depends on
(:mod:`harness.stage_key`): a finished stage is kept until its code, settings, data or back ends change. Experiments
read the logs a stage left, never its memory, and only what :mod:`harness.evidence` keeps of them, so that a report can
be made again from its logs.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from farm.durable import write_json
from farm.types import Boundary
from harness import progress
from harness.profiles import Profile
from harness.provenance import commit
from harness.stage_key import changed, stage_key

STAGE_LIMIT_S = 3600.0


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
                raise StageError(f"no logs of stage {name} in {self.folder}")
            return folder
        key, done = stage_key(work, self.profile), self._done(name)
        why = changed(done.get("key"), key) if done else []
        if not done or why:
            self._run(folder, work, key, f"again, for it changed: {', '.join(why)}" if why else "")
        return folder

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
        write_json(folder / "done.json", {"wall_s": wall_s, "commit": commit(), "key": key})

    def known_s(self) -> dict[str, float]:
        """How long each stage is said to take, or took when it was last done."""
        took = {path.parent.name: self._done(path.parent.name) for path in self.folder.glob("*/done.json")}
        return self.profile.expected_s | {name: float(done["wall_s"]) for name, done in took.items() if done}

    def _done(self, name: str) -> dict[str, Any]:
        """What a finished stage says of itself; empty when it is not finished."""
        try:
            done: dict[str, Any] = json.loads((self.folder / name / "done.json").read_text())
        except FileNotFoundError:
            return {}
        return done

    def evaluate(self, name: str, policy: Path) -> Path:
        """The run folder of ``policy`` on the benchmark."""

        def work(folder: Path) -> None:
            self._rollout(folder, policy, tasks=self.profile.benchmark_tasks)

        return self.stage(f"eval-{name}", work) / "run"

    def sft(self) -> Path:
        """The policy after supervised fine-tuning."""

        def work(folder: Path) -> None:
            demonstrations, policy = folder / "demonstrations", folder / "policy"
            self._command(folder, "trainer", "demonstrations", "--out", str(demonstrations))
            self._command(
                folder, "trainer", "sft", "--log", str(demonstrations), "--policy", str(self.profile.policy),
                "--out", str(policy), "--loss", "outputs",
            )  # fmt: skip

        return self.stage("sft", work) / "policy"

    def rl(self, *, mode: str = "async", steps: int | None = None, name: str = "rl", seed: int = 0) -> Path:
        """The run folder of RL from the SFT policy: the farm and the trainer, two processes that share the logs."""
        start = self.sft()

        def work(folder: Path) -> None:
            self._train(folder, start, mode=mode, steps=steps or self.profile.rl_steps, seed=seed)

        return self.stage(name, work) / "run"

    def faulty(self, policy: Path, *, rate: float, seed: int) -> Path:
        """The run folder of a rollout with failures injected at ``rate``, and no retry to hide them."""
        settings = [f"inject.rate={rate}", f"inject.seed={seed}", *(f"retry.{b.value}=0" for b in Boundary)]
        extra = tuple(word for setting in settings for word in ("--set", setting))

        def work(folder: Path) -> None:
            self._rollout(folder, policy, tasks=self.profile.infra_tasks, extra=extra)

        return self.stage("infra", work) / "run"

    # ------------------------------------------------------------------------------------------ doing

    def _rollout(self, folder: Path, policy: Path, *, tasks: int | None, extra: tuple[str, ...] = ()) -> None:
        limit = () if tasks is None else ("--limit", str(tasks))
        extra += self._back_ends()
        self._command(
            folder, "farm", "rollout", "--tasks", self.profile.benchmark, "--attempts", str(self.profile.attempts),
            "--policy", str(policy), "--workers", "2", "--run", str(folder / "run"), *limit, *extra,
        )  # fmt: skip

    def _train(self, folder: Path, policy: Path, *, mode: str, steps: int, seed: int) -> None:
        run = str(folder / "run")
        settings = ("--set", f"rollout.mode={mode}", "--set", f"rollout.seed={seed}", *self._back_ends())
        farm = self._start(
            folder,
            "farm",
            "up",
            "--workers",
            "2",
            "--tasks",
            self.profile.training,
            "--run",
            run,
            "--policy",
            str(policy),
            *settings,
        )
        try:
            self._command(
                folder, "trainer", "train", "--run", run, "--policy", str(policy), "--steps", str(steps),
                "--set", f"seed={seed}",
            )  # fmt: skip
        finally:
            self._stop(farm)

    def _back_ends(self) -> tuple[str, ...]:
        return tuple(word for setting in self.profile.settings for word in ("--set", setting))

    def _command(self, folder: Path, program: str, *arguments: str) -> None:
        with (folder / "commands.log").open("ab") as log:
            done = subprocess.run(
                [program_path(program), *arguments], stdout=log, stderr=log, timeout=STAGE_LIMIT_S, check=False
            )
        if done.returncode != 0:
            raise StageError(self._told(folder, program, arguments, done.returncode))

    def _start(self, folder: Path, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen([program_path(program), *arguments], stdout=log, stderr=log)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def _told(self, folder: Path, program: str, arguments: tuple[str, ...], code: int) -> str:
        tail = (folder / "commands.log").read_text(errors="replace")[-2000:]
        return f"`{program} {' '.join(arguments)}` ended with {code}:\n{tail}"


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
