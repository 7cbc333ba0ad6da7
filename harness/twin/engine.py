"""Model of one SGLang engine: continuous batching, KV capacity, prefix reuse, queueing, retraction, weight updates.

Decoding is fluid: every running request gets one token per decode step, and a step takes the time that the roofline (or
a measurement) gives for the batch and its KV. Between two events (a request comes, ends, or the KV is full) the batch
stays the same and its KV grows by one token per request and step, so the time of ``x`` steps is a quadratic in ``x``
and nothing has to be simulated step by step. Prefill goes first and stops decoding meanwhile, as in SGLang without
mixed chunks.

Invariants: running tokens never exceed the capacity (except by the single request that an empty engine must take);
running and kept tokens together never do once an event has been handled; a request that was submitted finishes or is
aborted, once.

The rules are SGLang's (and the embedded engine's): first come, first served; a request is admitted when its tokens and
a share ``new_token_ratio`` of what all may still sample fit; that share starts at 0.7 and decays to 0.098 over 600
steps; when the KV is full, kept prefixes go first, oldest first, then the requests that have sampled least go back to
the queue; a pause sends all back, and a weight update drops everything kept. Simplification: a prefix that is kept,
and not running, counts for each that has it, so it is evicted a little early.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from harness.twin.clock import Alarm, Timeline
from harness.twin.roofline import EngineSpeed

RATIO_START, RATIO_MIN, RATIO_STEPS = 0.7, 0.098, 600
RETRACT_STEPS = 20
CLIP_NEW_TOKENS = 4096
MAX_RUNNING = 1024
_QUEUE_CHECK_STEPS = 50.0  # with requests waiting, admission is looked at again after so many steps
_DUE_STEPS = 1e-6  # rounding of the time must not put off what is due
_FULL_TOKENS = 1e-5
_TINY_S = 1e-9


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """``tokens``: prompt at first, then with what was sampled; ``sample``: how many tokens it will sample unless
    ``max_new_tokens`` cuts it. ``prefix`` names what it continues, ``group`` whose first ``group_tokens`` it shares
    with others."""

    prefix: str
    group: str
    group_tokens: float
    tokens: float
    sample: int
    max_new_tokens: int
    on_done: Callable[[Request], None]
    sampled: float = 0.0
    cut: bool = False
    aborted: bool = False
    cached_tokens: float = 0.0
    retractions: int = 0
    target: int = 0  # how many it will have sampled at its end
    _entry: int = 0  # number of its live entry in the heap of finishes; 0: not running
    _since: float = 0.0  # decode steps done when it was admitted

    def __post_init__(self) -> None:
        self.target = self.sample if self.sample < self.max_new_tokens else self.max_new_tokens

    def again(self, tokens: float, sample: int, max_new_tokens: int) -> None:
        """The same record for the next turn (there are millions). Only once it has been answered."""
        self.tokens, self.sample, self.max_new_tokens = tokens, sample, max_new_tokens
        self.target = sample if sample < max_new_tokens else max_new_tokens
        self.sampled = 0.0


@dataclass(slots=True)
class EngineTotals:
    """Counts and peaks since the start; ``peak_use`` is a share of the capacity. The queue is counted while the engine
    is not paused for an update."""

    retracted: int = 0
    aborted: int = 0
    peak_use: float = 0.0
    peak_queued: int = 0
    busy_s: float = 0.0
    use_s: float = 0.0  # integral of the use over time
    queue_s: float = 0.0  # integral of the queue length


@dataclass(slots=True, eq=False)
class EngineModel:
    """Lives on ``timeline``. ``step`` is the policy it serves. ``shares_prefixes``: a prompt that running requests have
    in common is stored once (the embedded engine copies it)."""

    timeline: Timeline
    speed: EngineSpeed
    capacity_tokens: int
    max_running: int = MAX_RUNNING
    shares_prefixes: bool = True
    step: int = 0
    totals: EngineTotals = field(default_factory=EngineTotals)
    _steps: float = 0.0
    _at_s: float = 0.0  # how far the state has been advanced; ahead of the time while it prefills
    _tokens: float = 0.0  # KV that is stored for running requests
    _shared: float = 0.0  # KV that a step reads beside that: a shared prefix is read once for each request
    _groups: dict[str, int] = field(default_factory=dict)  # running requests of each
    _running: dict[int, Request] = field(default_factory=dict)  # by entry, in order of admission
    _finishes: list[tuple[float, int]] = field(default_factory=list)
    _waiting: deque[Request] = field(default_factory=deque)
    _kept: dict[str, float] = field(default_factory=dict)  # oldest first
    _kept_tokens: float = 0.0
    _entry: int = 0
    _batch: float = 0.0  # how many run; since the last event, like the two that follow
    _first_s: float = 0.0  # what the first step takes
    _more_s: float = 0.0  # how much more each further step takes
    _ratio: float = RATIO_START
    _ratio_at: float = 0.0
    _paused: bool = False
    _is_busy: bool = False
    _capacity: float = field(init=False)  # arithmetic of floats and ints takes twice as long
    _look: Alarm = field(init=False)  # when it has to be looked at again

    def __post_init__(self) -> None:
        self._capacity = float(self.capacity_tokens)
        self._look = self.timeline.alarm(self._settle)

    # ------------------------------------------------------------------------------------- what is asked

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used_tokens(self) -> float:
        """KV tokens of running requests (SGLang's ``token_usage`` times its capacity)."""
        return self._tokens

    @property
    def kept_tokens(self) -> float:
        return self._kept_tokens

    def requests(self) -> list[Request]:
        return [*self._running.values(), *self._waiting]

    def sampled_by(self, request: Request) -> float:
        """Tokens that the request has sampled by now."""
        return request.sampled + (self._steps - request._since if request._entry else 0.0)

    # ------------------------------------------------------------------------------------- what is done to it

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._settle(1)

    def abort(self, request: Request) -> None:
        """The request ends with what it has, without calling ``on_done``."""
        self._settle(change=partial(self._drop, request))

    def pause(self) -> None:
        """All running requests go back to the queue, in their order, and their KV is dropped."""
        self._settle(change=self._send_back)

    def resume(self, step: int | None = None) -> None:
        """Go on; with a ``step``, after its weights were loaded: nothing kept is valid any more."""
        self._settle(change=partial(self._go_on, step))

    def _drop(self, request: Request) -> None:
        if request._entry:
            self._leave(request)
        else:
            self._waiting.remove(request)
        request.aborted = True
        self.totals.aborted += 1

    def _send_back(self) -> None:
        for request in reversed(list(self._running.values())):
            self._leave(request)
            self._waiting.appendleft(request)
        self._paused = True

    def _go_on(self, step: int | None) -> None:
        if step is not None:
            self.step = step
            self._kept.clear()
            self._kept_tokens = 0.0
        self._paused = False

    # ------------------------------------------------------------------------------------- time

    def _settle(self, came: int = 0, change: Callable[[], None] | None = None) -> None:
        """Everything that follows until now, from the present state or what ``change`` makes of it now: decoding,
        finishes, admissions, evictions, the next event. ``came``: of those that wait, who has only come now."""
        timeline, running, finishes, waiting = self.timeline, self._running, self._finishes, self._waiting
        totals, speed, capacity = self.totals, self.speed, self._capacity
        # Decode until now. Never past a finish or a full cache: those are events of their own.
        now_s = timeline.now_s
        gone_s = now_s - self._at_s
        if gone_s > 0.0:
            self._at_s = now_s
            if waiting and not self._paused:
                totals.queue_s += gone_s * (len(waiting) - came)
            if running:
                tokens, first_s, more_s = self._tokens, self._first_s, self._more_s
                if more_s > 0.0:
                    steps = (math.sqrt(first_s * first_s + 2.0 * more_s * gone_s) - first_s) / more_s
                else:
                    steps = gone_s / first_s
                more = self._batch * steps
                self._steps += steps
                self._tokens = tokens + more
                totals.busy_s += gone_s
                totals.use_s += gone_s * (tokens + 0.5 * more) / capacity
        if change is not None:
            change()
        if finishes and finishes[0][0] <= self._steps + _DUE_STEPS:
            self._finish_due()
        if capacity - self._tokens <= _FULL_TOKENS:
            self._make_room()
        if waiting and not self._paused:
            self._admit()
            if len(waiting) > totals.peak_queued:
                totals.peak_queued = len(waiting)
        tokens = self._tokens
        if tokens > totals.peak_use * capacity:
            totals.peak_use = tokens / capacity
        if tokens + self._kept_tokens > capacity:
            self._evict()
        if not running:
            if self._is_busy:
                self._is_busy = False
                self._look.set(math.inf)
                timeline.busy(-1.0)
            return
        if not self._is_busy:
            self._is_busy = True
            timeline.busy(1.0)
        # The next event: somebody finishes, the cache is full, or admission is looked at again.
        while finishes[0][1] not in running:
            heapq.heappop(finishes)
        count = len(running)
        batch = self._batch = float(count)
        token_s = speed.kv_token_s
        first_s = self._first_s = speed.step_s[count] + token_s * (tokens + self._shared)
        more_s = self._more_s = token_s * batch
        steps = finishes[0][0] - self._steps
        room = (capacity - tokens) / batch
        if room < steps:
            steps = room
        if steps > _QUEUE_CHECK_STEPS and waiting:
            steps = _QUEUE_CHECK_STEPS
        if steps < 0.0:
            steps = 0.0
        self._look.set(self._at_s + steps * (first_s + 0.5 * more_s * steps))

    # ------------------------------------------------------------------------------------- requests leave

    def _finish_due(self) -> None:
        if self._at_s > self.timeline.now_s + _TINY_S:
            return  # the last token is still being computed: a prefill goes first
        finishes, running, kept = self._finishes, self._running, self._kept
        due = self._steps + _DUE_STEPS
        while finishes:
            if finishes[0][0] > due:
                return
            request = running.get(heapq.heappop(finishes)[1])
            if request is None:
                continue
            self._leave(request)
            request.sampled = float(request.target)
            request.cut = request.sample > request.max_new_tokens
            tokens, group = request.tokens, request.group
            self._kept_tokens += tokens - kept.pop(request.prefix, 0.0)
            kept[request.prefix] = tokens
            if group not in kept:
                kept[group] = request.group_tokens
                self._kept_tokens += request.group_tokens
            request.on_done(request)

    def _leave(self, request: Request) -> None:
        """Out of the batch, with what it has sampled so far."""
        del self._running[request._entry]
        more = self._steps - request._since
        request._entry = 0
        request.sampled += more
        request.tokens = tokens = request.tokens + more
        if self.shares_prefixes:
            groups, group = self._groups, request.group
            others = groups[group] - 1
            if others:
                groups[group] = others
                self._shared -= request.group_tokens
                tokens -= request.group_tokens
            else:
                del groups[group]
        self._tokens -= tokens
        if not self._running:
            self._tokens = self._shared = 0.0  # no rounding is left behind

    def _evict(self) -> None:
        while self._kept and self._kept_tokens + self._tokens > self.capacity_tokens:
            self._kept_tokens -= self._kept.pop(next(iter(self._kept)))
        if not self._kept:
            self._kept_tokens = 0.0

    def _make_room(self) -> None:
        """Retract when the cache is full: who has sampled least first, the longest of those."""
        while len(self._running) > 1 and self.capacity_tokens - self._tokens < RETRACT_STEPS * len(self._running):
            victim = min(self._running.values(), key=lambda r: (self.sampled_by(r), -r.tokens))
            self._leave(victim)
            victim.retractions += 1
            self.totals.retracted += 1
            self._waiting.appendleft(victim)
            wanted = sum(r.max_new_tokens for r in self._running.values())
            sampled = sum(self.sampled_by(r) for r in self._running.values())
            self._ratio = min(1.0, (sampled + RETRACT_STEPS * len(self._running)) / (wanted + 1))
            self._ratio_at = self._steps
        if len(self._running) == 1 and self.capacity_tokens - self._tokens <= _FULL_TOKENS:
            (last,) = self._running.values()  # alone and still too long: SGLang aborts it
            self._leave(last)
            last.aborted = last.cut = True
            self.totals.aborted += 1
            last.on_done(last)

    # ------------------------------------------------------------------------------------- requests come

    def _admit(self) -> None:
        waiting, running, kept, groups = self._waiting, self._running, self._kept, self._groups
        while waiting and len(running) < self.max_running:
            request = waiting[0]
            tokens, group = request.tokens, request.group
            if self._tokens + tokens + (len(running) + 1) * CLIP_NEW_TOKENS > self.capacity_tokens and not self._fits(
                request
            ):
                return
            waiting.popleft()
            cached = kept.pop(request.prefix, 0.0)
            if cached:
                self._kept_tokens -= cached
            elif group in kept:
                cached = kept[group] = kept.pop(group)
            if cached > tokens - 1.0:
                cached = tokens - 1.0  # the last token is always computed: its logits are needed
            request.cached_tokens = cached
            self._at_s += self.speed.prefill_s(tokens - cached, cached)
            request.sampled += 1.0
            request.tokens = tokens = tokens + 1.0
            if self.shares_prefixes:
                others = groups.get(group, 0)
                groups[group] = others + 1
                if others:
                    self._shared += request.group_tokens
                    tokens -= request.group_tokens
            self._tokens += tokens
            entry = self._entry = request._entry = self._entry + 1
            running[entry] = request
            steps = request._since = self._steps
            left = request.target - request.sampled
            heapq.heappush(self._finishes, (steps + left if left > 0.0 else steps, entry))

    def _fits(self, request: Request) -> bool:
        """Whether it does by SGLang's estimate, when it would not if all took as much as they may."""
        running = self._running
        if not running:
            return True
        ratio = max(RATIO_MIN, self._ratio - (RATIO_START - RATIO_MIN) / RATIO_STEPS * (self._steps - self._ratio_at))
        needed = self._tokens + request.tokens + min(request.max_new_tokens - request.sampled, CLIP_NEW_TOKENS)
        left = sum(min(r.max_new_tokens - self.sampled_by(r), CLIP_NEW_TOKENS) for r in running.values())
        return needed + left * ratio <= self.capacity_tokens
