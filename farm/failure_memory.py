"""``logs/failures.jsonl``: the failed attempts of episodes that have not landed, remembered over restarts of the farm.

News, not ledger: a line that a crash tore costs one more try, never an episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from farm.types import Boundary, FailedAttempt


def append_failure(path: Path, episode_id: str, failure: FailedAttempt) -> None:
    """One JSON line. A torn last line (a crash) is skipped when read: a forgotten failure costs one more try."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"episode_id": episode_id, **asdict(failure)}) + "\n")


def read_failures(path: Path, landed: frozenset[str]) -> Mapping[str, list[FailedAttempt]]:
    """Failures of episodes that have not landed, in order."""
    found: dict[str, list[FailedAttempt]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            value = json.loads(line)
            episode_id = value.pop("episode_id")
            failure = FailedAttempt(**{**value, "boundary": Boundary(value["boundary"])})
        except (ValueError, KeyError, TypeError):
            continue
        if episode_id not in landed:
            found.setdefault(episode_id, []).append(failure)
    return found
