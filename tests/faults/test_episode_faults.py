"""Whatever breaks, and wherever: a failure with its boundary, no reward, the turns kept, both sandboxes closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from farm.agent.bash import BashAgent
from farm.episode import run_episode
from farm.errors import EngineError, GraderError, SandboxLostError, SandboxStartError
from farm.protocols import Action, ExecResult, GenerateRequest, Generation, SandboxSpec
from farm.suites.repo import make_repo
from farm.types import (
    Attempt,
    Boundary,
    EndReason,
    Episode,
    Evidence,
    Failed,
    Graded,
    InlineFiles,
    Limits,
    Task,
    Trajectory,
    VersionSpan,
)

FILES = {"calc.py": "a\n"}
DIFF = b"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-a\n+b\n"
TASK = Task(
    instance_id="toy-1",
    dataset="toy@1",
    repo="toy/toy",
    base_commit=make_repo(FILES)[0],
    problem_statement="",
    patch="",
    test_patch="",
    fail_to_pass=("t1",),
    pass_to_pass=(),
    eval_script="",
    log_parser="micro",
    workspace=InlineFiles(files=FILES),
)
LIMITS = Limits(max_turns=3, tool_s=1.0, agent_s=10.0, grade_s=5.0, episode_s=20.0)
EPISODE = Episode(task=TASK, group_id="g", index=0, group_size=1, seed=0, limits=LIMITS)

# Every place where an attempt waits for something outside, in order; the sandbox's number before its calls.
PLACES = (
    "1 start", "1 write_files", "generate", "1 exec", "1 collect write_files", "1 collect exec", "1 read_file",
    "2 start", "grade",
)  # fmt: skip

Fault = Callable[[], Awaitable[None]]


class World:
    """Fakes of everything that acts; ``fault`` runs at ``place``."""

    name = "world"
    url = "e://"
    id = "s"
    stop_token_ids = (0,)

    def __init__(self, place: str = "", fault: Fault | None = None) -> None:
        self.place, self.fault = place, fault
        self.reached: list[str] = []
        self.opened = self.closed = 0
        self.aborted: list[str | None] = []
        self.collecting = False

    async def at(self, place: str) -> None:
        self.reached.append(place)
        if place == self.place and self.fault is not None:
            await self.fault()

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[World]:
        self.collecting = False
        await self.at(f"{self.opened + 1} start")
        self.opened += 1
        try:
            yield self
        finally:
            self.closed += 1

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self.collecting = any(path.startswith("/tmp/") for path in files)
        await self.at(f"{self.opened} {'collect ' if self.collecting else ''}write_files")

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        await self.at(f"{self.opened} {'collect ' if self.collecting else ''}exec")
        return ExecResult(exit_code=0, output="", truncated=False, timed_out=False, duration_s=0.0)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        await self.at(f"{self.opened} read_file")
        return DIFF

    async def cpu_s(self) -> float:
        return 0.0

    async def grade(self, task: Task, patch: str, *, sandbox: Any, limits: Limits) -> Evidence:
        await self.at("grade")
        return Evidence(statuses={"t1": "PASSED"}, resolved=True, patch_applied=True, exit_code=0, log_tail="")

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Generation:
        if len(request.input_ids) > 2:  # the second turn
            await self.at("generate")
        spans = (VersionSpan(step=0, start=0, end=2),)
        return Generation(
            output_ids=(5, 0),
            logprobs=(0.0, 0.0),
            spans=spans,
            finish_reason="stop",
            prompt_tokens=1,
            cached_tokens=0,
            retractions=0,
            queue_s=0.0,
            e2e_s=0.0,
        )

    async def abort(self, rid: str | None = None) -> None:
        self.aborted.append(rid)

    def start(self, task: Task) -> list[int]:
        return [1, 2]

    def parse(self, output_ids: Any) -> Action:
        return Action(command="true")

    def observe(self, output_ids: Any, result: Any) -> list[int]:
        return [3]

    def decode(self, ids: Any) -> str:
        return ""

    async def attempt(self, limits: Limits = LIMITS, *, grace_s: float = 15.0) -> Trajectory:
        world: Any = self
        attempt = Attempt(
            episode=replace(EPISODE, limits=limits), number=1, engine_url="e://", min_version=0, queued_at_s=0.0
        )
        return await run_episode(
            attempt,
            provider=world,
            engine=world,
            agent=BashAgent(),
            renderer=world,
            grader=world,
            worker="w",
            now=lambda: 1.0,
            grace_s=grace_s,
        )


def raising(error: BaseException) -> Fault:
    async def fault() -> None:
        raise error

    return fault


async def hang() -> None:
    await asyncio.sleep(60)


def test_all_places_are_reached() -> None:
    world = World()
    landed = asyncio.run(world.attempt())
    assert not isinstance(landed.outcome, Failed)
    assert set(PLACES) <= set(world.reached)
    assert world.opened == world.closed == 2


@pytest.mark.parametrize(
    ("place", "error", "boundary"),
    [
        ("1 start", SandboxStartError("no"), Boundary.SANDBOX_START),
        ("2 start", SandboxStartError("no"), Boundary.SANDBOX_START),
        ("1 write_files", SandboxLostError("gone"), Boundary.SANDBOX_LOST),
        ("1 exec", SandboxLostError("gone"), Boundary.SANDBOX_LOST),
        ("1 collect exec", SandboxLostError("gone"), Boundary.SANDBOX_LOST),
        ("1 read_file", SandboxLostError("gone"), Boundary.SANDBOX_LOST),
        ("grade", SandboxLostError("gone"), Boundary.SANDBOX_LOST),
        ("grade", GraderError("broken"), Boundary.GRADER),
        ("generate", EngineError("dead"), Boundary.ENGINE),
    ],
)
def test_a_failure_has_a_boundary_and_no_reward(place: str, error: Exception, boundary: Boundary) -> None:
    check_failure(place, error, boundary)


@pytest.mark.parametrize("kind", ["oom", "disk_limit"])
@pytest.mark.parametrize(("place", "turns"), [("1 exec", 1), ("1 collect exec", 3), ("1 read_file", 3)])
def test_who_uses_up_its_own_sandbox_is_graded(place: str, turns: int, kind: str) -> None:
    """Not a failure: a policy could make itself one whenever it is about to get no reward."""
    world = World(place, raising(SandboxLostError("it wrote too much", kind=kind)))
    landed = asyncio.run(world.attempt())
    assert isinstance(landed.outcome, Graded)
    assert landed.outcome.reward == 0.0
    assert "it wrote too much" in landed.outcome.evidence.log_tail
    assert (landed.end_reason, len(landed.turns)) == (EndReason.RESOURCES, turns)
    assert world.opened == world.closed == 1


@pytest.mark.parametrize("kind", ["oom", "disk_limit"])
@pytest.mark.parametrize("place", ["1 write_files", "2 start", "grade"])
def test_a_sandbox_that_is_used_up_before_or_after_the_agent_is_a_failure(place: str, kind: str) -> None:
    check_failure(place, SandboxLostError("it is gone", kind=kind), Boundary.SANDBOX_LOST)


def test_a_defect_anywhere_is_the_farms_failure() -> None:
    for place in PLACES:
        for error in (RuntimeError("defect"), TimeoutError("somebody else's")):
            check_failure(place, error, Boundary.FARM)


def check_failure(place: str, error: Exception, boundary: Boundary) -> None:
    world = World(place, raising(error))
    landed = asyncio.run(world.attempt())
    assert isinstance(landed.outcome, Failed)
    assert landed.outcome.boundary is boundary
    assert landed.end_reason is EndReason.FAILED
    assert world.opened == world.closed
    sampled = PLACES.index(place) - PLACES.index("generate")
    assert len(landed.turns) == (0 if sampled < 0 else 1 if place in ("generate", "1 exec") else 3)
    assert landed.patch == (DIFF.decode() if place in ("2 start", "grade") else "")


def test_an_attempt_that_takes_too_long_is_the_farms_failure() -> None:
    async def one(place: str) -> None:
        world = World(place, hang)
        landed = await world.attempt(replace(LIMITS, agent_s=30.0, episode_s=0.2))
        assert isinstance(landed.outcome, Failed)
        assert (landed.outcome.boundary, landed.outcome.kind) == (Boundary.FARM, "episode_timeout")
        assert world.opened == world.closed
        assert bool(landed.turns) is (PLACES.index(place) >= PLACES.index("generate"))

    async def main() -> None:
        await asyncio.gather(*map(one, PLACES))

    asyncio.run(main())


def test_an_agent_that_takes_too_long_is_graded() -> None:
    world = World("generate", hang)
    landed = asyncio.run(world.attempt(replace(LIMITS, agent_s=0.2)))
    assert not isinstance(landed.outcome, Failed)
    assert landed.end_reason is EndReason.TIME_LIMIT
    assert len(landed.turns) == 1


def test_cancelling_anywhere_leaves_nothing_behind() -> None:
    async def one(place: str) -> None:
        arrived = asyncio.Event()

        async def wait() -> None:
            arrived.set()
            await hang()

        world = World(place, wait)
        running = asyncio.create_task(world.attempt())
        await arrived.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert world.opened == world.closed
        assert len(world.aborted) == (1 if place == "generate" else 0)

    async def main() -> None:
        for place in PLACES:
            await one(place)

    asyncio.run(main())


def test_a_sandbox_that_never_answers_is_lost() -> None:
    landed = asyncio.run(World("1 exec", hang).attempt(grace_s=-0.9))
    assert isinstance(landed.outcome, Failed)
    assert (landed.outcome.boundary, landed.outcome.kind) == (Boundary.SANDBOX_LOST, "stalled")
