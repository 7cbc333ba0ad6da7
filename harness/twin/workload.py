"""The episodes of a simulation: turns, tokens per turn, command times, a heavy tail.

What an episode does follows from its own seed (and its task's), not from when it runs: two scenarios over the same plan
see the same episodes, so that their difference is not chance.

A task has a length of its own, each attempt at it differs by ``attempt_sigma``; tokens and command times are
log-normal, given by their means. A turn may run away (``runaway``): a generation without an end, which only a cap or
the context ends.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from farm.types import EndReason, Episode, ImageFiles, Task

ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one attempt does when nothing stops it. ``outputs`` [N] and ``observations`` [N] are tokens of each turn,
    ``commands_s`` [N] the time of each command on an idle machine, and so is ``grade_s`` (None: nothing to grade).
    After the last turn it ends for ``end_reason``: a submission runs no command. ``chances``: standard normal draws for
    its two sandbox starts."""

    prompt: int
    outputs: list[int]
    observations: list[int]
    commands_s: list[float]
    collect_s: float
    grade_s: float | None
    reward: float
    chances: tuple[float, float]
    end_reason: EndReason = EndReason.SUBMITTED


class Workload(Protocol):
    def script(self, episode: Episode, number: int) -> Script:
        """Of attempt ``number`` (from 1) at the episode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyTail:
    """Implements :class:`Workload`. Means are of one turn; ``tool_s`` ends a command."""

    turns_median: float
    task_sigma: float
    attempt_sigma: float
    prompt_tokens: int
    output_tokens: float
    output_sigma: float
    observation_tokens: float
    observation_sigma: float
    command_s: float
    command_sigma: float
    grade_s: float
    grade_sigma: float
    tool_s: float
    runaway: float
    pass_rate: float
    seed: int = 0

    def script(self, episode: Episode, number: int) -> Script:
        draw = np.random.Generator(np.random.Philox(key=(episode.seed << 8) + number))
        length, skill = _task(episode.task.instance_id, self.seed)
        normals = draw.standard_normal(4)
        turns = math.exp(math.log(self.turns_median) + self.task_sigma * length + self.attempt_sigma * normals[0])
        count = max(1, min(1000, round(turns)))
        outputs = _lognormal(draw, self.output_tokens, self.output_sigma, count)
        observations = _lognormal(draw, self.observation_tokens, self.observation_sigma, count)
        commands = _lognormal(draw, self.command_s, self.command_sigma, count)
        tokens: list[int] = np.maximum(outputs, 1.0).astype(np.int64).tolist()
        uniforms = draw.random(count + 1)
        for turn in np.flatnonzero(uniforms[:count] < self.runaway).tolist():
            tokens[turn] = ENDLESS
        # Tasks are between easy and hopeless: the chance of a task is spread by a Beta(0.5, ...) with this mean.
        chance = _beta_like(skill, self.pass_rate)
        return Script(
            prompt=self.prompt_tokens,
            outputs=tokens,
            observations=observations.astype(np.int64).tolist(),
            commands_s=np.minimum(commands, self.tool_s).tolist(),
            collect_s=0.0,
            grade_s=self.grade_s * math.exp(self.grade_sigma * normals[1] - self.grade_sigma**2 / 2),
            reward=1.0 if uniforms[count] < chance else 0.0,
            chances=(float(normals[2]), float(normals[3])),
        )


def tasks(count: int) -> list[Task]:
    """Tasks that are nothing but names."""
    return [
        Task(
            instance_id=f"task-{number:05d}", dataset="twin", repo=f"repo-{number % 97}", base_commit="",
            problem_statement="", patch="", test_patch="", fail_to_pass=(), pass_to_pass=(), eval_script="",
            log_parser="", workspace=ImageFiles(),
        )
        for number in range(count)
    ]  # fmt: skip


@functools.lru_cache(maxsize=65_536)
def _task(instance_id: str, seed: int) -> tuple[float, float]:
    """A task's length (standard normal) and skill (uniform)."""
    draw = np.random.Generator(np.random.PCG64([seed, *instance_id.encode()]))
    return float(draw.standard_normal()), float(draw.random())


def _lognormal(
    draw: np.random.Generator, mean: float, sigma: float, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return mean * np.exp(sigma * draw.standard_normal(count) - sigma * sigma / 2)


def _beta_like(uniform: float, mean: float) -> float:
    """``uniform ** k`` has the mean ``1 / (k + 1)``: many tasks that are hardly ever solved, some nearly always."""
    return float(uniform ** (1.0 / mean - 1.0))
