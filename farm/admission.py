"""PURE: which engine may take which episode, by its KV token budget.

Invariant, after any sequence of calls: for every engine, the reservations it holds sum to at most
``floor(budget * overcommit)`` unless its budget shrank under them (then it takes nothing new until they fit again), and
no more than ``max_episodes`` are reserved on it; a reservation is only ever made on an engine that is verified;
releasing gives back exactly what was reserved; and waiting episodes are admitted strictly in the order they came (Rules
5 and 6).

An episode reserves its whole context cap on one engine for its whole life. That engine is chosen by affinity (attempts
at the same task share a prompt, so the engine that holds one of the group is preferred), then by least share of its
budget in use. The queue is first come, first served *across* engines: while the episode at its head fits nowhere,
nobody behind it is admitted, so a long one can't starve, and since every running episode ends (Rule 7), room for it
comes.
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
    max_episodes: int | None = None  # None: only tokens count


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
        self._held: dict[str, _Held] = {}
        self._reserved: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._groups: dict[tuple[str, str], int] = {}  # (group, url) -> live episodes
        self._queue: OrderedDict[str, Ask] = OrderedDict()

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
        engine = self._engines.get(url)
        return 0 if engine is None else int(engine.budget_tokens * self._overcommit)

    def holder(self, key: str) -> str | None:
        """The engine an episode holds a reservation on."""
        held = self._held.get(key)
        return None if held is None else held.url

    # ------------------------------------------------------------------------------------- events

    def set_engine(self, url: str, capacity: EngineCapacity) -> list[Grant]:
        """Add an engine or change what is known of it; returns the episodes that can run now."""
        self._engines[url] = capacity
        return self._admit()

    def unverify(self, url: str) -> None:
        """No new episodes for this engine. Those that hold a reservation keep it."""
        engine = self._engines.get(url)
        if engine is not None:
            self._engines[url] = replace(engine, step=None)

    def remove_engine(self, url: str) -> list[str]:
        """Forget an engine; returns the keys of the episodes that had reservations on it, now released."""
        self._engines.pop(url, None)
        lost = [key for key, held in self._held.items() if held.url == url]
        for key in lost:
            self._give_back(key)
        return lost

    def ask(self, ask: Ask) -> list[Grant]:
        """Queue an episode; returns the episodes that can run now (possibly this one).

        Raises UsageError when the episode is bigger than every engine that is known, which waiting would not change,
        and ValueError when its key is already queued or holds a reservation."""
        if ask.key in self._queue or ask.key in self._held:
            raise ValueError(f"episode {ask.key} already asked for an engine")
        if ask.tokens < 1:
            raise UsageError(f"episode {ask.key}: a context cap of {ask.tokens} tokens is below 1")
        if self._engines and not any(self._could_hold(url, ask.tokens) for url in self._engines):
            url = max(self._engines, key=self._largest_episode)
            raise UsageError(
                f"episode {ask.key} needs {ask.tokens} tokens of context, more than any engine can hold (largest: "
                f"{self._largest_episode(url)} at {url}); lower max_context_tokens or give the engine a larger "
                "context length and max-total-tokens"
            )
        self._queue[ask.key] = ask
        return self._admit()

    def release(self, key: str) -> list[Grant]:
        """An episode ended, or no longer wants an engine; returns the episodes that can run now. Unknown keys are
        ignored."""
        self._queue.pop(key, None)
        if key in self._held:
            self._give_back(key)
        return self._admit()

    # ------------------------------------------------------------------------------------- inside

    def _largest_episode(self, url: str) -> int:
        return min(self.limit_tokens(url), self._engines[url].context_length, self._engines[url].budget_tokens)

    def _could_hold(self, url: str, tokens: int) -> bool:
        return tokens <= self._largest_episode(url)

    def _admit(self) -> list[Grant]:
        grants = []
        while self._queue:
            ask = next(iter(self._queue.values()))
            url = self._choose(ask)
            if url is None:
                break
            del self._queue[ask.key]
            grants.append(self._take(ask, url))
        return grants

    def _choose(self, ask: Ask) -> str | None:
        fitting = [url for url in self._engines if self._fits(ask, url)]
        if not fitting:
            return None
        return min(
            fitting,
            key=lambda url: ((ask.group, url) not in self._groups, self.reserved_tokens(url) / self.limit_tokens(url)),
        )

    def _fits(self, ask: Ask, url: str) -> bool:
        engine = self._engines[url]
        if engine.step is None or engine.step < ask.min_step or not self._could_hold(url, ask.tokens):
            return False
        if engine.max_episodes is not None and self._counts.get(url, 0) >= engine.max_episodes:
            return False
        return self.reserved_tokens(url) + ask.tokens <= self.limit_tokens(url)

    def _take(self, ask: Ask, url: str) -> Grant:
        step = self._engines[url].step
        assert step is not None
        self._held[ask.key] = _Held(url, ask.tokens, ask.group)
        self._reserved[url] = self.reserved_tokens(url) + ask.tokens
        self._counts[url] = self._counts.get(url, 0) + 1
        at = (ask.group, url)
        self._groups[at] = self._groups.get(at, 0) + 1
        return Grant(key=ask.key, url=url, tokens=ask.tokens, step=step)

    def _give_back(self, key: str) -> None:
        held = self._held.pop(key)
        self._reserved[held.url] -= held.tokens
        self._counts[held.url] -= 1
        at = (held.group, held.url)
        self._groups[at] -= 1
        if not self._groups[at]:
            del self._groups[at]
