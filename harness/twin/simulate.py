"""A whole farm in virtual time: the driver of :mod:`farm.service`, with models in place of what acts.

It executes the dispatcher's commands and tells it what came of them; what has landed goes to a log that is sealed by
age and size, which the trainer's own batcher reads. Same scenario, same result, byte for byte.
"""

from __future__ import annotations

import gc

from farm.dispatch import (
    AttemptFailed,
    AttemptLost,
    Cancel,
    Capacity,
    Command,
    Dispatcher,
    DispatchEvent,
    Forget,
    LandDropped,
    Landed,
    LandFailed,
    Published,
    Run,
    Tick,
    Unissued,
)
from farm.elastic import FlightRules, FlightState, next_flights
from farm.inject import FaultPlan
from farm.types import (
    Attempt,
    Dropped,
    Episode,
    Evidence,
    Failed,
    FailedAttempt,
    Graded,
    Outcome,
    PolicyVersion,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)
from farm.worker import bare_trajectory
from harness.twin.clock import Clock, Cpu
from harness.twin.course import Course, Site
from harness.twin.engine import EngineTotals
from harness.twin.fleet import FleetModel
from harness.twin.learner import Learner
from harness.twin.result import Landing, Result
from harness.twin.scenario import Scenario

_RESOLVED = Evidence(statuses={}, resolved=True, patch_applied=True, exit_code=0, log_tail="")
_NO_USAGE = Usage()
_NOT_RESOLVED = Evidence(statuses={}, resolved=False, patch_applied=True, exit_code=1, log_tail="")


def simulate(scenario: Scenario, *, warm_up_s: float = 0.0) -> Result:
    """Run to the scenario's end. Peaks and totals of engines count from ``warm_up_s`` on."""
    world = _World(scenario)
    collecting = gc.isenabled()
    gc.disable()  # millions of small records and no cycle among those that end: looking for some takes a fifth longer
    try:
        return world.run(warm_up_s)
    finally:
        if collecting:
            gc.enable()


