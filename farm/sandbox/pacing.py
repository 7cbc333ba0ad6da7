"""PURE: who may ask a rate-limited service next, and when. No clock and no I/O; times are seconds since the epoch.

Invariants: starts granted under one :class:`Pace` are at least ``1 / per_s`` apart; nobody starts before
``blocked_until_s``; a place that would come too late for who asks is not taken, so it puts nobody off; and no more than
``limit`` unexpired leases are held at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``next_at_s``: when the next start would be on time; ``blocked_until_s``: what the service asked for."""

    next_at_s: float = 0.0
    blocked_until_s: float = 0.0


def reserve(pace: Pace, *, now_s: float, per_s: float, by_s: float) -> tuple[Pace, float]:
    """Take the next place: the pace after it, and when to start (now, or later). One that comes after ``by_s`` is not
    taken: the pace stays as it was."""
    at_s = max(now_s, pace.next_at_s, pace.blocked_until_s)
    return (pace if at_s > by_s else replace(pace, next_at_s=at_s + 1.0 / per_s)), at_s


def back_off(pace: Pace, *, now_s: float, wait_s: float) -> Pace:
    """The service refused: nobody asks again for ``wait_s``."""
    return replace(pace, blocked_until_s=max(pace.blocked_until_s, now_s + wait_s))


def held(leases: Mapping[str, float], *, now_s: float) -> dict[str, float]:
    """The leases (id -> end) that have not expired."""
    return {name: end_s for name, end_s in leases.items() if end_s > now_s}


def has_room(leases: Mapping[str, float], *, now_s: float, limit: int) -> bool:
    """May one more be taken?"""
    return len(held(leases, now_s=now_s)) < limit
