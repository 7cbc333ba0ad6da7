"""A limit on how long a save may take: disks and network mounts hang, and Megatron's own writer is known to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from farm.errors import FarmError

T = TypeVar("T")


class SaveTimeoutError(FarmError):
    """A save did not end in time. The thread that hangs is abandoned; it dies with the process."""

    default_kind = "save_timeout"


def within(timeout_s: float, what: str, action: Callable[[], T]) -> T:
    """Run ``action`` in a thread of its own and return its result, or raise what it raised.

    Raises :class:`SaveTimeoutError` after ``timeout_s``; the caller must not go on then, for ``action`` may still take
    effect later."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"save: {what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise SaveTimeoutError(
            f"{what} did not end within {timeout_s:g} s and was given up; check the disk, then start the trainer "
            "again: it resumes from its last checkpoint"
        )
    return results[0]
