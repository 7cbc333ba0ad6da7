"""What came out of a finite rollout, from the log alone.

Every pass rate is given in both denominators (Rule 3): with infrastructure failures counted as not solved, and with
them left out. Both stand side by side, with how many there were and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from farm.types import Dropped, Failed, Graded, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """``pass_all`` and ``pass_graded`` are means over attempts; None when there is nothing to divide by."""

    tasks: int
    attempts: int
    graded: int
    resolved: int
    failed: int
    dropped: int
    seconds: float  # from the first start to the last end
    turns_mean: float | None
    tokens_mean: float | None
    output_tokens: int
    retries: int
    end_reasons: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def pass_all(self) -> float | None:
        return self.resolved / self.attempts if self.attempts else None

    @property
    def pass_graded(self) -> float | None:
        return self.resolved / self.graded if self.graded else None

    @property
    def episodes_per_hour(self) -> float | None:
        return self.attempts / self.seconds * 3600 if self.seconds > 0 else None


def summarize(rows: Iterable[Trajectory]) -> Results:
    tasks: set[str] = set()
    ends: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    graded = resolved = failed = dropped = retries = turns = tokens = output_tokens = 0
    start, end = float("inf"), float("-inf")
    for row in rows:
        tasks.add(row.instance_id)
        retries += len(row.prior)
        start, end = min(start, row.started_at_s), max(end, row.ended_at_s)
        match row.outcome:
            case Graded(evidence=evidence):
                graded += 1
                resolved += evidence.resolved
                ends[row.end_reason.value] += 1
                turns += len(row.turns)
                tokens += row.total_tokens
                output_tokens += row.output_tokens
            case Failed() as failure:
                failed += 1
                failures[f"{failure.boundary.value}/{failure.kind}"] += 1
            case Dropped():
                dropped += 1
    return Results(
        tasks=len(tasks),
        attempts=graded + failed + dropped,
        graded=graded,
        resolved=resolved,
        failed=failed,
        dropped=dropped,
        seconds=max(0.0, end - start),
        turns_mean=turns / graded if graded else None,
        tokens_mean=tokens / graded if graded else None,
        output_tokens=output_tokens,
        retries=retries,
        end_reasons=ends,
        failures=failures,
    )
