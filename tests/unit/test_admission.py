from __future__ import annotations

import pytest

from farm.admission import Admission, Ask, EngineCapacity
from farm.errors import UsageError


def capacity(budget: int = 100, *, context: int = 100, step: int | None = 0) -> EngineCapacity:
    return EngineCapacity(budget_tokens=budget, context_length=context, step=step)


def ask(key: str, tokens: int = 40, *, group: str = "", min_step: int = 0) -> Ask:
    return Ask(key=key, group=group or key, tokens=tokens, min_step=min_step)


def test_an_unverified_engine_gets_nothing_until_it_is_verified() -> None:
    admission = Admission()
    admission.set_engine("u", capacity(step=None))
    assert admission.ask(ask("e")) == []
    assert [g.url for g in admission.set_engine("u", capacity(step=3))] == ["u"]
    admission.unverify("u")
    assert admission.ask(ask("f")) == []
    assert admission.holder("e") == "u"


def test_an_engine_of_an_older_step_is_not_used() -> None:
    admission = Admission()
    admission.set_engine("u", capacity(step=3))
    assert admission.ask(ask("e", min_step=4)) == []
    (grant,) = admission.set_engine("u", capacity(step=4))
    assert grant.step == 4


def test_the_least_loaded_engine_is_taken_and_a_group_stays_together() -> None:
    admission = Admission()
    admission.set_engine("u", capacity(100))
    admission.set_engine("v", capacity(400))
    assert admission.ask(ask("a", group="g"))[0].url == "u"
    assert admission.ask(ask("b", group="h"))[0].url == "v"
    assert admission.ask(ask("c", group="g"))[0].url == "u"
    assert admission.ask(ask("d", group="g"))[0].url == "v", "the group's engine is full"


def test_overcommit_scales_the_budget() -> None:
    admission = Admission(overcommit=1.5)
    admission.set_engine("u", capacity(100))
    assert [bool(admission.ask(ask(key, 50))) for key in "abcd"] == [True, True, True, False]
    assert admission.capacity("u", 50) == 3
    with pytest.raises(UsageError, match="overcommit must be above 0"):
        Admission(overcommit=0)


def test_an_episode_that_no_engine_can_hold_is_refused_with_what_to_do() -> None:
    admission = Admission()
    admission.set_engine("u", capacity(1000, context=512))
    with pytest.raises(UsageError, match=r"needs 513 tokens.*largest: 512 at u.*lower max_context_tokens"):
        admission.ask(ask("e", 513))
    assert admission.waiting == 0
    with pytest.raises(UsageError, match="below 1"):
        admission.ask(ask("e", 0))


def test_without_engines_an_episode_waits_for_one() -> None:
    admission = Admission()
    assert admission.ask(ask("e")) == []
    assert admission.set_engine("u", capacity())[0].key == "e"


def test_a_waiting_episode_is_not_overtaken_on_its_engine_but_blocks_no_other() -> None:
    admission = Admission()
    admission.set_engine("u", capacity(100))
    admission.set_engine("v", capacity(50))
    admission.ask(ask("a", 60))
    assert admission.ask(ask("long", 90)) == []
    assert admission.ask(ask("b", 30))[0].url == "v", "u is kept for the long one"
    assert admission.ask(ask("c", 30)) == []
    assert [g.key for g in admission.release("a")] == ["long"]


def test_an_episode_that_only_a_lost_engine_could_hold_blocks_nobody() -> None:
    admission = Admission()
    admission.set_engine("big", capacity(1000, context=1000))
    admission.set_engine("small", capacity(100))
    admission.unverify("big")
    assert admission.ask(ask("long", 500)) == []
    assert admission.ask(ask("short", 50))[0].url == "small"
    assert admission.set_engine("big", capacity(1000, context=1000))[0].key == "long"


def test_place_does_not_queue() -> None:
    admission = Admission()
    admission.set_engine("u", capacity(100))
    assert admission.place(ask("a", 80)) is not None
    assert admission.place(ask("b", 80)) is None
    assert admission.waiting == 0
    admission.release("a")
    assert admission.place(ask("b", 80)) is not None


def test_an_episode_for_which_all_engines_are_too_small_can_not_be_placed_now() -> None:
    admission = Admission()
    admission.set_engine("large", capacity(1000, context=1000))
    admission.set_engine("small", capacity(100))
    assert admission.largest_tokens("large") == 1000
    admission.remove_engine("large")
    assert admission.largest_tokens("large") == 0
    assert admission.place(ask("long", 500)) is None, "its engine may be on its way back"
    assert admission.waiting == 0
    admission.set_engine("large", capacity(1000, context=1000))
    grant = admission.place(ask("long", 500))
    assert grant is not None
    assert grant.url == "large"


def test_a_key_asks_once() -> None:
    admission = Admission()
    admission.set_engine("u", capacity())
    admission.ask(ask("a"))
    with pytest.raises(ValueError, match="already asked"):
        admission.ask(ask("a"))


def test_removing_an_engine_releases_what_was_on_it() -> None:
    admission = Admission()
    admission.set_engine("u", capacity())
    admission.ask(ask("a"))
    assert admission.remove_engine("u") == ["a"]
    assert admission.reserved_tokens("u") == 0
    admission.release("a")
    assert admission.holder("a") is None
