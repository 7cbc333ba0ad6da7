"""CPU time of one coroutine among many in a thread."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Metered(Generic[T]):
    """Awaits ``coroutine`` and adds up in ``cpu_s`` what its own steps cost, whatever runs in between.

    Threads and callbacks that it starts are not seen.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.cpu_s = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        step, value = self._coroutine.send, None
        while True:
            start = time.thread_time()
            try:
                waits_for = step(value)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self.cpu_s += time.thread_time() - start
            try:
                step, value = self._coroutine.send, (yield waits_for)
            except BaseException as error:  # thrown in from outside, a cancellation for example
                step, value = self._coroutine.throw, error
