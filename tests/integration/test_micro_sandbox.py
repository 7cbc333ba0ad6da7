"""The simulator prints what a real sandbox prints, and finds the grades that real grading finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import islice

import pytest

from farm.errors import UsageError
from farm.grader import make_grader
from farm.protocols import SandboxProvider, SandboxSpec
from farm.sandbox import make_provider
from farm.sandbox.bubblewrap import BubblewrapProvider
from farm.suites import micro
from farm.suites.micro_edits import Edit, candidate_edits
from farm.suites.micro_problem import Problem, grade
from farm.suites.micro_sim import CHECK, READ, UNDO, Simulation
from farm.suites.repo import workspace_files
from farm.types import Limits, Task

NUMBER = 4


@pytest.fixture
def provider() -> Iterator[SandboxProvider]:
    try:
        made = make_provider("bubblewrap")
    except UsageError as error:
        pytest.skip(str(error))
    assert isinstance(made, BubblewrapProvider)
    yield made
    made.close()


@pytest.fixture(scope="module")
def sample() -> list[tuple[Problem, Task]]:
    drawn = islice(micro.problems("rl"), NUMBER)
    return [(problem, micro.to_task(problem, "rl", number)) for number, problem in enumerate(drawn)]


def _spec() -> SandboxSpec:
    return SandboxSpec(owner="test", deadline_at_s=time.time() + 60)


def test_commands_print_the_same(provider: SandboxProvider, sample: list[tuple[Problem, Task]]) -> None:
    async def compare(problem: Problem, task: Task) -> None:
        simulation = Simulation(problem)
        unreadable = Edit(old="def", new="not")
        edits = [problem.gold, candidate_edits(problem.broken)[0], unreadable, Edit(old="zebra", new="x")]
        commands = [READ, CHECK]
        for edit in edits:
            commands += [edit.command, READ, CHECK, UNDO, READ]
        async with provider.open(_spec()) as sandbox:
            await sandbox.write_files(workspace_files(task))
            for command in commands:
                result = await sandbox.exec(command, timeout_s=10)
                assert result.output == simulation.run(command), command

    for problem, task in sample:
        asyncio.run(compare(problem, task))


def test_grades_are_the_same(provider: SandboxProvider, sample: list[tuple[Problem, Task]]) -> None:
    grader = make_grader("tests")

    async def check(problem: Problem, task: Task, patch: str, source: str) -> None:
        async with provider.open(_spec()) as sandbox:
            await sandbox.write_files(workspace_files(task))
            evidence = await grader.grade(task, patch, sandbox=sandbox, limits=Limits())
        passed = {test: status == "PASSED" for test, status in evidence.statuses.items()}
        assert passed == grade(problem.hidden, source)
        assert evidence.resolved == (source == problem.fixed)

    for problem, task in sample:
        asyncio.run(check(problem, task, task.patch, problem.fixed))
        asyncio.run(check(problem, task, "", problem.broken))
