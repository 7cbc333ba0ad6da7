"""What runs next: events in, commands out. PURE: no clock, no I/O, no randomness.

The invariant (Rule 1), asserted by property tests over any interleaving:

* Every episode of an opened group is in exactly one place: *waiting*, *leased* (one current attempt), or *closed*.
  It leaves *closed* never, and it is closed exactly when the log has its one row: landed by a worker, or landed here
  as failed (retries exhausted) or as dropped (stale). So nothing is lost and nothing is issued after it landed.
* Attempt numbers of an episode only grow; an older attempt whose lease ran out may still land first, and then wins.
* Attempts in flight, those being cancelled included, never exceed the capacity given when the last one was issued.
* Groups are opened in plan order, and ``opened - consumed <= (max_staleness + 1) * groups_per_step`` where a trainer
  consumes (Rule: the farm's lead over the trainer is bounded).
* An attempt that found no engine waits, and so does what needs as much room or more, together and for at most
  ``place_delay_s``: room depends on an episode's cap alone. Smaller ones pass; afterwards the oldest come first.
* A finite plan ends once failures stop: every retry is counted, by the boundary that failed or as lost, and bounded.
* An episode lands as failed only after some attempt has succeeded since, or when nothing else is left to try: until
  then its fault may be everybody's. When the breaker trips (:mod:`farm.breaker`) nothing more is issued and nothing
  more lands as failed.

A worker that was lost says nothing about the episode, so a loss is not counted against the budget of a boundary but in
its own, larger one. Failed attempts are remembered and land with the episode.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from farm.breaker import Breaker, Trip
from farm.types import (
    Boundary,
    Episode,
    FailedAttempt,
    Limits,
    SamplingParams,
    Task,
    content_digest,
)

WORKER_GONE_KINDS = frozenset({"worker_lost", "preempted"})
LOST_KINDS = WORKER_GONE_KINDS | {"lease_expired", "cancelled"}

_UNBOUNDED = 1 << 30

# ----------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """How groups are made. ``seed`` fixes ids, episode seeds and the shuffle of each epoch."""

    group_size: int
    seed: int
    purpose: str
    sampling: SamplingParams
    limits: Limits


class Plan(Protocol):
    """Random access to groups by position, so that a restarted farm makes the same groups again."""

    @property
    def length(self) -> int | None:
        """Number of groups; None when endless."""
        ...

    def group(self, position: int) -> tuple[Episode, ...]: ...


def _make_group(task: Task, spec: PlanSpec, epoch: int, position: int) -> tuple[Episode, ...]:
    group_id = content_digest([spec.purpose, spec.seed, epoch, position, task.instance_id])
    return tuple(_make_episode(task, spec, group_id, index) for index in range(spec.group_size))


def _make_episode(task: Task, spec: PlanSpec, group_id: str, index: int) -> Episode:
    """Samples with its own seed: what differs between two runs of the same episodes is what was changed, not luck."""
    seed = int(content_digest([group_id, index])[:8], 16) & 0x7FFF_FFFF
    return Episode(
        task=task,
        group_id=group_id,
        index=index,
        group_size=spec.group_size,
        seed=seed,
        sampling=replace(spec.sampling, seed=seed),
        limits=task.limits(spec.limits),
        purpose=spec.purpose,
    )


class FinitePlan:
    """Each task once, in the order given (evaluation)."""

    def __init__(self, tasks: Sequence[Task], spec: PlanSpec) -> None:
        self._tasks = tuple(tasks)
        self._spec = spec

    @property
    def length(self) -> int | None:
        return len(self._tasks)

    def group(self, position: int) -> tuple[Episode, ...]:
        return _make_group(self._tasks[position], self._spec, 0, position)


class EndlessPlan:
    """All tasks once per epoch, each epoch in its own seeded order (training)."""

    def __init__(self, tasks: Sequence[Task], spec: PlanSpec) -> None:
        if not tasks:
            raise ValueError("an endless plan needs at least one task")
        self._tasks = tuple(tasks)
        self._spec = spec
        self._order: tuple[int, tuple[int, ...]] = (-1, ())

    @property
    def length(self) -> int | None:
        return None

    def group(self, position: int) -> tuple[Episode, ...]:
        epoch, place = divmod(position, len(self._tasks))
        if self._order[0] != epoch:
            self._order = (epoch, self._shuffled(epoch))
        return _make_group(self._tasks[self._order[1][place]], self._spec, epoch, place)

    def _shuffled(self, epoch: int) -> tuple[int, ...]:
        def rank(index: int) -> bytes:
            return hashlib.sha256(f"{self._spec.seed}/{epoch}/{index}".encode()).digest()

        return tuple(sorted(range(len(self._tasks)), key=rank))


# --------------------------------------------------------------------------------------------- policy


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPolicy:
    """``retries``: how many failures at a boundary an episode survives. ``lost_limit``: the same for attempts that were
    lost with their worker or lease. ``lease_s`` must be longer than the episode's own wall limit. ``place_delay_s``:
    the longest that one refusal holds back an attempt, and all that need as much room or more.
    ``groups_per_step`` None: nobody consumes, so no staleness bound (evaluation)."""

    retries: Mapping[Boundary, int]
    lost_limit: int
    lease_s: float
    retry_delay_s: float = 0.5
    retry_delay_max_s: float = 15.0
    place_delay_s: float = 0.1
    max_staleness: int = 0
    groups_per_step: int | None = None

    @property
    def lead(self) -> int | None:
        """How many groups may be opened beyond those consumed."""
        return None if self.groups_per_step is None else (self.max_staleness + 1) * self.groups_per_step


# --------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many attempts may be in flight from now on (running ones are never cut, Rule 8)."""

    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """The log has the episode's row; ``attempt`` is the one that ended (it may have come second)."""

    episode_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """An attempt ended in an infrastructure failure."""

    episode_id: str
    failure: FailedAttempt
    retryable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLost:
    """An attempt ended without an answer: its worker died, or it was cancelled."""

    episode_id: str
    attempt: int
    worker: str
    kind: str = "worker_lost"  # one of LOST_KINDS
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unissued:
    """The driver could not place the attempt now (no engine had room): the lease is given back, nothing is counted."""

    episode_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A policy version is out; ``consumed_groups`` groups have been used up by the trainer."""

    step: int
    consumed_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Start nothing more; what runs may finish."""


