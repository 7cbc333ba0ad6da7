"""Figures for people, over a sliding window of what has landed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from farm.worker import Receipt

_RATE_WINDOW_S = 60.0
_RECENT = 256


class Tally:
    """Fed with receipts; ``now`` gives seconds since the epoch."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        self._now = now
        self._ends: deque[float] = deque()
        self._rewards: deque[float] = deque(maxlen=_RECENT)
        self._tokens: deque[int] = deque(maxlen=_RECENT)
        self._turns: deque[int] = deque(maxlen=_RECENT)
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._since_s = now()
        self.failures: Counter[str] = Counter()
        self.lost = 0
        self.duplicates = 0

    def landed(self, receipt: Receipt) -> None:
        if not receipt.first:
            self.duplicates += 1
            return
        self._ends.append(self._now())
        self._rewards.append(receipt.reward)
        self._tokens.append(receipt.total_tokens)
        self._turns.append(receipt.turns)
        self._seconds.append(receipt.ended_at_s - receipt.started_at_s)

    def recent(self) -> dict[str, float | int | None]:
        now_s = self._now()
        while self._ends and now_s - self._ends[0] > _RATE_WINDOW_S:
            self._ends.popleft()
        window_s = max(min(_RATE_WINDOW_S, now_s - self._since_s), 1e-3)
        return {
            "episodes_per_hour": len(self._ends) / window_s * 3600,
            "reward_mean": _mean(self._rewards),
            "tokens_mean": _mean(self._tokens),
            "turns_mean": _mean(self._turns),
            "seconds_mean": _mean(self._seconds),
            "lost_attempts": self.lost,
            "duplicates": self.duplicates,
        }


def _mean(values: deque[float] | deque[int]) -> float | None:
    return sum(values) / len(values) if values else None
