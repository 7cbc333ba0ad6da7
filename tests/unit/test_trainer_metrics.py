from __future__ import annotations

from pathlib import Path

import pytest

from trainer.guard import within
from trainer.metrics import MetricsFile, read_metrics


def lines(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_resume_cuts_what_the_checkpoint_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "trainer" / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in (1, 2, 3, 4):
        metrics.append({"step": step})
    with path.open("a") as file:
        file.write('{"step": 5, "rew')  # torn by a crash
    assert lines(path) == [1, 2, 3, 4]
    metrics.resume(2, {"step": 2})
    assert lines(path) == [1, 2]
    metrics.append({"step": 3})
    assert lines(path) == [1, 2, 3]


def test_resume_puts_a_missing_line_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"step": 1})
    metrics.resume(2, {"step": 2})
    assert lines(path) == [1, 2]
    metrics.resume(0, None)
    assert lines(path) == []
    assert read_metrics(tmp_path / "none") == []


def test_the_guard_hands_on_results_and_errors() -> None:
    assert within(5, "x", lambda: 3) == 3
    assert within(5, "x", lambda: None) is None

    def broken() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        within(5, "x", broken)