DispatchEvent = Capacity | Landed | AttemptFailed | AttemptLost | Unissued | Published | Tick | Drain

# ------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Issue attempt ``number``; ``queued_at_s`` is when the episode became runnable."""

    episode: Episode
    number: int
    prior: tuple[FailedAttempt, ...]
    queued_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop an attempt that no longer matters; its end is still reported by an event."""

    episode_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LandFailed:
    """Append the episode's row with a ``Failed`` outcome: its retries are used up."""

    episode: Episode
    failure: FailedAttempt
    prior: tuple[FailedAttempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LandDropped:
    """Append the episode's row with a ``Dropped`` outcome."""

    episode: Episode
    reason: str
    prior: tuple[FailedAttempt, ...]
    next_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The cluster never confirmed the end of a cancelled attempt: free what is held for it."""

    episode_id: str
    number: int


Command = Run | Cancel | Forget | LandFailed | LandDropped

# --------------------------------------------------------------------------------------------- state


@dataclass(slots=True)
class _Group:
    position: int
    open_episodes: int
    born_step: int | None = None  # policy step when its first attempt was issued


@dataclass(slots=True)
class _Live:
    """An opened episode that is not closed. ``id`` is the episode's."""

    id: str
    episode: Episode
    group: _Group
    queued_at_s: float
    next_number: int = 1
    leased: int | None = None  # number of the current attempt; None: waiting
    held: bool = False  # retries used up; lands as failed once that can be told from a failure of everything
    prior: list[FailedAttempt] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    """An attempt the cluster has not reported as ended."""

    deadline_s: float
    started_at_s: float
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """For people: what the dispatcher holds."""

    opened_groups: int
    closed_groups: int
    waiting: int
    in_flight: int
    landed: int
    failed: int
    dropped: int
    retried: int
    lost: int


def _lost_attempt(event: AttemptLost, *, started_at_s: float, now_s: float) -> FailedAttempt:
    return FailedAttempt(
        attempt=event.attempt,
        boundary=Boundary.FARM,
        kind=event.kind,
        message=event.message,
        worker=event.worker,
        started_at_s=started_at_s,
        ended_at_s=now_s,
    )


class Dispatcher:
    """See the invariant above. ``landed`` is the ledger: ids that have a row; ``failures`` are remembered attempts of
    episodes that have none yet (from the farm's earlier life), of which the ``forgiven`` ones (episode id, attempt) use
    up no budget: the breaker had tripped on them."""

    def __init__(
        self,
        plan: Plan,
        policy: DispatchPolicy,
        *,
        landed: Collection[str] = (),
        failures: Mapping[str, Sequence[FailedAttempt]] | None = None,
        forgiven: Collection[tuple[str, int]] = (),
    ) -> None:
        self._plan = plan
        self._policy = policy
        self._ledger = frozenset(landed)
        self._remembered = dict(failures or {})
        self._forgiven = frozenset(forgiven)
        self._breaker = Breaker()
        self._tripped: Trip | None = None
        self._held: list[_Live] = []
        self._position = 0
        self._closed_groups = 0
        self._capacity = 0
        self._gone = 0  # slots that went with workers since the capacity was told
        self._no_room_tokens = 0  # a context cap for which no engine had room
        self._no_room_until_s = -math.inf  # nothing of that cap or a larger one is issued before
        self._step: int | None = None
        self._consumed = 0
        self._draining = False
        self._live: dict[str, _Live] = {}
        self._flights: dict[tuple[str, int], _Flight] = {}
        self._ready: list[tuple[int, int, str]] = []  # heap of (position, index, episode id): oldest group first
        self._delayed: list[tuple[float, int, int, str]] = []  # heap of (not before, position, index, id)
        self._tally: Counter[str] = Counter()
        self._skip_landed_groups()

    # -- questions ------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Nothing is in flight and nothing will be: a finite plan is through, or a drain has ended."""
        if self._flights:
            return False
        return self._draining or (self._exhausted and not self._live)

    @property
    def tripped(self) -> Trip | None:
        """Why the breaker stopped everything, if it did; the dispatcher then drains."""
        return self._tripped

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def demand(self) -> int:
        """Episodes that could be running now if slots were unlimited."""
        if self._draining:
            return len(self._flights)
        room = self._openable()
        per_group = len(self._plan.group(self._position)) if room else 0
        return len(self._live) + (room or 0) * per_group

    def counts(self) -> Counts:
        waiting = sum(1 for live in self._live.values() if live.leased is None)
        return Counts(
            opened_groups=self._position,
            closed_groups=self._closed_groups,
            waiting=waiting,
            in_flight=len(self._flights),
            landed=self._tally["landed"],
            failed=self._tally["failed"],
            dropped=self._tally["dropped"],
            retried=self._tally["retried"],
            lost=self._tally["lost"],
        )

    # -- events ---------------------------------------------------------------------------------------

    def handle(self, event: DispatchEvent, *, now_s: float) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Capacity():
                self._capacity = max(0, event.slots)
                self._gone = 0
            case Landed():
                self._flights.pop((event.episode_id, event.attempt), None)
                self._close(event.episode_id, "landed", now_s, commands)
                self._breaker.succeeded()
                self._land_held(now_s, commands)
            case AttemptFailed():
                self._flights.pop((event.episode_id, event.failure.attempt), None)
                self._fail(event.episode_id, event.failure, event.retryable, now_s, commands)
            case AttemptLost():
                flight = self._flights.pop((event.episode_id, event.attempt), None)
                failure = _lost_attempt(event, started_at_s=flight.started_at_s if flight else now_s, now_s=now_s)
                if event.kind in WORKER_GONE_KINDS:
                    self._gone += 1  # until slots are counted again; what is issued and waits for one ages meanwhile
                self._fail(event.episode_id, failure, True, now_s, commands)
            case Unissued():
                self._on_unissued(event, now_s)
            case Published():
                self._step = event.step if self._step is None else max(self._step, event.step)
                self._consumed = max(self._consumed, event.consumed_groups)
                self._drop_stale(now_s, commands)
            case Drain():
                self._draining = True
            case Tick():
                self._expire(now_s, commands)
        self._issue(now_s, commands)
        if self._held and not self._draining and self._nothing_else_left:
            self._land_held(now_s, commands)
            self._issue(now_s, commands)
        return commands

    # -- transitions ----------------------------------------------------------------------------------

    def _fail(
        self, episode_id: str, failure: FailedAttempt, retryable: bool, now_s: float, commands: list[Command]
    ) -> None:
        live = self._live.get(episode_id)
        if live is None or live.leased != failure.attempt:
            return  # closed, or an attempt that was given up before it answered
        live.leased = None
        live.prior.append(failure)
        lost = failure.kind in LOST_KINDS and failure.boundary is Boundary.FARM
        counted = [f for f in live.prior if (episode_id, f.attempt) not in self._forgiven]
        same = [f for f in counted if (f.kind in LOST_KINDS) == lost and (lost or f.boundary is failure.boundary)]
        allowed = self._policy.lost_limit if lost else self._policy.retries.get(failure.boundary, 0)
        self._tally["lost" if lost else "retried"] += 1
        if self._tripped is None and not self._draining:
            self._tripped = self._breaker.failed(failure, slots=self._capacity, now_s=now_s)
            self._draining = self._tripped is not None
        if not retryable or len(same) > allowed:
            live.held = True
            self._held.append(live)
        elif self._is_stale(live.group):
            self._drop(live, now_s, commands)
        else:
            # A lost worker says nothing about the next one, so it is tried at once; a boundary that failed gets time.
            exponent = min(len(same) - 1, 16)
            delay = 0.0 if lost else min(self._policy.retry_delay_s * 2.0**exponent, self._policy.retry_delay_max_s)
            self._wait(live, now_s, not_before_s=now_s + delay)

    def _land_held(self, now_s: float, commands: list[Command]) -> None:
        """Others succeed, or nothing is left to try: then these have failed by themselves."""
        if self._tripped is not None:
            return
        for live in self._held:
            if live.id in self._live:  # else an older attempt has landed meanwhile
                *prior, failure = live.prior
                commands.append(LandFailed(episode=live.episode, failure=failure, prior=tuple(prior)))
                self._close(live.id, "failed", now_s, commands)
        self._held.clear()

    @property
    def _nothing_else_left(self) -> bool:
        return not self._openable() and all(live.held for live in self._live.values())

    def _on_unissued(self, event: Unissued, now_s: float) -> None:
        self._flights.pop((event.episode_id, event.attempt), None)
        live = self._live.get(event.episode_id)
        if live is not None and live.leased == event.attempt:
            live.leased = None
            live.next_number = event.attempt  # it never started, so its number is free
            tokens = live.episode.limits.max_context_tokens
            if now_s >= self._no_room_until_s:
                self._no_room_until_s = now_s + self._policy.place_delay_s
                self._no_room_tokens = tokens
            self._no_room_tokens = min(self._no_room_tokens, tokens)
            self._delay(live, self._no_room_until_s)

    def _expire(self, now_s: float, commands: list[Command]) -> None:
        for (episode_id, number), flight in list(self._flights.items()):
            if now_s < flight.deadline_s:
                continue
            if flight.cancelled:
                # The cluster has not confirmed the end for a whole further lease: do not lose the slot for ever.
                del self._flights[episode_id, number]
                commands.append(Forget(episode_id=episode_id, number=number))
                continue
            # Cancelled, but still in flight: it holds its slot until the cluster says that it has ended.
            self._cancel(episode_id, number, flight, now_s, commands)
            expired = AttemptLost(
                episode_id=episode_id,
                attempt=number,
                worker="",
                kind="lease_expired",
                message=f"no result within {self._policy.lease_s:g} s",
            )
            failure = _lost_attempt(expired, started_at_s=flight.started_at_s, now_s=now_s)
            self._fail(episode_id, failure, True, now_s, commands)

    def _cancel(self, episode_id: str, number: int, flight: _Flight, now_s: float, commands: list[Command]) -> None:
        flight.cancelled = True
        flight.deadline_s = now_s + self._policy.lease_s
        commands.append(Cancel(episode_id=episode_id, number=number))

    def _close(self, episode_id: str, how: str, now_s: float, commands: list[Command]) -> None:
        live = self._live.pop(episode_id, None)
        if live is None:
            return
        self._tally[how] += 1
        self._remembered.pop(episode_id, None)
        live.group.open_episodes -= 1
        if live.group.open_episodes == 0:
            self._closed_groups += 1
        for number in range(1, live.next_number):
            flight = self._flights.get((episode_id, number))
            if flight is not None and not flight.cancelled:
                self._cancel(episode_id, number, flight, now_s, commands)

    def _drop_stale(self, now_s: float, commands: list[Command]) -> None:
        for live in list(self._live.values()):
            if live.leased is None and not live.held and self._is_stale(live.group):
                self._drop(live, now_s, commands)

    def _drop(self, live: _Live, now_s: float, commands: list[Command]) -> None:
        reason = (
            f"stale: group opened at policy step {live.group.born_step}, now {self._step}, "
            f"max_staleness {self._policy.max_staleness}"
        )
        command = LandDropped(
            episode=live.episode, reason=reason, prior=tuple(live.prior), next_number=live.next_number
        )
        commands.append(command)
        self._close(live.id, "dropped", now_s, commands)

    def _is_stale(self, group: _Group) -> bool:
        """No step within the bound can train on the group any more, so completing it is wasted work."""
        if self._policy.groups_per_step is None or group.born_step is None or self._step is None:
            return False
        return self._step - group.born_step > self._policy.max_staleness

    # -- issuing --------------------------------------------------------------------------------------

    def _issue(self, now_s: float, commands: list[Command]) -> None:
        if self._draining:
            return
        while self._delayed and self._delayed[0][0] <= now_s:
            _, position, index, episode_id = heapq.heappop(self._delayed)
            heapq.heappush(self._ready, (position, index, episode_id))
        newest_waits = False
        while len(self._flights) < self._capacity - self._gone:
            live = self._pop_ready()
            if live is None:
                if newest_waits or not self._openable():
                    return  # one group at a time: a plan without an end may have nothing that fits
                self._open_next(now_s)
                continue
            if now_s < self._no_room_until_s and live.episode.limits.max_context_tokens >= self._no_room_tokens:
                self._delay(live, self._no_room_until_s)
                newest_waits = newest_waits or live.group.position == self._position - 1
                continue
            number = live.next_number
            live.next_number += 1
            live.leased = number
            if live.group.born_step is None:
                live.group.born_step = self._step
            self._flights[live.id, number] = _Flight(deadline_s=now_s + self._policy.lease_s, started_at_s=now_s)
            commands.append(
                Run(episode=live.episode, number=number, prior=tuple(live.prior), queued_at_s=live.queued_at_s)
            )

    def _pop_ready(self) -> _Live | None:
        while self._ready:
            live = self._live.get(heapq.heappop(self._ready)[2])
            if live is not None and live.leased is None:
                return live
        return None

    def _openable(self) -> int:
        """How many more groups may be opened now."""
        left = math.inf if self._plan.length is None else self._plan.length - self._position
        if self._policy.lead is not None:
            left = min(left, self._consumed + self._policy.lead - self._position)
        elif self._plan.length is None:
            left = _UNBOUNDED  # endless, and nobody consumes
        return max(0, int(left))

    def _open_next(self, now_s: float) -> None:
        episodes = [e for e in self._plan.group(self._position) if e.id not in self._ledger]
        group = _Group(position=self._position, open_episodes=len(episodes))
        self._position += 1
        if not episodes:
            self._closed_groups += 1
        for episode in episodes:
            episode_id = episode.id
            prior = list(self._remembered.get(episode_id, ()))
            live = _Live(id=episode_id, episode=episode, group=group, queued_at_s=now_s, prior=prior)
            live.next_number = 1 + max((f.attempt for f in prior), default=0)
            self._live[episode_id] = live
            heapq.heappush(self._ready, (group.position, episode.index, episode_id))

    def _skip_landed_groups(self) -> None:
        """Pass over the leading groups that are complete in the ledger, without holding them."""
        while self._ledger and not self._exhausted:
            if any(e.id not in self._ledger for e in self._plan.group(self._position)):
                return
            self._position += 1
            self._closed_groups += 1

    def _wait(self, live: _Live, now_s: float, *, not_before_s: float) -> None:
        live.queued_at_s = now_s
        if not_before_s <= now_s:
            heapq.heappush(self._ready, (live.group.position, live.episode.index, live.id))
        else:
            self._delay(live, not_before_s)

    def _delay(self, live: _Live, not_before_s: float) -> None:
        heapq.heappush(self._delayed, (not_before_s, live.group.position, live.episode.index, live.id))

    @property
    def _exhausted(self) -> bool:
        return self._plan.length is not None and self._position >= self._plan.length
