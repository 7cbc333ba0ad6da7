"""``metrics.jsonl``: one JSON line for each training step, in step order, without gaps or repeats across crashes.

A line is appended after its step is published. The checkpoint holds the line of its step too: on resume, lines after
the checkpoint's step (and a torn last line) are cut off, and a line that a crash kept from being written is put back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def resume(self, step: int, last: Mapping[str, Any] | None) -> None:
        """Bring the file to the state after ``step``, whose line is ``last`` (None for step 0: no line yet)."""
        lines = [line for line in read_metrics(self._path) if line["step"] <= step]
        if last is not None and (not lines or lines[-1]["step"] < step):
            lines.append(dict(last))
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        if self._path.exists() and self._path.read_text() == text:
            return
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line that is still being written is left out."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
