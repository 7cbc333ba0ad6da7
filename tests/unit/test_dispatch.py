"""farm/dispatch.py by example; the invariant itself is in tests/properties."""

from __future__ import annotations

from dataclasses import replace

from makers import failure, make_task

from farm.dispatch import (
    AttemptFailed,
    AttemptLost,
    Cancel,
    Capacity,
    Command,
    Dispatcher,
    DispatchPolicy,
    EndlessPlan,
    FinitePlan,
    Forget,
    LandDropped,
    Landed,
    LandFailed,
    PlanSpec,
    Published,
    Run,
    Tick,
    Unissued,
)
from farm.types import Boundary, FailedAttempt, Limits, SamplingParams

TASKS = [make_task(f"t{index}") for index in range(4)]
SPEC = PlanSpec(group_size=2, seed=3, purpose="rl", sampling=SamplingParams(), limits=Limits())
POLICY = DispatchPolicy(retries={Boundary.ENGINE: 1}, lost_limit=1, lease_s=100.0, retry_delay_s=1.0)


def runs(commands: list[object]) -> list[tuple[str, int, int]]:
    return [(c.episode.task.instance_id, c.episode.index, c.number) for c in commands if isinstance(c, Run)]


def failed_rows(commands: list[Command]) -> list[tuple[str, int, list[int]]]:
    return [
        (c.episode.id, c.failure.attempt, [f.attempt for f in c.prior]) for c in commands if isinstance(c, LandFailed)
    ]


def start(slots: int, policy: DispatchPolicy = POLICY) -> tuple[Dispatcher, list[Run]]:
    dispatcher = Dispatcher(FinitePlan(TASKS, SPEC), policy)
    dispatcher.handle(Published(step=0, consumed_groups=0), now_s=0.0)
    issued = dispatcher.handle(Capacity(slots=slots), now_s=0.0)
    return dispatcher, [command for command in issued if isinstance(command, Run)]


def test_groups_in_order_with_their_attempts_together() -> None:
    _, issued = start(3)
    assert runs(list(issued)) == [("t0", 0, 1), ("t0", 1, 1), ("t1", 0, 1)]


def test_a_retry_waits_for_its_delay_and_then_goes_before_newer_groups() -> None:
    dispatcher, issued = start(2)
    first, second = issued
    commands = dispatcher.handle(AttemptFailed(episode_id=first.episode.id, failure=failure(1)), now_s=1.0)
    assert runs(list(commands)) == [("t1", 0, 1)]
    assert runs(list(dispatcher.handle(Landed(episode_id=second.episode.id, attempt=1), now_s=2.5))) == [("t0", 0, 2)]


def test_budget_used_up_lands_as_failed_with_what_came_before() -> None:
    dispatcher, (first, second) = start(2)
    dispatcher.handle(AttemptFailed(episode_id=first.episode.id, failure=failure(1)), now_s=0.0)
    dispatcher.handle(Capacity(slots=9), now_s=5.0)
    assert not failed_rows(dispatcher.handle(AttemptFailed(episode_id=first.episode.id, failure=failure(2)), now_s=6.0))
    landed = dispatcher.handle(Landed(episode_id=second.episode.id, attempt=1), now_s=7.0)
    assert failed_rows(landed) == [(first.episode.id, 2, [1])], "others succeed, so it is the episode's own failure"


def test_what_can_not_be_retried_lands_when_nothing_else_is_left_to_try() -> None:
    dispatcher, issued = start(8)
    rows = []
    for run in issued:
        event = AttemptFailed(episode_id=run.episode.id, failure=failure(1), retryable=False)
        assert not rows
        rows = failed_rows(dispatcher.handle(event, now_s=0.0))
    assert {row[0] for row in rows} == {run.episode.id for run in issued}
    assert dispatcher.done


