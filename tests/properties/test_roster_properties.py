"""farm/cluster/roster.py over any order of starts, joins, drains, requeues and deaths."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.cluster.launcher import Phase, WorkerState
from farm.cluster.roster import Roster, RosterRules, Seen, Steps, next_steps

RULES = RosterRules(join_s=10.0, proven_s=20.0, delay_s=1.0, delay_max_s=8.0)


@dataclass
class World:
    """Workers, a scheduler that drains as farm/cluster/on_scheduler.py does, and the roster."""

    roster: Roster = field(default_factory=Roster)
    now_s: float = 0.0
    want: int = 1
    states: dict[str, WorkerState] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)

    def change(self, name: str, phase: Phase, code: int | None = None) -> None:
        self.states[name] = WorkerState(phase=phase, code=code)

    def leave(self, name: str) -> None:
        self.live.discard(name)
        self.draining.discard(name)

    def plan(self) -> None:
        for name in sorted(self.draining)[: max(0, self.want - len(self.live))]:
            self.draining.discard(name)
            self.live.add(name)
        for name in sorted(self.live)[: max(0, len(self.live) - self.want)]:
            self.live.discard(name)
            self.draining.add(name)

    def step(self) -> Steps:
        """One look of the farm, with the invariants."""
        self.plan()
        joined = self.live | self.draining
        seen = Seen(
            want=self.want, live=frozenset(self.live), draining=frozenset(self.draining), states=dict(self.states)
        )
        self.roster, steps = next_steps(self.roster, seen, RULES, now_s=self.now_s)
        for name in steps.stop:
            ended = self.states[name].phase is Phase.ENDED
            assert ended or name not in joined, "a worker that has joined was stopped"
            del self.states[name]
            self.leave(name)
        for name in steps.withdraw:
            assert self.states.pop(name).phase is Phase.WAITING
        assert not set(steps.start) & (self.states.keys() | joined), "a name was used twice"
        for name in steps.start:
            self.change(name, Phase.WAITING)
        coming = [n for n, s in self.states.items() if s.phase is not Phase.ENDED and n not in joined]
        if steps.start:
            assert len(self.live) + len(coming) <= self.want, "more were asked for than are wanted"
        return steps


def act(world: World, action: str, pick: int) -> None:
    def one(names: list[str]) -> str | None:
        return sorted(names)[pick % len(names)] if names else None

    by_phase = {phase: [n for n, s in world.states.items() if s.phase is phase] for phase in Phase}
    match action:
        case "begin" if name := one(by_phase[Phase.WAITING]):
            world.change(name, Phase.RUNNING)
        case "join" if name := one([n for n in by_phase[Phase.RUNNING] if n not in world.live | world.draining]):
            world.live.add(name)
        case "die" if name := one(by_phase[Phase.RUNNING]):
            world.change(name, Phase.ENDED, code=1)
        case "die first, leave later" if name := one(by_phase[Phase.RUNNING]):
            world.change(name, Phase.ENDED, code=137)
            return  # the scheduler has not noticed
        case "cut off" if name := one(sorted(world.live)):
            world.leave(name)
        case "requeue" if name := one(by_phase[Phase.RUNNING]):
            world.leave(name)
            world.change(name, Phase.WAITING)
        case "empty" if name := one(sorted(world.draining)):
            world.leave(name)
            if name in world.states:
                world.change(name, Phase.ENDED, code=0)
        case "want":
            world.want = 1 + pick % 6
        case "time":
            world.now_s += pick
    for name, state in world.states.items():
        if state.phase is Phase.ENDED:
            world.leave(name)


ACTIONS = ("begin", "join", "die", "die first, leave later", "cut off", "requeue", "empty", "want", "time")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=80))
def test_no_order_of_events_stops_a_joined_worker_or_asks_for_too_many(events: list[tuple[str, int]]) -> None:
    world = World()
    for action, pick in events:
        act(world, action, pick)
        world.step()
    # Once hosts behave, the farm gets exactly what it wants.
    for _ in range(40):
        world.now_s += 10.0
        for name in list(world.draining):
            world.leave(name)
            if name in world.states:
                world.change(name, Phase.ENDED, code=0)
        for name, state in list(world.states.items()):
            if state.phase is not Phase.ENDED:
                world.change(name, Phase.RUNNING)
                world.live.add(name)
        world.step()
    assert len(world.live) == world.want


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60))
def test_hosts_that_refuse_are_asked_ever_more_seldom_while_others_work(pauses: list[float]) -> None:
    world, asked_at = World(want=4), []
    world.live.add("of old")
    for pause in pauses:
        world.now_s += pause
        for name in list(world.states):
            world.change(name, Phase.ENDED, code=2)
        if world.step().start:
            asked_at.append(world.now_s)
    for failures, (before, after) in enumerate(pairwise(asked_at)):
        assert after - before >= min(RULES.delay_s * 2.0**failures, RULES.delay_max_s)


def test_a_worker_that_had_proved_itself_is_replaced_at_once() -> None:
    world = World()
    (name,) = world.step().start
    world.change(name, Phase.RUNNING)
    world.live.add(name)
    world.step()
    world.now_s += RULES.proven_s
    world.step()
    world.change(name, Phase.ENDED, code=255)
    world.leave(name)
    steps = world.step()
    assert [lost for lost, _ in steps.failed] == [name]
    assert len(steps.start) == 1
