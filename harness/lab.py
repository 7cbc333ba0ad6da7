"""Runs the stages that experiments share, through the public commands only, and keeps what is finished.

A stage is one folder below ``build/reproduce/<profile>``; its ``done.json`` is written last, so an interrupted
``harness reproduce`` goes on where it stopped. Experiments read the logs a stage left, never its memory.
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

from rich.console import Console

from farm.durable import write_json
from farm.types import Boundary
from harness.profiles import Profile
from harness.provenance import ROOT, commit

BASE_POLICY = ROOT / "datasets" / "micro" / "base-policy"
STAGE_LIMIT_S = 3600.0


class StageError(Exception):
    """A public command failed; the message holds the end of what it printed."""


@dataclass(slots=True)
class Lab:
    """The bench on which experiments run. ``plan`` lists the stages to come, for the time left."""

    folder: Path
    profile: Profile
    console: Console
    plan: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------ stages

    def stage(self, name: str, work: Callable[[Path], None]) -> Path:
        """The folder of stage ``name``, made by ``work`` unless it is already done."""
        folder = self.folder / name
        if not (folder / "done.json").exists():
            left_s = sum(self.profile.expected_s.get(s.partition("-")[0], 10.0) for s in self.plan)
            self.console.print(f"[bold]{name}[/]  about {max(1, round(left_s / 60))} min left")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            started_s = time.monotonic()
            work(folder)
            write_json(folder / "done.json", {"wall_s": time.monotonic() - started_s, "commit": commit()})
        if name in self.plan:
            self.plan.remove(name)
        return folder

    def commits(self) -> dict[str, str | None]:
        """The commit each finished stage was run at: a kept stage may be older than the report."""
        done = sorted(self.folder.glob("*/done.json"))
        return {path.parent.name: json.loads(path.read_text()).get("commit") for path in done}

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
                folder, "trainer", "sft", "--log", str(demonstrations), "--policy", str(BASE_POLICY),
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
        self._command(
            folder, "farm", "rollout", "--tasks", "micro:benchmark", "--attempts", str(self.profile.attempts),
            "--policy", str(policy), "--workers", "2", "--run", str(folder / "run"), *limit, *extra,
        )  # fmt: skip

    def _train(self, folder: Path, policy: Path, *, mode: str, steps: int, seed: int) -> None:
        run = str(folder / "run")
        settings = ("--set", f"rollout.mode={mode}", "--set", f"rollout.seed={seed}")
        farm = self._start(folder, "farm", "up", "--workers", "2", "--run", run, "--policy", str(policy), *settings)
        try:
            self._command(
                folder, "trainer", "train", "--run", run, "--policy", str(policy), "--steps", str(steps),
                "--set", f"seed={seed}",
            )  # fmt: skip
        finally:
            self._stop(farm)

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
