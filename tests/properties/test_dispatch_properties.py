"""The invariant of farm/dispatch.py over any interleaving of results, failures, losses, late results and restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from makers import failure, make_task

from farm.dispatch import (
    AttemptFailed,
    AttemptLost,
    Cancel,
    Capacity,
    Command,
    Dispatcher,
    DispatchEvent,
    DispatchPolicy,
    Drain,
    EndlessPlan,
    FinitePlan,
    Forget,
    LandDropped,
    Landed,
    LandFailed,
    Plan,
    PlanSpec,
    Published,
    Run,
    Tick,
    Unissued,
)
from farm.types import Boundary, Episode, FailedAttempt, Limits, SamplingParams

# Of two sizes: what found no room holds back what is as large.
TASKS = [replace(make_task(f"t{i}"), own_limits={"max_context_tokens": 256} if i % 2 else {}) for i in range(5)]
LEASE_S = 100.0
RETRIES = dict.fromkeys(Boundary, 2)


def spec(group_size: int = 3) -> PlanSpec:
    return PlanSpec(group_size=group_size, seed=7, purpose="rl", sampling=SamplingParams(), limits=Limits())


class Simulation:
    """A cluster and a log around the dispatcher: attempts that run, rows that landed (first wins)."""

    def __init__(self, plan: Plan, policy: DispatchPolicy) -> None:
        self.plan = plan
        self.policy = policy
        self.now_s = 0.0
        self.capacity = 0
        self.rows: dict[str, str] = {}  # the log: episode id -> how it landed
        self.memory: dict[str, list[FailedAttempt]] = {}  # failures.jsonl
        self.forgiven: set[tuple[str, int]] = set()
        self.succeeding = False  # while the news of a success is being handled
        self.running: dict[tuple[str, int], Episode] = {}
        self.issued: Counter[tuple[str, int]] = Counter()
        self.opened: set[str] = set()
        self.consumed = 0
        self.step = 0
        self.cancelled: set[tuple[str, int]] = set()
        self.dispatcher = Dispatcher(plan, policy)
        self.restart()

    def restart(self) -> None:
        """kill -9 of the driver: workers die with it, the log and the remembered failures stay. What the breaker
        tripped on is forgiven."""
        self.running.clear()
        self.cancelled.clear()
        if self.dispatcher.tripped is not None:
            self.forgiven |= {(episode, f.attempt) for episode, failures in self.memory.items() for f in failures}
        self.dispatcher = Dispatcher(
            self.plan, self.policy, landed=self.rows, failures=self.memory, forgiven=self.forgiven
        )
        self.send(Published(step=self.step, consumed_groups=self.consumed))
        self.send(Capacity(slots=self.capacity))

    def send(self, event: DispatchEvent) -> None:
        for command in self.dispatcher.handle(event, now_s=self.now_s):
            self.execute(command)

    def execute(self, command: Command) -> None:
        match command:
            case Run():
                assert command.episode.id not in self.rows, "issued after it landed"
                assert self.dispatcher.tripped is None
                key = (command.episode.id, command.number)
                assert key not in self.running
                assert [f.attempt for f in command.prior] == sorted({f.attempt for f in command.prior})
                assert all(f.attempt < command.number for f in command.prior)
                self.running[key] = command.episode
                self.issued[key] += 1
                self.opened.add(command.episode.group_id)
                assert len(self.running) <= self.capacity, "more in flight than slots"
                lead = self.policy.lead
                if lead is not None:
                    assert len(self.opened) <= self.consumed + lead, "staleness bound"
            case Cancel():
                self.cancelled.add((command.episode_id, command.number))  # it still ends by an event of its own
            case Forget():
                raise AssertionError("the cluster confirms every end within a lease here")
            case LandFailed():
                assert command.episode.id not in self.rows
                assert command.failure.attempt not in {f.attempt for f in command.prior}
                assert self.dispatcher.tripped is None
                tried = {episode_id for episode_id, _ in self.running} - set(self.rows) - {command.episode.id}
                assert self.succeeding or not tried, "landed as failed while that may be everybody's failure"
                self.rows[command.episode.id] = "failed"
            case LandDropped():
                assert command.episode.id not in self.rows
                self.rows[command.episode.id] = "dropped"

    def finish(self, key: tuple[str, int]) -> None:
        self.running.pop(key)
        self.rows.setdefault(key[0], "graded")
        self.succeeding = True
        self.send(Landed(episode_id=key[0], attempt=key[1]))
        self.succeeding = False

    def fail(self, key: tuple[str, int], boundary: Boundary, retryable: bool = True) -> None:
        self.running.pop(key)
        failed = failure(key[1], boundary, at_s=self.now_s)
        self.memory.setdefault(key[0], []).append(failed)
        self.send(AttemptFailed(episode_id=key[0], failure=failed, retryable=retryable))

    def lose(self, key: tuple[str, int]) -> None:
        self.running.pop(key)
        self.send(AttemptLost(episode_id=key[0], attempt=key[1], worker="w"))

    def wait(self, seconds: float) -> None:
        """Time passes. The cluster ends what was cancelled well within a lease."""
        for key in self.cancelled & set(self.running):
            self.lose(key)
        self.cancelled.clear()
        self.now_s += seconds
        self.send(Tick())

    def run_out(self) -> None:
        """No more failures: everything runs to its end."""
        self.capacity = max(self.capacity, 2)
        self.send(Capacity(slots=self.capacity))
        for _ in range(10_000):
            if self.dispatcher.done and self.dispatcher.tripped is None:
                return
            if self.dispatcher.done:
                self.restart()
            elif self.running:
                self.finish(next(iter(self.running)))
            else:
                self.wait(LEASE_S)
        raise AssertionError("the plan does not end")


class DispatchMachine(RuleBasedStateMachine):
    """A finite plan; every rule is one thing the world can do."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation(FinitePlan(TASKS, spec()), DispatchPolicy(retries=RETRIES, lost_limit=4, lease_s=LEASE_S))

    def pick(self, index: int) -> tuple[str, int]:
        keys = list(self.sim.running)
        return keys[index % len(keys)]

    @rule(slots=st.integers(0, 6))
    def capacity(self, slots: int) -> None:
        self.sim.capacity = slots
        self.sim.send(Capacity(slots=slots))

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 99))
    def finish(self, index: int) -> None:
        self.sim.finish(self.pick(index))

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 99), boundary=st.sampled_from(list(Boundary)), retryable=st.booleans())
    def fail(self, index: int, boundary: Boundary, retryable: bool) -> None:
        self.sim.fail(self.pick(index), boundary, retryable)

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 99))
    def lose(self, index: int) -> None:
        self.sim.lose(self.pick(index))

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 99))
    def give_back(self, index: int) -> None:
        key = self.pick(index)
        self.sim.running.pop(key)
        self.sim.send(Unissued(episode_id=key[0], attempt=key[1]))

    @rule(seconds=st.floats(0.1, LEASE_S * 0.9))
    def wait(self, seconds: float) -> None:
        self.sim.wait(seconds)

    @precondition(lambda self: self.sim.running)
    @rule(index=st.integers(0, 99))
    def lands_unseen(self, index: int) -> None:
        """The worker put the row in place and the farm died before the news of it came."""
        key = self.pick(index)
        if key[0] not in self.sim.rows:
            self.sim.running.pop(key)
            self.sim.rows[key[0]] = "graded"
            self.sim.restart()

    @rule()
    def restart(self) -> None:
        self.sim.restart()

    @invariant()
    def flights_agree(self) -> None:
        assert self.sim.dispatcher.in_flight == len(self.sim.running)

    def teardown(self) -> None:
        self.sim.run_out()
        expected = {e.id for position in range(len(TASKS)) for e in self.sim.plan.group(position)}
        assert set(self.sim.rows) == expected, "lost or invented episodes"


DispatchMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDispatchMachine = DispatchMachine.TestCase


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    slots=st.integers(1, 12),
    staleness=st.integers(0, 2),
    groups_per_step=st.integers(1, 3),
)
def test_endless_plan_keeps_the_lead_and_never_stalls(
    data: st.DataObject, slots: int, staleness: int, groups_per_step: int
) -> None:
    policy = DispatchPolicy(
        retries=RETRIES, lost_limit=4, lease_s=LEASE_S, max_staleness=staleness, groups_per_step=groups_per_step
    )
    sim = Simulation(EndlessPlan(TASKS, spec(group_size=2)), policy)
    sim.capacity = slots
    sim.send(Capacity(slots=slots))
    for _ in range(60):
        sim.now_s += 1.0
        sim.send(Tick())
        choice = data.draw(st.integers(0, 9))
        if sim.running and choice < 7:
            sim.finish(next(iter(sim.running)))
        elif sim.running and choice == 7:
            sim.fail(next(iter(sim.running)), data.draw(st.sampled_from(list(Boundary))))
        elif choice == 8:
            sim.restart()
        else:
            closed = sim.dispatcher.counts().closed_groups
            if closed - sim.consumed >= groups_per_step:
                sim.consumed += groups_per_step
                sim.step += 1
                sim.send(Published(step=sim.step, consumed_groups=sim.consumed))
        counts = sim.dispatcher.counts()
        if not sim.running and counts.waiting == 0:
            # Nothing runs and nothing waits: only a trainer that has a whole step's groups before it may be the cause.
            assert counts.closed_groups - sim.consumed >= groups_per_step


