"""A recorded run as plan and workload: the same episodes, in the same order, doing what they did.

Only what an episode does is taken from the record (tokens, turns, whether it was graded), and what its commands cost in
CPU; how long anything takes is the twin's to say.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from farm.types import EndReason, Episode, Graded, ImageFiles, Limits, Task, Trajectory
from harness.twin.workload import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCost:
    """CPU seconds inside the sandbox of one command, and of one grading."""

    command_s: float
    grade_s: float


def command_cost(trajectories: Sequence[Trajectory]) -> CommandCost:
    """By least squares from what each landed trajectory used in its sandboxes."""
    commands = [sum(turn.exit_code is not None for turn in t.turns) for t in trajectories]
    graded = [sum(event.name == "grade" for event in t.timeline) for t in trajectories]
    # One more command collects the patch, in every episode.
    design = np.array([[count + 1.0, float(grade)] for count, grade in zip(commands, graded, strict=True)])
    used = np.array([t.usage.sandbox_cpu_s for t in trajectories])
    (command_s, grade_s), *_ = np.linalg.lstsq(design, used, rcond=None)
    return CommandCost(command_s=max(0.0, float(command_s)), grade_s=max(0.0, float(grade_s)))


class RecordedPlan:
    """Implements ``farm.dispatch.Plan``, without an end: when the record is used up it begins anew under other names.

    Members of a group that the record lacks (they were in flight when the run ended) do what another member did."""

    def __init__(self, trajectories: Sequence[Trajectory], limits: Limits, *, repeat: bool = True) -> None:
        groups: dict[str, dict[int, Trajectory]] = defaultdict(dict)
        for trajectory in sorted(trajectories, key=lambda t: t.started_at_s):
            groups[trajectory.group_id][trajectory.index] = trajectory
        self._groups = list(groups.values())
        self._limits = limits
        self._repeat = repeat
        self.recorded: dict[str, Trajectory] = {}

    @property
    def length(self) -> int | None:
        return None if self._repeat else len(self._groups)

    def group(self, position: int) -> tuple[Episode, ...]:
        round_, place = divmod(position, len(self._groups))
        members = self._groups[place]
        some = next(iter(members.values()))
        spares = itertools.cycle(members.values())
        episodes = []
        for index in range(some.group_size):
            trajectory = members.get(index) or next(spares)
            episode = _episode(trajectory, index, round_, self._limits)
            self.recorded[episode.id] = trajectory
            episodes.append(episode)
        return tuple(episodes)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Implements ``Workload``: what the record says of an episode. ``overhead_s``: CPU of any command beside what it
    does inside."""

    recorded: Mapping[str, Trajectory]
    cost: CommandCost
    overhead_s: float

    def script(self, episode: Episode, number: int) -> Script:
        trajectory = self.recorded[episode.id]
        turns = trajectory.turns
        outcome = trajectory.outcome
        command_s = self.cost.command_s + self.overhead_s
        graded = any(event.name == "grade" for event in trajectory.timeline)
        if not turns:
            return Script(
                prompt=1, outputs=[1], observations=[0], commands_s=[0.0], collect_s=command_s, grade_s=None,
                reward=0.0, chances=(0.0, 0.0),
            )  # fmt: skip
        return Script(
            prompt=len(turns[0].context_ids),
            outputs=[len(turn.output_ids) for turn in turns],
            observations=[*(len(turn.context_ids) for turn in turns[1:]), 0],
            commands_s=[command_s if turn.exit_code is not None else 0.0 for turn in turns],
            collect_s=command_s,
            grade_s=self.cost.grade_s + self.overhead_s if graded else None,
            reward=outcome.reward if isinstance(outcome, Graded) else 0.0,
            chances=(0.0, 0.0),
            end_reason=EndReason.MAX_TURNS if trajectory.end_reason is EndReason.FAILED else trajectory.end_reason,
        )


def _episode(trajectory: Trajectory, index: int, round_: int, limits: Limits) -> Episode:
    task = replace(_TASK, instance_id=trajectory.instance_id, dataset=trajectory.dataset, repo=trajectory.repo)
    return Episode(
        task=task,
        group_id=f"{trajectory.group_id}-{round_}" if round_ else trajectory.group_id,
        index=index,
        group_size=trajectory.group_size,
        seed=trajectory.seed,
        sampling=trajectory.sampling,
        limits=limits,
        purpose=trajectory.purpose,
    )


_TASK = Task(
    instance_id="", dataset="", repo="", base_commit="", problem_statement="", patch="", test_patch="",
    fail_to_pass=(), pass_to_pass=(), eval_script="", log_parser="", workspace=ImageFiles(),
)  # fmt: skip