class _World:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._clock = Clock()
        cpu = None if scenario.cores is None else Cpu(self._clock, scenario.cores)
        engine_time = cpu if cpu is not None and scenario.engines.shared_cpu else self._clock
        self._fleet = FleetModel(scenario.engines, self._clock, engine_time)
        self._site = Site(self._clock, cpu, scenario.sandboxes(self._clock, cpu), scenario.overheads)
        self._cap_tokens = scenario.plan.group(0)[0].limits.max_context_tokens
        self._dispatcher = Dispatcher(scenario.plan, scenario.policy)
        self._faults = FaultPlan(rate=scenario.fault_rate, seed=scenario.fault_seed)
        self._flights = FlightState(target=scenario.slots)
        self._courses: dict[tuple[str, int], Course] = {}
        self._landed: set[str] = set()
        self._pending: list[tuple[Trajectory, int]] = []
        self._result = Result(name=scenario.name)
        self._learner: Learner | None = None
        if scenario.trainer is not None and scenario.rules is not None:
            # The embedded trainer computes on the same machine; a training node does not.
            shared = cpu if scenario.engines.shared_cpu else None
            self._learner = Learner(self._clock, shared, scenario.trainer, scenario.rules, publish=self._published)

    def run(self, warm_up_s: float) -> Result:
        scenario, clock = self._scenario, self._clock
        self._result.warm_up_s = warm_up_s
        if self._learner is not None:
            self._handle(Published(step=0, consumed_groups=0))
        self._scale(None)
        self._tick(None)
        clock.at(warm_up_s, self._warm, None)
        clock.run(scenario.horizon_s)
        result = self._result
        result.ended_at_s = min(clock.now_s, scenario.horizon_s)
        result.warm_up_s = warm_up_s
        result.engines = [engine.totals for engine in self._fleet.engines.values()]
        result.live = self._fleet.live
        result.counts = self._dispatcher.counts()
        if self._learner is not None:
            result.steps = self._learner.steps
        return result

    def _warm(self, _: None) -> None:
        for engine in self._fleet.engines.values():
            engine.totals = EngineTotals()

    # ------------------------------------------------------------------------------------- the driver

    def _handle(self, event: DispatchEvent) -> None:
        # A stack, for a refusal is an event that may issue what is refused, too, and so on.
        events = [event]
        while events:
            unplaced: list[DispatchEvent] = []
            for command in self._dispatcher.handle(events.pop(), now_s=self._clock.now_s):
                self._execute(command, unplaced)
            events.extend(reversed(unplaced))
        if self._dispatcher.done:
            self._clock.stop()

    def _execute(self, command: Command, unplaced: list[DispatchEvent]) -> None:
        match command:
            case Run():
                episode_id = command.episode.id
                if not self._issue(command, episode_id):
                    unplaced.append(Unissued(episode_id=episode_id, attempt=command.number))
            case Cancel():
                self._cancel((command.episode_id, command.number))
            case Forget():
                self._fleet.release(_name(command.episode_id, command.number))
            case LandFailed():
                outcome = Failed(boundary=command.failure.boundary, kind=command.failure.kind, message="")
                self._land_bare(command.episode, outcome, command.failure.attempt, command.prior)
            case LandDropped():
                self._land_bare(command.episode, Dropped(reason=command.reason), command.next_number, command.prior)

    def _issue(self, run: Run, episode_id: str) -> bool:
        episode = run.episode
        grant = self._fleet.place(
            _name(episode_id, run.number),
            group=episode.group_id,
            tokens=self._reserve(episode.limits.max_context_tokens),
        )
        if grant is None:
            return False
        self._courses[episode_id, run.number] = Course(
            self._site,
            episode,
            episode_id,
            run.number,
            script=self._scenario.workload.script(episode, run.number),
            engine=self._fleet.engines[grant.url],
            fault=self._faults.boundary(episode_id, run.number) if self._faults.rate else None,
            on_end=self._ended,
        )
        return True

    def _reserve(self, cap_tokens: int) -> int:
        """Without a guard nothing is reserved for the cap, so that any number of episodes shares an engine."""
        return cap_tokens if self._scenario.guarded else 1

    def _cancel(self, key: tuple[str, int]) -> None:
        course = self._courses.pop(key, None)
        if course is None:
            return
        course.give_up()
        self._fleet.release(_name(*key))
        self._handle(AttemptLost(episode_id=key[0], attempt=key[1], worker="", kind="cancelled"))

    def _ended(self, course: Course) -> None:
        key = (course.episode_id, course.number)
        del self._courses[key]
        self._fleet.release(_name(*key))
        now_s = self._clock.now_s
        result = self._result
        result.starts_s.extend(course.start_s)
        if course.reward is None:
            assert course.boundary is not None
            result.failures[f"{course.boundary.value}/{course.kind}"] += 1
            failure = FailedAttempt(
                attempt=course.number,
                boundary=course.boundary,
                kind=course.kind,
                message="",
                worker="",
                started_at_s=course.started_at_s,
                ended_at_s=now_s,
            )
            self._handle(AttemptFailed(episode_id=course.episode_id, failure=failure))
            return
        if course.episode_id not in self._landed:  # the log's rule: the first row of an episode wins
            self._land(_trajectory(course), course.total_tokens)
            result.landings.append(
                Landing(
                    at_s=now_s,
                    seconds=now_s - course.started_at_s,
                    tokens=course.total_tokens,
                    sampled=course.sampled,
                    turns=course.turns,
                    end_reason=course.end_reason,
                    reward=course.reward,
                    engine_wait_s=course.engine_wait_s,
                )
            )
        self._handle(Landed(episode_id=course.episode_id, attempt=course.number))

    # ------------------------------------------------------------------------------------- the log

    def _land_bare(
        self, episode: Episode, outcome: Failed | Dropped, number: int, prior: tuple[FailedAttempt, ...]
    ) -> None:
        now_s = self._clock.now_s
        attempt = Attempt(episode=episode, number=number, engine_url="", min_version=0, queued_at_s=now_s, prior=prior)
        if episode.id not in self._landed:
            self._land(bare_trajectory(attempt, outcome, worker="", started_at_s=now_s, ended_at_s=now_s), 0)

    def _land(self, trajectory: Trajectory, tokens: int) -> None:
        self._landed.add(trajectory.episode_id)
        self._result.rows[trajectory.episode_id] += 1
        if self._learner is None:
            return
        self._pending.append((trajectory, tokens))
        scenario = self._scenario
        if len(self._pending) == 1:
            due_s = self._clock.now_s + scenario.seal_age_s + scenario.intervals.seal_check_s / 2
            self._clock.at(due_s, self._seal, trajectory)
        elif len(self._pending) == scenario.seal_rows:
            self._clock.at(self._clock.now_s + scenario.intervals.seal_check_s / 2, self._seal, self._pending[0][0])

    def _seal(self, first: Trajectory) -> None:
        """``first``: the row for which this was scheduled; it may have been sealed by size meanwhile."""
        if not self._pending or self._pending[0][0] is not first:
            return
        rows, self._pending = self._pending, []
        self._clock.at(self._clock.now_s + self._scenario.intervals.poll_s / 2, self._sealed, rows)

    def _sealed(self, rows: list[tuple[Trajectory, int]]) -> None:
        assert self._learner is not None
        self._learner.sealed(rows)

    # ------------------------------------------------------------------------------------- by time

    def _published(self, version: PolicyVersion) -> None:
        if version.step == self._scenario.stop_after_steps:
            self._clock.stop()
        self._clock.at(self._clock.now_s + self._scenario.intervals.poll_s / 2, self._on_policy, version)

    def _on_policy(self, version: PolicyVersion) -> None:
        self._fleet.want(version)
        self._handle(Published(step=version.step, consumed_groups=version.consumed_groups))

    def _tick(self, _: None) -> None:
        now_s = self._clock.now_s
        for course in list(self._courses.values()):
            course.check_time(now_s)
        self._handle(Tick())
        self._clock.at(now_s + self._scenario.intervals.tick_s, self._tick, None)

    def _scale(self, _: None) -> None:
        scenario, now_s = self._scenario, self._clock.now_s
        slots = scenario.slots
        if scenario.guarded:
            slots = min(slots, self._fleet.capacity(self._cap_tokens))
            self._flights = next_flights(
                self._flights, self._fleet.view(), slots=slots, rules=FlightRules(), now_s=now_s
            )
            slots = min(slots, self._flights.target)
        if now_s >= self._result.warm_up_s:
            self._result.in_flight.append((now_s, len(self._courses)))
            self._result.uses.append((now_s, self._fleet.highest_use()))
        self._handle(Capacity(slots=slots))
        self._clock.at(now_s + scenario.intervals.scale_s, self._scale, None)