@settings(max_examples=30, deadline=None)
@given(data=st.data(), slots=st.integers(1, 12), retryable=st.booleans(), before=st.integers(0, 6))
def test_a_farm_where_everything_fails_stops_and_its_successor_completes_all(
    data: st.DataObject, slots: int, retryable: bool, before: int
) -> None:
    tasks = [make_task(f"t{i}") for i in range(40)]
    sim = Simulation(FinitePlan(tasks, spec()), DispatchPolicy(retries=RETRIES, lost_limit=4, lease_s=LEASE_S))
    sim.capacity = slots
    sim.send(Capacity(slots=slots))
    for _ in range(before):
        sim.finish(next(iter(sim.running)))
    boundary = data.draw(st.sampled_from(list(Boundary)))
    failed = 0
    while not sim.dispatcher.done:
        sim.now_s += data.draw(st.floats(0.1, 3.0))
        sim.fail(data.draw(st.sampled_from(list(sim.running))), boundary, retryable)
        failed += 1
    assert sim.dispatcher.tripped is not None
    assert failed <= 120
    assert len(sim.rows) == before
    sim.restart()
    sim.run_out()
    assert Counter(sim.rows.values()) == {"graded": 120}


@settings(max_examples=30, deadline=None)
@given(data=st.data(), slots=st.integers(1, 8))
def test_drain_ends_with_what_runs_and_a_restart_completes_the_rest(data: st.DataObject, slots: int) -> None:
    sim = Simulation(FinitePlan(TASKS, spec()), DispatchPolicy(retries=RETRIES, lost_limit=4, lease_s=LEASE_S))
    sim.capacity = slots
    sim.send(Capacity(slots=slots))
    for _ in range(data.draw(st.integers(0, 8))):
        sim.finish(next(iter(sim.running)))
    sim.send(Drain())
    started = sum(sim.issued.values())
    while sim.running:
        key = next(iter(sim.running))
        if data.draw(st.booleans()):
            sim.fail(key, Boundary.ENGINE)
        else:
            sim.finish(key)
    assert sim.dispatcher.done
    assert sum(sim.issued.values()) == started, "nothing starts in a drain"
    sim.restart()
    sim.run_out()
    assert len(sim.rows) == len(TASKS) * 3
