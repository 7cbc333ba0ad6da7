"""One attempt at one episode: the one place where task, agent, sandbox, engine and grader meet.

``run_episode`` always returns a Trajectory. Whatever breaks on the way becomes ``Failed`` and never a reward (Rule 3);
an agent that ran out of turns, tokens, time, or its sandbox's memory or disk is graded as it stands. Only cancellation
leaves as an exception. In every case both sandboxes are closed first (Rule 7).

Time: the agent has ``agent_s``, the tests have ``grade_s``, the whole attempt has ``episode_s``. Because the agent
stops by itself at ``agent_s``, an attempt that exceeds ``episode_s`` was held up by sandboxes or grading: a failure of
the farm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from farm.agent.collect import NoPatchError, collect_patch
from farm.agent.partial import partial_run
from farm.errors import FarmError, SandboxLostError, classify
from farm.grader import grading_spec
from farm.grader.tests import not_resolved
from farm.history import strip_future
from farm.metered import Metered
from farm.protocols import (
    Agent,
    AgentRun,
    Engine,
    ExecResult,
    Grader,
    MachineGrader,
    Renderer,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)
from farm.types import Attempt, EndReason, Event, Evidence, Failed, Graded, ImageFiles, Outcome, Trajectory, Turn, Usage
from farm.workspace import workspace

_GRACE_S = 15.0
_FILES_S = 30.0


async def run_episode(
    attempt: Attempt,
    *,
    provider: SandboxProvider,
    engine: Engine,
    agent: Agent,
    renderer: Renderer,
    grader: Grader,
    worker: str,
    now: Callable[[], float],
    grace_s: float = _GRACE_S,
) -> Trajectory:
    """Run ``attempt`` on this worker. ``now`` gives seconds since the epoch; ``grace_s``: how much longer than its own
    time-out a command in a sandbox may take before the sandbox counts as lost."""
    course = _Course(attempt, provider, now, grace_s)
    limits = attempt.episode.limits
    work = Metered(course.run(engine, agent, renderer, grader))
    outcome: Outcome
    try:
        async with asyncio.timeout(limits.episode_s) as limit:
            outcome = await work
    except TimeoutError as error:
        course.keep(partial_run(error))
        outcome = classify(error)
        if limit.expired():
            late = FarmError(f"the attempt took over {limits.episode_s:g} s", kind="episode_timeout")
            outcome = classify(late)
    except Exception as error:
        course.keep(partial_run(error))
        outcome = classify(error)
    return course.trajectory(outcome, worker, engine.url, worker_cpu_s=work.cpu_s)


class _Course:
    """What has happened so far in one attempt."""

    def __init__(self, attempt: Attempt, provider: SandboxProvider, now: Callable[[], float], grace_s: float) -> None:
        self._attempt, self._provider, self._now, self._grace_s = attempt, provider, now, grace_s
        self._started = now()
        self._turns: tuple[Turn, ...] = ()
        self._end = EndReason.FAILED
        self._patch = ""
        self._cpu_s = 0.0
        self._timeline = [Event(name="queued", start_at_s=attempt.queued_at_s, end_at_s=self._started)]

    def keep(self, run: AgentRun | None) -> None:
        if run is not None:
            self._turns, self._end = run.turns, run.end_reason
            self._timeline += run.timeline

    async def run(self, engine: Engine, agent: Agent, renderer: Renderer, grader: Grader) -> Graded:
        """The whole way to a grade. Raises what broke."""
        done = await self._work(engine, agent, renderer, grader)
        if isinstance(done, Graded):
            return done
        evidence = done or await self._grade(grader)
        return Graded(reward=1.0 if evidence.resolved else 0.0, evidence=evidence)

    async def _work(self, engine: Engine, agent: Agent, renderer: Renderer, grader: Grader) -> Graded | Evidence | None:
        """Let the agent work and take its diff. Gives the evidence when there is nothing to run tests for, and the
        grade where it is the machine that is graded."""
        episode = self._attempt.episode
        task, limits = episode.task, episode.limits
        spec = SandboxSpec(
            owner=self._owner("agent"),
            deadline_at_s=self._deadline(),
            image=task.image,
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
            pids=limits.pids,
            output_bytes=limits.output_bytes,
            workdir=task.workdir,
            machine=task.machine,
        )
        async with self._open(spec) as sandbox:
            files = await workspace(task)
            base = task.base_commit
            if files:
                await sandbox.write_files(files)
            if isinstance(task.workspace, ImageFiles):
                with self._event("history"):
                    base = (await strip_future(task, sandbox)).head
            try:
                self.keep(
                    await agent.run(
                        task,
                        episode_id=episode.id,
                        sandbox=sandbox,
                        engine=engine,
                        renderer=renderer,
                        sampling=episode.sampling,
                        limits=limits,
                        min_step=self._attempt.min_version,
                    )
                )
                if isinstance(grader, MachineGrader) and grader.by_machine(task):
                    with self._event("grade"):
                        return await grader.grade_machine(task, sandbox=sandbox, limits=limits)
                with self._event("collect"):
                    self._patch = await collect_patch(task, sandbox, base=base)
            except NoPatchError as error:
                return not_resolved(task, str(error), patch_applied=False)
            except SandboxLostError as error:
                if not error.by_own_limit:
                    raise
                # Else a policy that is about to fail could make itself a failure that nobody trains on.
                self.keep(partial_run(error))
                self._end = EndReason.RESOURCES
                return not_resolved(task, str(error), patch_applied=False)
        if not self._patch:  # tasks are qualified: without a change their tests fail
            return not_resolved(task, "the agent changed nothing: no test was run", patch_applied=True)
        return None

    async def _grade(self, grader: Grader) -> Evidence:
        episode = self._attempt.episode
        spec = grading_spec(
            episode.task, limits=episode.limits, owner=self._owner("grade"), deadline_at_s=self._deadline()
        )
        async with self._open(spec) as sandbox:
            with self._event("grade"):
                return await grader.grade(episode.task, self._patch, sandbox=sandbox, limits=episode.limits)

    @contextlib.asynccontextmanager
    async def _open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A sandbox whose every call is bounded in time; adds up its CPU time."""
        with contextlib.ExitStack() as starting:
            starting.enter_context(self._event("sandbox_start"))
            async with self._provider.open(spec) as sandbox:
                starting.close()
                watched = _Watched(sandbox, self._grace_s)
                yield watched
                with contextlib.suppress(SandboxLostError):  # the work is done: a missing figure loses nothing
                    self._cpu_s += await watched.cpu_s()

    @contextlib.contextmanager
    def _event(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._timeline.append(Event(name=name, start_at_s=start, end_at_s=self._now()))

    def _owner(self, part: str) -> str:
        return f"{self._attempt.episode.id}-{self._attempt.number}-{part}"

    def _deadline(self) -> float:
        return self._started + self._attempt.episode.limits.episode_s + self._grace_s

    def trajectory(self, outcome: Outcome, worker: str, engine_url: str, *, worker_cpu_s: float) -> Trajectory:
        episode = self._attempt.episode
        task = episode.task
        return Trajectory(
            episode_id=episode.id,
            group_id=episode.group_id,
            group_size=episode.group_size,
            index=episode.index,
            instance_id=task.instance_id,
            task_digest=task.digest,
            dataset=task.dataset,
            repo=task.repo,
            strata=task.strata,
            weight=task.weight,
            seed=episode.seed,
            purpose=episode.purpose,
            sampling=episode.sampling,
            attempt=self._attempt.number,
            worker=worker,
            engine_url=engine_url,
            outcome=outcome,
            end_reason=EndReason.FAILED if isinstance(outcome, Failed) else self._end,
            turns=self._turns,
            patch=self._patch,
            timeline=tuple(self._timeline),
            usage=_usage(self._turns, sandbox_cpu_s=self._cpu_s, worker_cpu_s=worker_cpu_s),
            prior=self._attempt.prior,
            started_at_s=self._started,
            ended_at_s=self._now(),
        )


def _usage(turns: tuple[Turn, ...], *, sandbox_cpu_s: float, worker_cpu_s: float) -> Usage:
    """Tokens as the engine counts them: every turn's prompt is all that came before it."""
    prompt = seen = 0
    for turn in turns:
        prompt += seen + len(turn.context_ids)
        seen += len(turn.context_ids) + len(turn.output_ids)
    return Usage(
        prompt_tokens=prompt,
        output_tokens=sum(len(turn.output_ids) for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        sandbox_cpu_s=sandbox_cpu_s,
        worker_cpu_s=worker_cpu_s,
    )


class _Watched:
    """A sandbox none of whose calls can hang: one that does not answer is lost."""

    def __init__(self, sandbox: Sandbox, grace_s: float) -> None:
        self._sandbox = sandbox
        self._grace_s = grace_s

    @property
    def id(self) -> str:
        return self._sandbox.id

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        async with self._bound("exec", timeout_s + self._grace_s):
            return await self._sandbox.exec(command, timeout_s=timeout_s, cwd=cwd, env=env)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        async with self._bound("write_files", _FILES_S):
            await self._sandbox.write_files(files)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        async with self._bound("read_file", _FILES_S):
            return await self._sandbox.read_file(path, max_bytes=max_bytes)

    async def cpu_s(self) -> float:
        async with self._bound("cpu_s", _FILES_S):
            return await self._sandbox.cpu_s()

    @contextlib.asynccontextmanager
    async def _bound(self, call: str, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                yield
        except TimeoutError as error:
            if limit.expired():
                raise SandboxLostError(
                    f"{self.id}: {call} gave no answer in {timeout_s:g} s", kind="stalled"
                ) from error
            raise