def test_when_everything_fails_the_same_way_it_stops_and_lands_none_of_it() -> None:
    tasks = [make_task(f"t{index}") for index in range(100)]
    plan = FinitePlan(tasks, SPEC)
    dispatcher = Dispatcher(plan, POLICY)
    memory: dict[str, list[FailedAttempt]] = {}
    waiting = [c for c in dispatcher.handle(Capacity(slots=8), now_s=0.0) if isinstance(c, Run)]
    now_s = 0.0
    while waiting:
        run, now_s = waiting.pop(0), now_s + 0.25
        memory.setdefault(run.episode.id, []).append(failure(run.number))
        event = AttemptFailed(episode_id=run.episode.id, failure=failure(run.number))
        commands = dispatcher.handle(event, now_s=now_s)
        assert not failed_rows(commands)
        waiting += [c for c in commands if isinstance(c, Run)]
    assert dispatcher.done
    assert dispatcher.tripped is not None
    assert dispatcher.tripped.attempts == 41, "at 4 a second in the first 10 s; three rounds of 8 were there before"
    assert max(map(len, memory.values())) == 2, "some had used up their budget"

    again = Dispatcher(plan, POLICY, failures=memory, forgiven={(e, f.attempt) for e in memory for f in memory[e]})
    (first, *_) = again.handle(Capacity(slots=2), now_s=100.0)
    assert isinstance(first, Run)
    assert first.number == 3
    again.handle(AttemptFailed(episode_id=first.episode.id, failure=failure(3)), now_s=100.0)
    assert ("t0", 0, 4) in runs(list(again.handle(Capacity(slots=9), now_s=102.0))), "its budget is whole again"


def test_losses_have_a_budget_of_their_own() -> None:
    dispatcher, (first, second) = start(2)
    lost = AttemptLost(episode_id=first.episode.id, attempt=1, worker="w")
    assert runs(list(dispatcher.handle(lost, now_s=0.0))) == [], "its slot is gone, too"
    assert runs(list(dispatcher.handle(Capacity(slots=2), now_s=0.0))) == [("t0", 0, 2)], "it says nothing of the next"
    commands = dispatcher.handle(AttemptFailed(episode_id=first.episode.id, failure=failure(2)), now_s=0.0)
    assert not any(isinstance(c, LandFailed) for c in commands)
    dispatcher.handle(Capacity(slots=9), now_s=5.0)
    again = AttemptLost(episode_id=first.episode.id, attempt=3, worker="w")
    dispatcher.handle(again, now_s=6.0)
    landed = dispatcher.handle(Landed(episode_id=second.episode.id, attempt=1), now_s=7.0)
    assert failed_rows(landed) == [(first.episode.id, 3, [1, 2])]


def test_a_lease_that_runs_out_is_cancelled_and_issued_again_and_the_late_one_may_win() -> None:
    dispatcher, issued = start(8)
    commands = dispatcher.handle(Tick(), now_s=100.0)
    assert {c.number for c in commands if isinstance(c, Cancel)} == {1}
    assert not runs(list(commands)), "the cancelled ones hold their slots until the cluster has ended them"
    dispatcher.handle(Capacity(slots=16), now_s=100.0)
    first = issued[0].episode.id
    late = dispatcher.handle(Landed(episode_id=first, attempt=1), now_s=101.0)
    assert [(c.episode_id, c.number) for c in late if isinstance(c, Cancel)] == [(first, 2)]
    assert dispatcher.handle(Landed(episode_id=first, attempt=2), now_s=102.0) == []
    assert dispatcher.counts().landed == 1


def test_an_end_that_is_never_confirmed_does_not_hold_its_slot_for_ever() -> None:
    dispatcher, (first, second) = start(2)
    dispatcher.handle(Landed(episode_id=second.episode.id, attempt=1), now_s=0.0)
    dispatcher.handle(Capacity(slots=1), now_s=0.0)
    dispatcher.handle(Tick(), now_s=100.0)
    commands = dispatcher.handle(Tick(), now_s=200.0)
    assert Forget(episode_id=first.episode.id, number=1) in commands
    assert dispatcher.in_flight <= 1


def test_what_could_not_be_placed_keeps_its_number_and_budget() -> None:
    dispatcher, (first, _) = start(2)
    dispatcher.handle(Unissued(episode_id=first.episode.id, attempt=1), now_s=0.0)
    assert ("t0", 0, 1) in runs(list(dispatcher.handle(Capacity(slots=8), now_s=1.0)))
    assert dispatcher.counts().retried == 0


