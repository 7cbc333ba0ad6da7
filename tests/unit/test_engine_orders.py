"""What people order of engines: the file, and what is to be done next."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.durable import FolderLock
from farm.engine_orders import Member, Orders, Step, change_orders, next_steps, read_orders
from farm.errors import UsageError
from farm.run_folder import RunFolder


def member(name: str, *, draining: bool = False, reserved: int = 0, own: bool = True, replaced: int = 0) -> Member:
    return Member(name=name, draining=draining, reserved_tokens=reserved, own=own, replaced=replaced)


def steps(orders: Orders, *members: Member) -> list[Step]:
    return next_steps(orders, members)


def test_with_no_orders_nothing_is_done() -> None:
    assert steps(Orders(), member("a"), member("b", reserved=5)) == []


def test_a_drained_engine_is_drained_once_and_used_again_when_restored() -> None:
    orders = Orders().drain("a")
    assert steps(orders, member("a"), member("b")) == [Step(do="drain", name="a")]
    assert steps(orders, member("a", draining=True)) == []
    assert steps(orders.restore("a"), member("a", draining=True)) == [Step(do="undrain", name="a")]


def test_an_engine_is_removed_when_nothing_has_a_claim_on_it() -> None:
    orders = Orders().remove("a")
    assert steps(orders, member("a", reserved=5)) == [Step(do="drain", name="a")]
    assert steps(orders, member("a", draining=True, reserved=5)) == []
    assert steps(orders, member("a", draining=True)) == [Step(do="remove", name="a")]
    assert steps(orders) == []


def test_an_engine_is_replaced_once_for_each_order() -> None:
    orders = Orders().renew("a")
    assert steps(orders, member("a", reserved=5)) == [Step(do="drain", name="a")]
    assert steps(orders, member("a", draining=True)) == [Step(do="replace", name="a")]
    assert steps(orders, member("a", replaced=1)) == []
    assert steps(orders.renew("a"), member("a", draining=True, replaced=1)) == [Step(do="replace", name="a")]
    assert steps(orders, member("a", own=False)) == [], "whoever runs it replaces it"


def test_an_engine_is_added_once_and_stays_away_when_removed() -> None:
    url = "http://x:1"
    orders = Orders().add(url, "big")
    assert steps(orders) == [Step(do="add", name=url)]
    assert steps(orders, member(url, own=False)) == []
    assert steps(orders.remove(url)) == []
    assert steps(orders.remove(url).add(url, "big")) == [Step(do="add", name=url)]


def test_the_file_keeps_what_was_ordered(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    assert read_orders(run) == Orders()
    change_orders(run, lambda orders: orders.add("http://x:1", "big").drain("a"))
    change_orders(run, lambda orders: orders.renew("b").renew("b").remove("c"))
    expected = Orders(added={"http://x:1": "big"}, drained=frozenset("a"), removed=frozenset("c"), replaced={"b": 2})
    assert read_orders(run) == expected


def test_a_file_that_somebody_broke_is_told(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    (run.path / "engines.json").write_text('{"schema_version": 9}')
    with pytest.raises(UsageError, match=r"engines\.json: unreadable \(schema version 9"):
        read_orders(run)
    with pytest.raises(UsageError, match="unreadable"):
        change_orders(run, lambda orders: orders)


def test_two_writers_at_once_are_told_apart(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    held = FolderLock(run.path / "engines.lock", "writer of engines.json")
    held.acquire()
    try:
        with pytest.raises(UsageError, match=r"is the writer of engines\.json already"):
            change_orders(run, lambda orders: orders)
    finally:
        held.release()
