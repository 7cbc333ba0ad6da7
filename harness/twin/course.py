"""The way of one attempt in virtual time: what :func:`farm.episode.run_episode` and the bash agent do, without I/O.

Sandbox, then turns (generate, command) until a cap or the script ends them (:mod:`farm.agent.caps` decides), then a
fresh sandbox and the grade. A planned infrastructure failure (:class:`farm.inject.FaultPlan`) ends it where a real one
would cross.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farm.agent.caps import ENGINE_SHARE, allowance, end_of_turn
from farm.types import Boundary, EndReason, Episode
from harness.twin.clock import Clock, Cpu
from harness.twin.engine import EngineModel, Request
from harness.twin.sandbox import Sandboxes
from harness.twin.scenario import Overheads
from harness.twin.workload import Script


@dataclass(frozen=True, slots=True)
class Site:
    """Where attempts run."""

    clock: Clock
    cpu: Cpu | None
    sandboxes: Sandboxes
    overheads: Overheads


class Course:
    """One attempt. ``on_end`` is called once, unless it was given up: ``end_reason``, ``reward`` (None: failed, at
    ``boundary`` for ``kind``) and the figures tell what came of it."""

    __slots__ = (
        "_asked_s",
        "_context",
        "_deadline_s",
        "_limits",
        "_on_end",
        "_record",
        "_request",
        "_script",
        "_site",
        "_start_asked_s",
        "_turn",
        "_unreadable",
        "boundary",
        "end_reason",
        "engine",
        "engine_wait_s",
        "episode",
        "episode_id",
        "fault",
        "kind",
        "number",
        "oldest_step",
        "over",
        "reward",
        "sampled",
        "start_s",
        "started_at_s",
    )  # fmt: skip

    def __init__(
        self,
        site: Site,
        episode: Episode,
        episode_id: str,
        number: int,
        *,
        script: Script,
        engine: EngineModel,
        fault: Boundary | None,
        on_end: Callable[[Course], None],
    ) -> None:
        self._site = site
        self._limits = episode.limits
        self._script = script
        self._on_end = on_end
        self._context = float(script.prompt)
        self._turn = 0
        self._unreadable = 0
        self._record: Request | None = None  # of all its generations, one after the other
        self._request: Request | None = None  # the one that is being answered
        self._deadline_s = float("inf")
        self._asked_s = 0.0
        self.episode = episode
        self.episode_id = episode_id
        self.number = number
        self.engine = engine
        self.fault = fault
        self.over = False
        self.end_reason = EndReason.FAILED
        self.boundary: Boundary | None = None
        self.kind = ""
        self.reward: float | None = None
        self.oldest_step: int | None = None
        self.sampled = 0
        self.engine_wait_s = 0.0
        self.start_s: list[float] = []
        self.started_at_s = site.clock.now_s
        self._start_asked_s = self.started_at_s
        site.sandboxes.start(script.chances[0], self._opened, None)

    @property
    def turns(self) -> int:
        return self._turn

    @property
    def total_tokens(self) -> int:
        return int(self._context)

    def check_time(self, now_s: float) -> None:
        """What the real ones find out by their own time-outs: the episode's, the agent's, that of one generation."""
        if self.over:
            return
        if now_s - self.started_at_s >= self._limits.episode_s:
            self._drop_request()
            self._fail(Boundary.FARM, "episode_timeout")
            return
        request = self._request
        if request is None:
            return
        if now_s >= self._deadline_s:
            self._drop_request()
            self._end(EndReason.TIME_LIMIT)
        elif now_s - self._asked_s >= ENGINE_SHARE * self._limits.agent_s:
            self._drop_request()
            self._fail(Boundary.ENGINE, "timeout")

    def give_up(self) -> None:
        """Cancelled: nothing more comes of it."""
        self._drop_request()
        self._close()

    # ------------------------------------------------------------------------------------- sandboxes

    def _opened(self, _: None) -> None:
        if self.over:
            return
        now_s = self._site.clock.now_s
        self.start_s.append(now_s - self._start_asked_s)
        if self.fault in (Boundary.SANDBOX_START, Boundary.SANDBOX_LOST, Boundary.AGENT):
            self._fail(self.fault, "injected")
            return
        self._deadline_s = now_s + self._limits.agent_s
        self._next_turn()

    # ------------------------------------------------------------------------------------- turns

    def _next_turn(self) -> None:
        site = self._site
        if site.cpu is not None and site.overheads.turn_cpu_s:
            site.cpu.run_job(site.overheads.turn_cpu_s, self._generate)
        else:
            self._generate(None)

    def _generate(self, _: None) -> None:
        if self.over:
            return
        now_s, context, turn = self._site.clock.now_s, self._context, self._turn
        allowed = allowance(self._limits, turns=turn, context_tokens=int(context), left_s=self._deadline_s - now_s)
        if not isinstance(allowed, int):
            self._end(allowed)
            return
        if self.fault is not None and self.fault is Boundary.ENGINE:
            self._fail(Boundary.ENGINE, "injected")
            return
        script, record = self._script, self._record
        if record is None:
            self.oldest_step = self.engine.step
            record = self._record = Request(
                prefix=self.episode_id,
                group=self.episode.group_id,
                group_tokens=float(script.prompt),
                tokens=context,
                sample=script.outputs[turn],
                max_new_tokens=allowed,
                on_done=self._generated,
            )
        else:
            record.again(context, script.outputs[turn], allowed)
        self._request = record
        self._asked_s = now_s  # the engine may live in another time
        self.engine.submit(record)

    def _generated(self, request: Request) -> None:
        self._request = None
        now_s = self._site.clock.now_s
        waited_s = now_s - self._asked_s
        if waited_s > self.engine_wait_s:
            self.engine_wait_s = waited_s
        if request.aborted:
            self._fail(Boundary.ENGINE, "aborted")
            return
        script, turn, limits = self._script, self._turn, self._limits
        self._turn = turn + 1
        self._context = request.tokens
        self.sampled += request.target
        if request.cut:
            self._unreadable += 1
        else:
            self._unreadable = 0
            if turn + 1 >= len(script.outputs) and script.end_reason is EndReason.SUBMITTED:
                self._end(EndReason.SUBMITTED)
                return
            command_s, left_s = script.commands_s[turn], self._deadline_s - now_s
            if left_s <= 0.0:
                self._end(EndReason.TIME_LIMIT)
                return
            if command_s > limits.tool_s:
                command_s = limits.tool_s
            self._site.sandboxes.run(command_s if command_s < left_s else left_s, self._observed, None)
            return
        end = end_of_turn(limits, cut=True, context_tokens=int(self._context), unreadable=self._unreadable)
        if end is not None or turn + 1 >= len(script.outputs):
            self._end(end or EndReason.MAX_TOKENS)
        else:
            self._observed(None)

    def _observed(self, _: None) -> None:
        if self.over:
            return
        self._context += self._script.observations[self._turn - 1]
        if self._turn >= len(self._script.outputs):
            self._end(self._script.end_reason)
        elif self._site.cpu is None:
            self._generate(None)
        else:
            self._next_turn()

    # ------------------------------------------------------------------------------------- the grade

    def _end(self, reason: EndReason) -> None:
        if self.over:
            return
        self.end_reason = reason
        self._site.sandboxes.run(self._script.collect_s, self._collected, None)

    def _collected(self, _: None) -> None:
        if self.over:
            return
        if self.fault is Boundary.FARM:
            self._fail(Boundary.FARM, "injected")
        elif self._script.grade_s is None:
            self._graded(None)
        else:
            self._start_asked_s = self._site.clock.now_s
            self._site.sandboxes.start(self._script.chances[1], self._grade, None)

    def _grade(self, _: None) -> None:
        if self.over:
            return
        self.start_s.append(self._site.clock.now_s - self._start_asked_s)
        if self.fault is Boundary.GRADER:
            self._fail(Boundary.GRADER, "injected")
            return
        assert self._script.grade_s is not None
        self._site.sandboxes.run(min(self._script.grade_s, self._limits.grade_s), self._graded, None)

    def _graded(self, _: None) -> None:
        if self.over:
            return
        # What a cap cut short has not earned what it would have.
        played = self._turn >= len(self._script.outputs) and self._unreadable == 0
        self.reward = self._script.reward if played else 0.0
        self._close()
        self._on_end(self)

    def _fail(self, boundary: Boundary, kind: str) -> None:
        self.boundary, self.kind = boundary, kind
        self.end_reason = EndReason.FAILED
        self._close()
        self._on_end(self)

    def _close(self) -> None:
        self.over = True
        self._record = None  # it refers back to this: nothing must be left for the garbage collector

    def _drop_request(self) -> None:
        if self._request is not None:
            self.engine.abort(self._request)
            self._request = None
