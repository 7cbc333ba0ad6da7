"""How much is left to do, said while it is done."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

SAY_EVERY_S = 30.0
TELL_EVERY_S = 5.0
_UNKNOWN_STAGE_S = 30.0


def expected_s(stage: str, known_s: Mapping[str, float]) -> float:
    """Duration of a stage: as it took last time, else as its kind (the name up to the dash) is said to take."""
    return known_s.get(stage, known_s.get(stage.partition("-")[0], _UNKNOWN_STAGE_S))


def left_s(stage: str, elapsed_s: float, to_come: Sequence[str], known_s: Mapping[str, float]) -> float:
    """``to_come`` are the stages after this one. A stage that takes longer than expected counts as nearly done."""
    this_s = max(0.0, expected_s(stage, known_s) - elapsed_s)
    return this_s + sum(expected_s(s, known_s) for s in to_come)


def telling(say: Callable[[str], None], total: int, *, every_s: float = TELL_EVERY_S) -> Callable[[str], None]:
    """A function to call with the name of each of ``total`` parts as it begins; it says the first, and then now and
    then the one at hand, with its number."""
    said_at, number = -math.inf, 0

    def tell(name: str) -> None:
        nonlocal said_at, number
        number += 1
        now = time.monotonic()
        if now - said_at >= every_s:
            said_at = now
            say(f"{number} of {total}: {name}")

    return tell


def words(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 100 else f"{round(seconds / 60)} min"


@contextmanager
def saying(say: Callable[[float], None], *, every_s: float = SAY_EVERY_S) -> Iterator[None]:
    """Calls ``say(elapsed_s)`` now and then, from a thread of its own, while the body runs."""
    started_s = time.monotonic()
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            say(time.monotonic() - started_s)

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
