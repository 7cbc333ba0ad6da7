"""Admission over any interleaving of asks, releases, engines that come, go, shrink and lose their verification."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.admission import Admission, Ask, EngineCapacity, Grant
from farm.errors import UsageError

URLS = ("a", "b", "c")


@dataclass(frozen=True)
class AskFor:
    tokens: int
    group: str
    min_step: int
    queued: bool


@dataclass(frozen=True)
class ReleaseOne:
    which: int


@dataclass(frozen=True)
class SetEngine:
    url: str
    budget: int
    context: int
    step: int | None


@dataclass(frozen=True)
class Unverify:
    url: str


@dataclass(frozen=True)
class Remove:
    url: str


urls = st.sampled_from(URLS)
actions = st.lists(
    st.one_of(
        st.builds(
            AskFor,
            tokens=st.integers(1, 120),
            group=st.sampled_from("xyz"),
            min_step=st.integers(0, 2),
            queued=st.booleans(),
        ),
        st.builds(ReleaseOne, which=st.integers(0, 30)),
        st.builds(
            SetEngine,
            url=urls,
            budget=st.integers(1, 300),
            context=st.integers(1, 120),
            step=st.none() | st.integers(0, 3),
        ),
        st.builds(Unverify, url=urls),
        st.builds(Remove, url=urls),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(overcommit=st.sampled_from([0.5, 1.0, 1.7]), script=actions)
def test_invariants_hold_after_every_call(overcommit: float, script: list[object]) -> None:
    admission = Admission(overcommit=overcommit)
    held: dict[str, Grant] = {}
    asked: dict[str, Ask] = {}
    queued: list[str] = []

    def check(grants: list[Grant]) -> None:
        for grant in grants:
            ask, engine = asked[grant.key], admission.engines[grant.url]
            assert grant.key not in held
            assert engine.step is not None
            assert grant.step == engine.step >= ask.min_step
            assert grant.tokens == ask.tokens <= engine.context_length
            assert admission.reserved_tokens(grant.url) <= admission.limit_tokens(grant.url)
            held[grant.key] = grant
            if grant.key in queued:
                queued.remove(grant.key)
        for url in URLS:
            assert admission.reserved_tokens(url) == sum(g.tokens for g in held.values() if g.url == url)
        assert admission.waiting == len(queued)

    for number, action in enumerate(script):
        match action:
            case AskFor():
                key = f"e{number}"
                asked[key] = Ask(key=key, group=action.group, tokens=action.tokens, min_step=action.min_step)
                if not action.queued:
                    try:
                        grant = admission.place(asked[key])
                    except UsageError:
                        continue
                    check([grant] if grant else [])
                    continue
                queued.append(key)
                try:
                    check(admission.ask(asked[key]))
                except UsageError:
                    queued.remove(key)
                    largest = max(
                        min(e.context_length, e.budget_tokens, admission.limit_tokens(url))
                        for url, e in admission.engines.items()
                    )
                    assert action.tokens > largest
            case ReleaseOne():
                keys = [*held, *queued]
                if keys:
                    key = keys[action.which % len(keys)]
                    held.pop(key, None)
                    if key in queued:
                        queued.remove(key)
                    check(admission.release(key))
                    assert admission.holder(key) is None
            case SetEngine():
                check(
                    admission.set_engine(
                        action.url,
                        EngineCapacity(budget_tokens=action.budget, context_length=action.context, step=action.step),
                    )
                )
            case Unverify():
                admission.unverify(action.url)
            case Remove():
                lost = admission.remove_engine(action.url)
                assert set(lost) == {key for key, grant in held.items() if grant.url == action.url}
                for key in lost:
                    del held[key]
                check([])
    for key in [*held]:
        held.pop(key)
        check(admission.release(key))


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    budgets=st.lists(st.integers(100, 250), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_nobody_starves(sizes: list[int], budgets: list[int], order: random.Random) -> None:
    """As long as running episodes end, in whatever order, every queued one gets its turn, however many smaller ones
    keep coming."""
    admission = Admission()
    for number, budget in enumerate(budgets):
        admission.set_engine(URLS[number], EngineCapacity(budget_tokens=budget, context_length=100, step=0))
    running: list[str] = []
    served: set[str] = set()

    def take(grants: list[Grant]) -> None:
        running.extend(grant.key for grant in grants)
        served.update(grant.key for grant in grants)

    first = "first"
    for number, size in enumerate(sizes):
        take(admission.ask(Ask(key=str(number), group="g", tokens=size)))
    take(admission.ask(Ask(key=first, group="g", tokens=100)))
    newcomers = 0
    ended = 0
    while first not in served:
        assert running, "somebody waits while nobody runs"
        order.shuffle(running)
        take(admission.release(running.pop()))
        ended += 1
        newcomers += 1
        take(admission.ask(Ask(key=f"late-{newcomers}", group="g", tokens=1 + newcomers % 30)))
        assert ended < 2_000
    while admission.waiting:
        take(admission.release(running.pop()))
    assert {str(n) for n in range(len(sizes))} <= served
