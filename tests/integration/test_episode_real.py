"""Whole attempts in real sandboxes on tasks of the micro suite; only the engine is scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from farm.agent import make_agent
from farm.agent.collect import NoPatchError, collect_patch
from farm.engine.scripted import ScriptedEngine
from farm.episode import run_episode
from farm.grader import make_grader
from farm.grader.diffs import touched
from farm.protocols import Agent, GenerateRequest, SandboxSpec
from farm.render.micro import MicroRenderer
from farm.render.micro_tokenizer import train_tokenizer
from farm.sandbox import make_provider
from farm.suites import micro
from farm.suites.repo import workspace_files
from farm.types import Attempt, EndReason, Episode, Graded, ImageFiles, Limits, Task, Trajectory

TASKS = micro.generate("rl", count=12)


def attempt_at(task: Task, limits: Limits = Limits()) -> Attempt:  # noqa: B008
    return Attempt(
        episode=Episode(task=task, group_id="g", index=0, group_size=1, seed=0, limits=limits),
        number=1,
        engine_url="",
        min_version=0,
        queued_at_s=time.time(),
    )


def run(attempts: Sequence[Attempt], agent: Agent, engine: Any, renderer: Any = None) -> list[Trajectory]:
    """All attempts, four at a time, in one process as a worker does it."""

    async def main() -> list[Trajectory]:
        provider, free = make_provider("bubblewrap"), asyncio.Semaphore(4)

        async def one(attempt: Attempt) -> Trajectory:
            async with free:
                return await run_episode(
                    attempt,
                    provider=provider,
                    engine=engine,
                    agent=agent,
                    renderer=renderer,
                    grader=make_grader("tests"),
                    worker="w",
                    now=time.time,
                )

        return await asyncio.gather(*map(one, attempts))

    return asyncio.run(main())


def evidence(trajectory: Trajectory) -> Any:
    assert isinstance(trajectory.outcome, Graded), trajectory.outcome
    return trajectory.outcome.evidence


@pytest.mark.parametrize(("name", "reward"), [("oracle", 1.0), ("null", 0.0)])
def test_the_oracle_solves_every_task_and_the_null_agent_none(name: str, reward: float) -> None:
    landed = run([attempt_at(task) for task in TASKS], make_agent(name), ScriptedEngine(lambda _: [0]))
    for trajectory in landed:
        assert evidence(trajectory).resolved is bool(reward), trajectory
        assert trajectory.usage.sandbox_cpu_s > 0
        starts = [event.start_at_s for event in trajectory.timeline]
        assert starts == sorted(starts)


class Policy:
    """Writes the given commands, one a turn, as the micro policy would."""

    def __init__(self, commands: Sequence[str]) -> None:
        self.renderer = MicroRenderer.of(train_tokenizer([*commands, "def return if not in sed python3 submit"]))
        self.turns = [self.renderer.command_ids(command) for command in commands]
        self.prompts: list[tuple[int, ...]] = []
        self.asked = asyncio.Event()
        self.engine = ScriptedEngine(self.answer)

    def answer(self, request: GenerateRequest) -> list[int]:
        self.asked.set()
        self.prompts.append(tuple(request.input_ids))
        return self.turns[len(self.prompts) - 1]


def test_a_policy_that_reads_edits_tests_and_submits() -> None:
    task = TASKS[0]
    changed = [line for line in task.patch.splitlines() if line[:1] in "-+" and line[:3] not in ("---", "+++")]
    (old,), (new,) = ([line[1:] for line in changed if line[0] == sign] for sign in "-+")
    policy = Policy(["cat *.py", f"sed -i 's|^{old}$|{new}|' *.py", "python3 -IS t", "cat *.py", "submit"])
    limits = Limits(max_tokens_per_turn=200, max_context_tokens=4000)
    (trajectory,) = run([attempt_at(task, limits)], make_agent("bash"), policy.engine, policy.renderer)
    assert evidence(trajectory).resolved, trajectory
    assert trajectory.end_reason is EndReason.SUBMITTED
    assert [turn.action for turn in trajectory.turns][::4] == ["cat *.py", "submit"]
    assert old in trajectory.turns[0].observation
    assert new in trajectory.turns[3].observation
    seen: tuple[int, ...] = ()
    for turn, prompt in zip(trajectory.turns, policy.prompts, strict=True):
        seen += turn.context_ids
        assert prompt == seen
        seen += turn.output_ids
    names = [event.name for event in trajectory.timeline]
    assert names.count("generate") == 5
    assert names.count("exec") == 4


@pytest.mark.parametrize(
    ("commands", "end"),
    [
        (["rm -rf /testbed /tmp/*", "ls", "kill -9 -1", "submit"], EndReason.SUBMITTED),
        (["sleep 60 & sleep 60", "submit"], EndReason.SUBMITTED),
        (["yes", "cat /dev/urandom", "submit"], EndReason.SUBMITTED),
        ([":(){ :|:& };:", "submit"], EndReason.SUBMITTED),
        (["true"] * 8, EndReason.MAX_TURNS),
    ],
    ids=["destroys", "hangs", "floods", "forks", "turns"],
)
def test_whatever_a_policy_runs_it_is_graded(commands: list[str], end: EndReason) -> None:
    policy = Policy(commands)
    limits = Limits(tool_s=0.5, max_tokens_per_turn=200, max_context_tokens=8000)
    (trajectory,) = run([attempt_at(TASKS[1], limits)], make_agent("bash"), policy.engine, policy.renderer)
    assert not evidence(trajectory).resolved
    assert trajectory.end_reason is end
    assert all(len(turn.observation) <= limits.output_bytes for turn in trajectory.turns)


def test_cancelling_in_the_middle_leaves_no_sandbox() -> None:
    """That no process is left is checked after every test."""

    async def main() -> None:
        policy = Policy(["sleep 60"])
        provider = make_provider("bubblewrap")
        limits = Limits(tool_s=30.0, agent_s=40.0)
        running = asyncio.create_task(
            run_episode(
                attempt_at(TASKS[0], limits),
                provider=provider,
                engine=policy.engine,
                agent=make_agent("bash"),
                renderer=policy.renderer,
                grader=make_grader("tests"),
                worker="w",
                now=time.time,
            )
        )
        await policy.asked.wait()
        await asyncio.sleep(0.1)  # into the command
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_a_repository_of_the_image_is_read_through_its_own_git() -> None:
    task = TASKS[0]
    (module,) = (path for path in task.workspace.files if path.endswith(".py"))  # type: ignore[union-attr]
    in_image = replace(task, workspace=ImageFiles())

    async def main() -> None:
        spec = SandboxSpec(owner="test", deadline_at_s=time.time() + 60)
        async with make_provider("bubblewrap").open(spec) as sandbox:
            await sandbox.write_files(workspace_files(task))
            assert await collect_patch(in_image, sandbox) == ""
            script = f"echo '# more' >> {module}; git commit -qam x; echo new > new.txt; echo x > x.pyc; chmod +x t"
            assert (await sandbox.exec(script, timeout_s=10)).exit_code == 0
            by_image, by_farm = await collect_patch(in_image, sandbox), await collect_patch(task, sandbox)
            assert touched(by_farm) == {module, "new.txt"}
            assert touched(by_image) == {module, "new.txt", "t"}, "an image's file modes count"
            await sandbox.exec("rm -rf .git", timeout_s=10)
            assert await collect_patch(task, sandbox) == by_farm
            with pytest.raises(NoPatchError):
                await collect_patch(in_image, sandbox)

    asyncio.run(main())
