"""PURE: which engine may take which episode, by its KV token budget.

Invariant, after any sequence of calls: the reservations on an engine sum to at most ``floor(budget * overcommit)``,
unless its budget shrank under them (then it takes nothing new until they fit again); a reservation is only ever made on
an engine that is verified to serve a step the episode accepts; releasing gives back exactly what was reserved; and no
episode starves: the first in the queue that has to wait keeps one engine to itself until it fits there (Rules 5 and 6).

An episode reserves its whole context cap on one engine for its whole life. That engine is chosen by affinity (attempts
at the same task share a prompt, so an engine that holds one of the group is preferred), then by least share of its
budget in use.

The queue is first come, first served, except that an episode may go ahead where it delays nobody before it: one that
waits closes the engine it waits for to everybody behind it (reservations there only shrink then, so its turn comes,
since every episode ends: Rule 7), but not the other engines, and one that no verified engine could hold at all closes
none. So a long episode neither starves nor blocks the rest of the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from farm.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacity:
    """What an engine offers. ``step`` is the policy its weights were verified to be; None: no traffic."""

    budget_tokens: int
    context_length: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """An episode that wants an engine: ``key`` is unique among live asks, ``tokens`` its context cap."""

    key: str
    group: str
    tokens: int
    min_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """An episode may run on ``url``, whose verified policy step was ``step`` when granted."""

    key: str
    url: str
    tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class _Held:
    url: str
    tokens: int
    group: str


class Admission:
    """The admission state of one pool. Not thread-safe; deterministic: ties go to the engine added first.

    ``overcommit`` scales every budget: at 1.0 no engine can ever run out of KV; above it, reservations assume that
    episodes seldom reach their caps together, and the engine's own retraction covers the rest.
    """

    def __init__(self, *, overcommit: float = 1.0) -> None:
        if not overcommit > 0:
            raise UsageError(f"overcommit must be above 0, got {overcommit}; 1.0 never exceeds an engine's KV budget")
        self._overcommit = overcommit
        self._engines: dict[str, EngineCapacity] = {}
        self._limits: dict[str, int] = {}  # tokens that may be reserved on each engine
        self._largest: dict[str, int] = {}  # tokens of the largest episode that each can hold
        self._held: dict[str, _Held] = {}
        self._reserved: dict[str, int] = {}
        self._groups: dict[tuple[str, str], int] = {}  # (group, url) -> live episodes
        self._queue: OrderedDict[str, Ask] = OrderedDict()
        self._waits_for: dict[str, str] = {}  # queued episode -> engine it keeps to itself

    # ------------------------------------------------------------------------------------- state

    @property
    def waiting(self) -> int:
        """Episodes in the queue."""
        return len(self._queue)

    @property
    def engines(self) -> Mapping[str, EngineCapacity]:
        return MappingProxyType(self._engines)

    def reserved_tokens(self, url: str) -> int:
        """Tokens reserved on an engine (0 for an unknown one)."""
        return self._reserved.get(url, 0)

    def limit_tokens(self, url: str) -> int:
        """Tokens that may be reserved on an engine: its budget times the overcommit factor."""
        return self._limits.get(url, 0)

    def largest_tokens(self, url: str) -> int:
        """Tokens of the largest episode that an engine holds, were it empty (0 for an unknown one)."""
        return self._largest.get(url, 0)

    def holder(self, key: str) -> str | None:
        """The engine an episode holds a reservation on."""
        held = self._held.get(key)
        return None if held is None else held.url

    # ------------------------------------------------------------------------------------- events

    def set_engine(self, url: str, capacity: EngineCapacity) -> list[Grant]:
        """Add an engine or change what is known of it; returns the episodes that can run now."""
        self._engines[url] = capacity
        limit = self._limits[url] = int(capacity.budget_tokens * self._overcommit)
        self._largest[url] = min(limit, capacity.context_length, capacity.budget_tokens)
        return self._admit()

    def unverify(self, url: str) -> None:
        """No new episodes for this engine. Those that hold a reservation keep it."""
        engine = self._engines.get(url)
        if engine is not None:
            self._engines[url] = replace(engine, step=None)

    def remove_engine(self, url: str) -> list[str]:
        """Forget an engine; returns the keys of the episodes that had reservations on it, now released."""
        if self._engines.pop(url, None) is not None:
            del self._limits[url], self._largest[url]
        lost = [key for key, held in self._held.items() if held.url == url]
        for key in lost:
            self._give_back(key)
        return lost

    def ask(self, ask: Ask) -> list[Grant]:
        """Queue an episode; returns the episodes that can run now (possibly this one).

        Raises UsageError when the episode is bigger than every engine that is known, which waiting would not change,
        and ValueError when its key is already queued or holds a reservation."""
        self._check(ask)
        if self._engines and ask.tokens > max(self._largest.values()):
            url = max(self._engines, key=self._largest.__getitem__)
            raise UsageError(
                f"episode {ask.key} needs {ask.tokens} tokens of context, more than any engine can hold (largest: "
                f"{self._largest[url]} at {url}); lower max_context_tokens or give the engine a larger "
                "context length and max-total-tokens"
            )
        self._queue[ask.key] = ask
        return self._admit()

    def place(self, ask: Ask) -> Grant | None:
        """Like :meth:`ask`, for callers that keep a queue of their own: None when the episode can't run now, and then
        it is not queued either (keeping order is the caller's part). An episode bigger than every engine that is known
        can't run now: engines come and go, and the one that holds it may be on its way back."""
        self._check(ask)
        self._queue[ask.key] = ask
        for grant in self._admit():
            if grant.key == ask.key:
                return grant
        del self._queue[ask.key]
        self._waits_for.pop(ask.key, None)
        return None

    def capacity(self, url: str, tokens: int) -> int:
        """How many episodes of ``tokens`` an engine holds at once, those that run now included; 0 for an unknown
        one."""
        return self._limits[url] // tokens if tokens <= self._largest.get(url, 0) else 0

    def release(self, key: str) -> list[Grant]:
        """An episode ended, or no longer wants an engine; returns the episodes that can run now. Unknown keys are
        ignored."""
        self._queue.pop(key, None)
        self._waits_for.pop(key, None)
        if key in self._held:
            self._give_back(key)
        return self._admit()

    # ------------------------------------------------------------------------------------- inside

    def _check(self, ask: Ask) -> None:
        if ask.key in self._queue or ask.key in self._held:
            raise ValueError(f"episode {ask.key} already asked for an engine")
        if ask.tokens < 1:
            raise UsageError(f"episode {ask.key}: a context cap of {ask.tokens} tokens is below 1")

    def _admit(self) -> list[Grant]:
        grants = []
        closed: set[str] = set()
        for ask in list(self._queue.values()):
            if len(closed) == len(self._engines):
                break
            able = [  # to run it, were they empty
                url
                for url, engine in self._engines.items()
                if engine.step is not None and engine.step >= ask.min_step and ask.tokens <= self._largest[url]
            ]
            if not able:
                continue
            fitting = [url for url in able if url not in closed and self._free_tokens(url) >= ask.tokens]
            if fitting:
                del self._queue[ask.key]
                self._waits_for.pop(ask.key, None)
                grants.append(self._take(ask, min(fitting, key=lambda url: self._preference(ask, url))))
            elif not closed.issuperset(able):
                closed.add(self._awaited(ask, [url for url in able if url not in closed]))
        return grants

    def _free_tokens(self, url: str) -> int:
        return self._limits[url] - self._reserved.get(url, 0)

    def _preference(self, ask: Ask, url: str) -> tuple[bool, float]:
        """Least first."""
        return (ask.group, url) not in self._groups, self._reserved.get(url, 0) / self._limits[url]

    def _awaited(self, ask: Ask, able: list[str]) -> str:
        """The engine that a waiting episode keeps to itself: the same as before while it can, else the freest."""
        url = self._waits_for.get(ask.key)
        if url not in able:
            url = max(able, key=self._free_tokens)
            self._waits_for[ask.key] = url
        return url

    def _take(self, ask: Ask, url: str) -> Grant:
        step = self._engines[url].step
        assert step is not None
        self._held[ask.key] = _Held(url, ask.tokens, ask.group)
        self._reserved[url] = self.reserved_tokens(url) + ask.tokens
        at = (ask.group, url)
        self._groups[at] = self._groups.get(at, 0) + 1
        return Grant(key=ask.key, url=url, tokens=ask.tokens, step=step)

    def _give_back(self, key: str) -> None:
        held = self._held.pop(key)
        self._reserved[held.url] -= held.tokens
        at = (held.group, held.url)
        self._groups[at] -= 1
        if not self._groups[at]:
            del self._groups[at]
