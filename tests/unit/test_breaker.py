"""farm/breaker.py by example."""

from __future__ import annotations

from farm.breaker import MIN_ATTEMPTS, MIN_S, ROUNDS, Breaker, Trip
from farm.types import Boundary, FailedAttempt


def failure(boundary: Boundary = Boundary.ENGINE, kind: str = "refused") -> FailedAttempt:
    return FailedAttempt(
        attempt=1, boundary=boundary, kind=kind, message="400 no\nsuch field", worker="w", started_at_s=0, ended_at_s=0
    )


def feed(breaker: Breaker, count: int, *, slots: int, every_s: float, start_s: float = 0.0) -> list[Trip]:
    trips = (breaker.failed(failure(), slots=slots, now_s=start_s + i * every_s) for i in range(count))
    return [trip for trip in trips if trip is not None]


def test_it_trips_after_some_rounds_of_all_slots_and_says_why_in_one_line() -> None:
    needed = 20 * ROUNDS
    assert not feed(Breaker(), needed - 1, slots=20, every_s=1.0)
    (trip,) = feed(Breaker(), needed, slots=20, every_s=1.0)
    assert (trip.attempts, trip.boundary, trip.kind, trip.seconds) == (needed, Boundary.ENGINE, "refused", needed - 1)
    text = str(trip)
    assert "\n" not in text
    for part in ("60 attempts", "engine (refused)", "400 no such field", "farm status", "start the farm again"):
        assert part in text


def test_a_burst_does_not_trip_it_however_large() -> None:
    assert not feed(Breaker(), 10_000, slots=20, every_s=MIN_S / 10_000)


def test_one_slot_alone_gets_more_than_a_few_tries() -> None:
    assert not feed(Breaker(), MIN_ATTEMPTS - 1, slots=1, every_s=10.0)
    assert feed(Breaker(), MIN_ATTEMPTS, slots=1, every_s=10.0)


def test_one_success_starts_the_count_anew() -> None:
    breaker = Breaker()
    assert not feed(breaker, 59, slots=20, every_s=1.0)
    breaker.succeeded()
    assert not feed(breaker, 59, slots=20, every_s=1.0, start_s=60.0)


def test_a_farm_that_shrinks_while_it_fails_keeps_its_threshold() -> None:
    breaker = Breaker()
    assert not feed(breaker, 20, slots=20, every_s=1.0)
    assert not feed(breaker, 39, slots=1, every_s=1.0, start_s=20.0)
    assert feed(breaker, 1, slots=1, every_s=1.0, start_s=60.0)


def test_many_kinds_are_many_reasons() -> None:
    breaker = Breaker()
    for index in range(600):
        kind = f"kind-{index % 20}"
        assert breaker.failed(failure(kind=kind), slots=20, now_s=float(index)) is None
