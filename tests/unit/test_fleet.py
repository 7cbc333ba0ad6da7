"""Which retractions say that the KV cache is too small."""

from __future__ import annotations

from farm.fleet import Retractions


def test_retractions_of_an_update_do_not_count() -> None:
    retractions = Retractions()
    assert retractions.total({"a": (1.0, 2), "b": (1.0, 0)}) == 2
    retractions.updated("a", 5.0)
    assert retractions.total({"a": (4.0, 2), "b": (4.0, 1)}) == 3, "a was looked at before its update"
    assert retractions.total({"a": (5.5, 20), "b": (5.5, 1)}) == 3
    assert retractions.total({"a": (6.0, 21), "b": (6.0, 1)}) == 4


def test_a_restarted_engine_counts_from_nothing_again() -> None:
    retractions = Retractions()
    assert retractions.total({"a": (1.0, 5)}) == 5
    assert retractions.total({"a": (2.0, 0)}) == 5
    assert retractions.total({"a": (3.0, 1)}) == 6
