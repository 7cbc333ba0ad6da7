"""Transcripts and demonstrations of the micro suite, as rows of a trajectory log that ``trainer sft`` trains on.

Somebody with a :class:`Habit` works on each problem in the simulator: reads the module, edits, runs the check, undoes
and tries again or not, submits. The edits are the right one or a random other one; everything printed is what a real
sandbox prints. Nothing was sampled from a policy, so log-probabilities are 0 and no policy step is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from farm.render.micro import MicroRenderer
from farm.suites import micro
from farm.suites.micro_edits import candidate_edits
from farm.suites.micro_problem import Problem, grade
from farm.suites.micro_sim import CHECK, READ, SUBMIT, UNDO, Simulation
from farm.trajectory_log import DirectoryLog
from farm.types import EndReason, Evidence, Graded, SamplingParams, Trajectory, Turn, Usage, content_digest

WORKER = "demonstrations"
TOUR_EDITS = 8
_NO_USAGE = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """How somebody works. ``right_first``, ``right_later``: chance that the first, a later edit is the right one;
    ``retry``: chance of another try after a failed check; ``tries``: edits at most; ``tours``: share of transcripts
    that are tours instead: :data:`TOUR_EDITS` edits at random, each undone at once, and no end. A tour shows more
    edits of one listing than any work does, which is what teaches that an edit's text stands in the listing."""

    right_first: float
    right_later: float
    retry: float
    tries: int
    tours: float = 0.0


PRETRAINING = Habit(right_first=0.1, right_later=0.1, retry=0.3, tries=3, tours=0.5)
DEMONSTRATION = Habit(right_first=0.7, right_later=0.7, retry=0.4, tries=2)


def transcripts(renderer: MicroRenderer, split: str, *, count: int, habit: Habit, seed: int) -> Iterator[Trajectory]:
    """One trajectory for each of the first ``count`` problems of a split, the same for the same arguments."""
    rng = Random(f"{seed} {split} transcripts")
    for number, problem in enumerate(islice(micro.problems(split), count)):
        turns, simulation = _work(rng, renderer, problem, habit)
        yield _trajectory(problem, split, number, seed, turns, simulation.source)


def write_log(trajectories: Iterable[Trajectory], folder: Path) -> int:
    """Append them to the trajectory log in ``folder`` and seal it; how many have landed."""
    log = DirectoryLog(folder)
    landed = log.append_many(trajectories)
    log.seal()
    return sum(landed)


def _work(rng: Random, renderer: MicroRenderer, problem: Problem, habit: Habit) -> tuple[list[Turn], Simulation]:
    simulation = Simulation(problem)
    commands: list[str] = []
    printed: list[str] = []

    def do(command: str) -> str:
        commands.append(command)
        printed.append("" if command == SUBMIT else simulation.run(command))
        return printed[-1]

    do(READ)
    if rng.random() < habit.tours:
        _tour(rng, problem, do)
    else:
        _solve(rng, problem, habit, do)
    return list(_turns(renderer, problem, commands, printed)), simulation


def _tour(rng: Random, problem: Problem, do: Callable[[str], str]) -> None:
    candidates = candidate_edits(problem.broken)
    for _ in range(TOUR_EDITS):
        do(rng.choice(candidates).command)
        do(UNDO)


def _solve(rng: Random, problem: Problem, habit: Habit, do: Callable[[str], str]) -> None:
    wrong = [edit for edit in candidate_edits(problem.broken) if edit != problem.gold]
    rng.shuffle(wrong)
    for number in range(habit.tries):
        right = rng.random() < (habit.right_later if number else habit.right_first)
        edit = problem.gold if right or not wrong else wrong.pop()
        do(edit.command)
        passed = do(CHECK).startswith("PASSED")
        if passed or number == habit.tries - 1 or rng.random() >= habit.retry:
            break
        do(UNDO)
    do(SUBMIT)


def _turns(renderer: MicroRenderer, problem: Problem, commands: list[str], printed: list[str]) -> Iterator[Turn]:
    context = renderer.start_text(problem.issue)
    for command, text in zip(commands, printed, strict=True):
        output = renderer.command_ids(command)
        yield Turn(
            segment=0,
            context_ids=tuple(context),
            output_ids=tuple(output),
            output_logprobs=(0.0,) * len(output),
            spans=(),
            finish_reason="stop",
            action=command,
            observation=text,
            exit_code=None,
            cached_tokens=0,
            retractions=0,
        )
        context = renderer.observe_text(output, text)


def _trajectory(problem: Problem, split: str, number: int, seed: int, turns: list[Turn], source: str) -> Trajectory:
    task = micro.to_task(problem, split, number)
    passed = grade(problem.hidden, source)
    resolved = all(passed.values())
    evidence = Evidence(
        statuses={test: "PASSED" if good else "FAILED" for test, good in passed.items()},
        resolved=resolved,
        patch_applied=True,
        exit_code=0 if resolved else 1,
        log_tail="",
    )
    return Trajectory(
        episode_id=content_digest([WORKER, task.instance_id, seed, [turn.action for turn in turns]]),
        group_id=f"{WORKER}/{task.instance_id}",
        group_size=1,
        index=0,
        instance_id=task.instance_id,
        task_digest=task.digest,
        dataset=f"micro/{split}",
        repo=task.repo,
        strata=task.strata,
        weight=1.0,
        seed=seed,
        purpose="demonstration",
        sampling=SamplingParams(),
        attempt=1,
        worker=WORKER,
        engine_url="",
        outcome=Graded(reward=float(resolved), evidence=evidence),
        end_reason=EndReason.SUBMITTED,
        turns=tuple(turns),
        patch="",
        timeline=(),
        usage=_NO_USAGE,
    )