def _name(episode_id: str, number: int) -> str:
    return f"{episode_id}-{number}"


def _trajectory(course: Course) -> Trajectory:
    """The row of a graded attempt: one turn stands for all, with the oldest policy that was sampled from."""
    episode, task = course.episode, course.episode.task
    assert course.reward is not None
    outcome: Outcome = Graded(reward=course.reward, evidence=_RESOLVED if course.reward > 0 else _NOT_RESOLVED)
    spans = () if course.oldest_step is None else (VersionSpan(step=course.oldest_step, start=0, end=course.sampled),)
    turn = Turn(
        segment=0, context_ids=(), output_ids=(), output_logprobs=(), spans=spans, finish_reason="stop", action="",
        observation="", exit_code=None, cached_tokens=0, retractions=0,
    )  # fmt: skip
    return Trajectory(
        episode_id=course.episode_id, group_id=episode.group_id, group_size=episode.group_size, index=episode.index,
        instance_id=task.instance_id, task_digest="", dataset=task.dataset, repo=task.repo, strata=task.strata,
        weight=task.weight, seed=episode.seed, purpose=episode.purpose, sampling=episode.sampling,
        attempt=course.number, worker="", engine_url="", outcome=outcome, end_reason=course.end_reason, turns=(turn,),
        patch="", timeline=(), usage=_NO_USAGE, started_at_s=course.started_at_s,
    )  # fmt: skip
