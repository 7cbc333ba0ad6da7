"""``logs/failures.jsonl``: the failed attempts of episodes that have not landed, remembered over restarts of the farm.

News, not ledger: a line that a crash tore costs one more try, never an episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from farm.types import Boundary, FailedAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """``failures``: episode id -> its failed attempts, in order. ``forgiven``: those (episode id, attempt) that failed
    as everything did; they count for no budget."""

    failures: Mapping[str, list[FailedAttempt]]
    forgiven: frozenset[tuple[str, int]]


def append_failure(path: Path, episode_id: str, failure: FailedAttempt) -> None:
    """One JSON line. A torn last line (a crash) is skipped when read: a forgotten failure costs one more try."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"episode_id": episode_id, **asdict(failure)}) + "\n")


def append_amnesty(path: Path, boundary: Boundary, kind: str) -> None:
    """One JSON line: what failed at ``boundary`` with ``kind`` up to here is forgiven."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"forgiven": {"boundary": boundary.value, "kind": kind}}) + "\n")


def read_failures(path: Path, landed: frozenset[str]) -> Remembered:
    """What is remembered of episodes that have not landed."""
    failures: dict[str, list[FailedAttempt]] = {}
    forgiven: set[tuple[str, int]] = set()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            value = json.loads(line)
            if (amnesty := value.get("forgiven")) is not None:
                same = (Boundary(amnesty["boundary"]), amnesty["kind"])
                forgiven |= {
                    (episode_id, failure.attempt)
                    for episode_id, attempts in failures.items()
                    for failure in attempts
                    if (failure.boundary, failure.kind) == same
                }
                continue
            episode_id = value.pop("episode_id")
            failure = FailedAttempt(**{**value, "boundary": Boundary(value["boundary"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if episode_id not in landed:
            failures.setdefault(episode_id, []).append(failure)
    return Remembered(failures=failures, forgiven=frozenset(forgiven))
