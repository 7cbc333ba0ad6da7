"""The live view and the result table, from records alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console

from farm.results import Results
from farm.view import line, result_table, table

STATUS: dict[str, Any] = {
    "state": "running",
    "updated_at_s": 100.0,
    "tasks": "micro:rl",
    "agent": "bash",
    "plan_groups": None,
    "group_size": 8,
    "cluster": {"workers": 2, "target": 3, "draining": 1, "slots": 32, "in_flight_limit": 30, "address": "tcp://x"},
    "episodes": {
        "in_flight": 29,
        "waiting": 4,
        "landed": 10,
        "failed": 1,
        "dropped": 2,
        "landed_before": 100,
        "opened_groups": 20,
        "closed_groups": 15,
        "retried": 3,
        "lost": 0,
    },
    "recent": {
        "episodes_per_hour": 36_000.4,
        "reward_mean": 0.25,
        "tokens_mean": 210.0,
        "turns_mean": 4.25,
        "seconds_mean": None,
    },
    "failures": {},
    "policy": {"step": 7, "consumed_groups": 12},
    "engines": [
        {"url": "http://e", "state": "up", "version": "step-000006", "running": 3, "queued": 0, "used_tokens": 250,
         "max_total_tokens": 1000, "retracted": 0},
        {"url": "http://f", "state": "new", "version": None},
    ],
}  # fmt: skip


def drawn(thing: Any) -> str:
    console = Console(width=140, no_color=True)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


def test_why_a_farm_stopped_by_itself_is_shown() -> None:
    status = {**STATUS, "tripped": "stopped: 48 attempts failed at engine (refused)"}
    assert status["tripped"] in line(status)
    assert status["tripped"] in drawn(table(status, now_s=100.0))


def test_plain_line_has_what_matters() -> None:
    text = line(STATUS)
    for part in (
        "running",
        "workers 2/3",
        "in flight 29/30",
        "landed 113",
        "36,000/h",
        "0.250",
        "policy 7",
        "retried 3",
    ):
        assert part in text


def test_table_shows_engines_and_silence() -> None:
    text = drawn(table(STATUS, now_s=101.0))
    for part in ("step 7 published", "step-000006", "25% of 1,000", "15 closed, 20 opened", "113 landed"):
        assert part in text
    assert "no news" not in text
    assert "no news for 60 s" in drawn(table(STATUS, now_s=160.0))


def test_a_farm_that_is_starting_has_little_to_say() -> None:
    assert line({"state": "starting"}) == "starting"
    assert "starting" in drawn(table({"state": "starting"}))


def test_results_show_both_denominators() -> None:
    results = Results(
        tasks=2,
        attempts=8,
        graded=6,
        resolved=3,
        failed=1,
        dropped=1,
        seconds=36.0,
        turns_mean=2.0,
        tokens_mean=100.0,
        output_tokens=60,
        retries=2,
        end_reasons=Counter({"submitted": 5, "max_turns": 1}),
        failures=Counter({"engine/timeout": 1}),
    )
    text = drawn(result_table(results))
    for part in (
        "37.5% (3/8)",
        "50.0% (3/6)",
        "engine/timeout 1",
        "submitted 5",
        "800 episodes/h",
        "2 attempts retried",
    ):
        assert part in text
