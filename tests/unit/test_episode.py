"""One attempt, with fakes for all that acts: what lands for a grade, and how time and tokens are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from farm.agent.fixed import NullAgent
from farm.episode import run_episode
from farm.protocols import AgentRun, ExecResult, SandboxSpec
from farm.suites.repo import make_repo
from farm.types import (
    Attempt,
    Boundary,
    EndReason,
    Episode,
    Event,
    Evidence,
    Failed,
    FailedAttempt,
    Graded,
    InlineFiles,
    Limits,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

FILES = {"calc.py": "def add(a, b):\n    return a - b\n"}
PATCH = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-x\n+y\n"
TASK = Task(
    instance_id="toy-1",
    dataset="toy@1",
    repo="toy/toy",
    base_commit=make_repo(FILES)[0],
    problem_statement="fix add",
    patch=PATCH,
    test_patch="",
    fail_to_pass=("t1",),
    pass_to_pass=("t2",),
    eval_script="",
    log_parser="micro",
    workspace=InlineFiles(files=FILES),
    strata={"kind": "arith"},
    weight=2.0,
)
EPISODE = Episode(task=TASK, group_id="g", index=1, group_size=4, seed=7, purpose="eval")
PRIOR = FailedAttempt(
    attempt=1, boundary=Boundary.ENGINE, kind="k", message="m", worker="w", started_at_s=1.0, ended_at_s=2.0
)
ATTEMPT = Attempt(episode=EPISODE, number=2, engine_url="e://", min_version=3, queued_at_s=90.0, prior=(PRIOR,))


def turn(context: int, output: int) -> Turn:
    return Turn(
        segment=0,
        context_ids=(1,) * context,
        output_ids=(2,) * output,
        output_logprobs=(0.0,) * output,
        spans=(VersionSpan(step=3, start=0, end=output),),
        finish_reason="stop",
        action="",
        observation="",
        exit_code=0,
        cached_tokens=4,
        retractions=0,
    )


class FakeSandbox:
    id = "fake"

    def __init__(self, spec: SandboxSpec, diff: bytes | None) -> None:
        self.spec, self.diff = spec, diff
        self.files: dict[str, bytes] = {}
        self.commands: list[str] = []

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        self.commands.append(command)
        code = 128 if self.diff is None else 0
        return ExecResult(exit_code=code, output="fatal: no", truncated=False, timed_out=False, duration_s=0.0)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self.files |= files

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        assert self.diff is not None
        if len(self.diff) > max_bytes:
            raise ValueError
        return self.diff

    async def cpu_s(self) -> float:
        return 0.25


class FakeProvider:
    name = "fake"

    def __init__(self, diff: bytes | None) -> None:
        self.diff = diff
        self.opened: list[FakeSandbox] = []
        self.closed = 0

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[FakeSandbox]:
        self.opened.append(FakeSandbox(spec, self.diff))
        assert self.closed == len(self.opened) - 1, "the agent's sandbox is closed before the grader's opens"
        try:
            yield self.opened[-1]
        finally:
            self.closed += 1

    async def sweep(self, *, now_s: float) -> int:
        return 0


class FakeAgent:
    def __init__(self, end: EndReason = EndReason.SUBMITTED) -> None:
        self.end = end
        self.given: dict[str, Any] = {}

    async def run(self, task: Task, **given: Any) -> AgentRun:
        self.given = given
        event = Event(name="generate", start_at_s=101.0, end_at_s=102.0)
        return AgentRun(turns=(turn(10, 5), turn(3, 2)), end_reason=self.end, timeline=(event,))


class FakeGrader:
    def __init__(self, resolved: bool) -> None:
        self.resolved = resolved
        self.patches: list[str] = []

    async def grade(self, task: Task, patch: str, *, sandbox: Any, limits: Limits) -> Evidence:
        self.patches.append(patch)
        return Evidence(statuses={}, resolved=self.resolved, patch_applied=True, exit_code=0, log_tail="")


class FakeEngine:
    url = "e://used"


def run(
    provider: FakeProvider, grader: FakeGrader | None = None, agent: Any = None, attempt: Attempt = ATTEMPT
) -> Trajectory:
    times = iter(range(100, 200))
    return asyncio.run(
        run_episode(
            attempt,
            provider=provider,
            engine=FakeEngine(),  # type: ignore[arg-type]
            agent=agent or FakeAgent(),
            renderer=None,  # type: ignore[arg-type]
            grader=grader or FakeGrader(True),
            worker="w-3",
            now=lambda: float(next(times)),
        )
    )


@pytest.mark.parametrize(("resolved", "reward"), [(True, 1.0), (False, 0.0)])
def test_a_grade_is_a_reward(resolved: bool, reward: float) -> None:
    provider, grader, agent = FakeProvider(PATCH.encode()), FakeGrader(resolved), FakeAgent(EndReason.TIME_LIMIT)
    landed = run(provider, grader, agent)
    assert isinstance(landed.outcome, Graded)
    assert landed.outcome.reward == reward
    assert landed.end_reason is EndReason.TIME_LIMIT
    assert landed.patch == PATCH
    assert grader.patches == [PATCH]
    assert agent.given["min_step"] == 3
    assert agent.given["limits"] is EPISODE.limits
    assert provider.closed == 2


def test_the_row_says_whose_it_is() -> None:
    landed = run(FakeProvider(PATCH.encode()))
    assert (landed.episode_id, landed.group_id, landed.index, landed.group_size) == (EPISODE.id, "g", 1, 4)
    assert (landed.instance_id, landed.task_digest, landed.dataset) == ("toy-1", TASK.digest, "toy@1")
    assert (landed.strata, landed.weight, landed.seed, landed.purpose) == ({"kind": "arith"}, 2.0, 7, "eval")
    assert (landed.attempt, landed.worker, landed.engine_url, landed.prior) == (2, "w-3", "e://used", (PRIOR,))
    assert landed.started_at_s < landed.ended_at_s


def test_sandboxes_are_labelled_and_have_a_deadline() -> None:
    provider = FakeProvider(PATCH.encode())
    landed = run(provider)
    agent, grade = (sandbox.spec for sandbox in provider.opened)
    assert agent.owner == f"{EPISODE.id}-2-agent"
    assert grade.owner == f"{EPISODE.id}-2-grade"
    assert agent.deadline_at_s == grade.deadline_at_s > landed.started_at_s + EPISODE.limits.episode_s
    assert grade.output_bytes > agent.output_bytes == EPISODE.limits.output_bytes


def test_tokens_cpu_and_timeline_are_counted() -> None:
    landed = run(FakeProvider(PATCH.encode()))
    assert landed.usage.prompt_tokens == 10 + (10 + 5 + 3)
    assert landed.usage.output_tokens == 7
    assert landed.usage.cached_tokens == 8
    assert landed.usage.sandbox_cpu_s == 0.5
    assert [event.name for event in landed.timeline] == [
        "queued",
        "sandbox_start",
        "generate",
        "collect",
        "sandbox_start",
        "grade",
    ]
    assert landed.timeline[0] == Event(name="queued", start_at_s=90.0, end_at_s=100.0)
    assert all(event.start_at_s <= event.end_at_s for event in landed.timeline)


def test_no_change_is_graded_without_a_second_sandbox() -> None:
    provider, grader = FakeProvider(b""), FakeGrader(True)
    landed = run(provider, grader, NullAgent())
    assert isinstance(landed.outcome, Graded)
    assert landed.outcome.reward == 0.0
    assert landed.outcome.evidence.statuses == {"t1": "MISSING", "t2": "MISSING"}
    assert grader.patches == []
    assert len(provider.opened) == provider.closed == 1


@pytest.mark.parametrize("diff", [None, b"x" * (2 << 20)], ids=["refused", "too large"])
def test_what_no_diff_can_be_taken_of_is_graded_as_it_stands(diff: bytes | None) -> None:
    landed = run(FakeProvider(diff))
    assert isinstance(landed.outcome, Graded)
    assert landed.outcome.reward == 0.0
    assert not landed.outcome.evidence.patch_applied
    assert landed.end_reason is EndReason.SUBMITTED
    assert landed.turns


def test_a_task_whose_repository_is_another_one_is_the_farms_fault() -> None:
    wrong = replace(ATTEMPT, episode=replace(EPISODE, task=replace(TASK, base_commit="1" * 40)))
    landed = run(FakeProvider(PATCH.encode()), attempt=wrong)
    assert isinstance(landed.outcome, Failed)
    assert (landed.outcome.boundary, landed.outcome.retryable) == (Boundary.FARM, False)


def test_the_diff_is_taken_with_a_git_folder_the_agent_never_saw() -> None:
    provider = FakeProvider(PATCH.encode())
    run(provider)
    sandbox = provider.opened[0]
    heads = [path for path in sandbox.files if path.endswith("/HEAD")]
    assert len(heads) == 2
    assert heads[0] == "/testbed/.git/HEAD"
    assert f"GIT_DIR={heads[1].removesuffix('/HEAD')} " in sandbox.commands[-1]
