"""The episodes of a simulation: turns, tokens per turn, command times, a heavy tail.

What an episode does follows from its own seed (and its task's), not from when it runs: two scenarios over the same plan
see the same episodes, so that their difference is not chance.

A task has a length of its own, each attempt at it differs by ``attempt_sigma``; tokens and command times are
log-normal, given by their means. A turn may run away (``runaway``): a generation without an end, which only a cap or
the context ends. What ends a command (``limits.tool_s``) is not its own affair.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from farm.types import EndReason, Episode, ImageFiles, Task

Floats = npt.NDArray[np.float64]

ENDLESS = 1 << 40
MAX_TURNS = 1000


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


@dataclass(frozen=True, kw_only=True)
class HeavyTail:
    """Implements :class:`Workload`. Tokens and ``command_s`` are means of one turn."""

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
    runaway: float
    pass_rate: float
    seed: int = 0

    @functools.cached_property
    def _sigmas(self) -> Floats:
        """[3, 1]: outputs, observations, commands."""
        return np.array([[self.output_sigma], [self.observation_sigma], [self.command_sigma]])

    @functools.cached_property
    def _log_means(self) -> Floats:
        means = np.array([[self.output_tokens], [self.observation_tokens], [self.command_s]])
        return np.asarray(np.log(means) - self._sigmas**2 / 2)

    @functools.cached_property
    def _draws(self) -> _Draws:
        return _Draws()

    def script(self, episode: Episode, number: int) -> Script:
        draw = self._draws.keyed((episode.seed << 8) + number)
        length, skill = _task(episode.task.instance_id, self.seed)
        own, grade, first_start, second_start = draw.standard_normal(4).tolist()
        turns = self.turns_median * math.exp(self.task_sigma * length + self.attempt_sigma * own)
        count = max(1, min(MAX_TURNS, round(turns)))
        # Log-normal with the mean m: m * exp(sigma * z - sigma^2 / 2).
        drawn = np.exp(draw.standard_normal((3, count)) * self._sigmas + self._log_means)
        runs_away, luck = draw.random(count) < self.runaway, draw.random()
        np.maximum(drawn[0], 1.0, out=drawn[0])
        drawn[0, runs_away] = ENDLESS
        outputs, observations = drawn[:2].astype(np.int64).tolist()
        return Script(
            prompt=self.prompt_tokens,
            outputs=outputs,
            observations=observations,
            commands_s=drawn[2].tolist(),
            collect_s=0.0,
            grade_s=self.grade_s * math.exp(self.grade_sigma * grade - self.grade_sigma**2 / 2),
            reward=1.0 if luck < _solved(skill, self.pass_rate) else 0.0,
            chances=(first_start, second_start),
        )


class _Draws:
    """Random numbers by key. One generator that is set anew: making one takes as long as all its draws here."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._fresh = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def keyed(self, key: int) -> np.random.Generator:
        """At the start of the stream of ``Philox(key=key)``; good until the next call."""
        words = self._fresh["state"]["key"]
        words[0], words[1] = key & _WORD, key >> 64
        self._bits.state = self._fresh
        return self._generator


_WORD = (1 << 64) - 1


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


def _solved(uniform: float, mean: float) -> float:
    """The chance to solve a task: ``uniform ** k`` has the mean ``1 / (k + 1)``. Many tasks are hardly ever solved,
    some nearly always."""
    return float(uniform ** (1.0 / mean - 1.0))