def test_what_needs_as_much_room_as_found_none_waits_with_it() -> None:
    small = replace(make_task("small"), own_limits={"max_context_tokens": Limits().max_context_tokens // 2})
    plan = FinitePlan([TASKS[0], small, TASKS[1]], replace(SPEC, group_size=1))
    dispatcher = Dispatcher(plan, replace(POLICY, place_delay_s=1.0))
    (first,) = (c for c in dispatcher.handle(Capacity(slots=1), now_s=0.0) if isinstance(c, Run))
    unissued = Unissued(episode_id=first.episode.id, attempt=1)
    assert runs(list(dispatcher.handle(unissued, now_s=0.0))) == [("small", 0, 1)]
    assert runs(list(dispatcher.handle(Capacity(slots=9), now_s=0.9))) == [], "t1 needs what t0 did not get"
    assert runs(list(dispatcher.handle(Tick(), now_s=1.0))) == [("t0", 0, 1), ("t1", 0, 1)], "the oldest first"


def test_a_plan_without_an_end_is_not_opened_while_nothing_fits() -> None:
    dispatcher = Dispatcher(EndlessPlan(TASKS, SPEC), POLICY)  # nobody consumes: nothing else bounds it
    (first,) = (c for c in dispatcher.handle(Capacity(slots=1), now_s=0.0) if isinstance(c, Run))
    assert runs(list(dispatcher.handle(Unissued(episode_id=first.episode.id, attempt=1), now_s=0.0))) == []
    opened = dispatcher.counts().opened_groups
    assert opened <= 2
    assert runs(list(dispatcher.handle(Tick(), now_s=0.01))) == []
    assert dispatcher.counts().opened_groups == opened + 1, "what fits may come behind what does not"


def test_resume_skips_what_landed_and_completes_partial_groups() -> None:
    plan = FinitePlan(TASKS, SPEC)
    landed = {e.id for e in plan.group(0)} | {plan.group(1)[1].id}
    memory = {plan.group(1)[0].id: [failure(1), failure(2)]}
    dispatcher = Dispatcher(plan, POLICY, landed=landed, failures=memory)
    commands = dispatcher.handle(Capacity(slots=2), now_s=0.0)
    assert runs(list(commands)) == [("t1", 0, 3), ("t2", 0, 1)]
    assert commands[0].prior == tuple(memory[plan.group(1)[0].id])


def test_stale_groups_are_dropped_instead_of_completed() -> None:
    policy = DispatchPolicy(
        retries={Boundary.ENGINE: 9}, lost_limit=1, lease_s=100.0, max_staleness=1, groups_per_step=2
    )
    dispatcher = Dispatcher(EndlessPlan(TASKS, SPEC), policy)
    dispatcher.handle(Published(step=4, consumed_groups=0), now_s=0.0)
    issued = [c for c in dispatcher.handle(Capacity(slots=2), now_s=0.0) if isinstance(c, Run)]
    dispatcher.handle(AttemptFailed(episode_id=issued[0].episode.id, failure=failure(1)), now_s=0.0)
    assert not any(
        isinstance(c, LandDropped) for c in dispatcher.handle(Published(step=5, consumed_groups=0), now_s=0.1)
    )
    commands = dispatcher.handle(Published(step=6, consumed_groups=0), now_s=0.2)
    drops = [c for c in commands if isinstance(c, LandDropped)]
    assert len(drops) == 2, "the one to retry, and the one of the next group that had not started"
    drop = drops[0]
    assert drop.episode.id == issued[0].episode.id
    assert "opened at policy step 4, now 6" in drop.reason


def test_the_lead_over_the_trainer() -> None:
    policy = DispatchPolicy(retries={}, lost_limit=1, lease_s=100.0, max_staleness=1, groups_per_step=2)
    dispatcher = Dispatcher(EndlessPlan(TASKS, SPEC), policy)
    dispatcher.handle(Published(step=0, consumed_groups=0), now_s=0.0)
    assert dispatcher.demand == 8
    assert len(runs(list(dispatcher.handle(Capacity(slots=100), now_s=0.0)))) == 4 * 2
    commands = dispatcher.handle(Published(step=1, consumed_groups=2), now_s=0.0)
    assert len(runs(list(commands))) == 2 * 2


def test_plans_are_deterministic_and_epochs_are_shuffled() -> None:
    plan, again = EndlessPlan(TASKS, SPEC), EndlessPlan(TASKS, SPEC)
    order = [plan.group(position)[0].task.instance_id for position in range(12)]
    assert [again.group(position) for position in reversed(range(12))] == [
        plan.group(position) for position in reversed(range(12))
    ]
    epochs = [order[0:4], order[4:8], order[8:12]]
    assert all(sorted(epoch) == ["t0", "t1", "t2", "t3"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    ids = [episode.id for position in range(12) for episode in plan.group(position)]
    assert len(set(ids)) == 24


def test_every_episode_samples_with_a_seed_of_its_own_the_same_in_every_run() -> None:
    seeds = [[e.sampling.seed for e in FinitePlan(TASKS, SPEC).group(position)] for position in range(len(TASKS))]
    assert seeds == [[e.seed for e in FinitePlan(TASKS, SPEC).group(position)] for position in range(len(TASKS))]
    assert len({seed for group in seeds for seed in group}) == len(TASKS) * SPEC.group_size
