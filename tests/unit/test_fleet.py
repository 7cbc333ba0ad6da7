"""Which retractions say that the KV cache is too small."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from farm.config import EngineConfig
from farm.elastic import EngineView
from farm.engine.scripted import ScriptedEngine
from farm.fleet import Fleet, Retractions
from farm.pool import Health
from farm.protocols import EngineLoad


def test_retractions_of_an_update_do_not_count() -> None:
    retractions = Retractions()
    assert retractions.total({"a": (1.0, 2), "b": (1.0, 0)}) == 2
    retractions.updated("a", 5.0)
    assert retractions.total({"a": (4.0, 2), "b": (4.0, 1)}) == 3, "a was looked at before its update"
    assert retractions.total({"a": (5.5, 20), "b": (5.5, 1)}) == 3
    assert retractions.total({"a": (6.0, 21), "b": (6.0, 1)}) == 4


def test_a_restarted_engine_counts_from_nothing_again() -> None:
    retractions = Retractions()
    assert retractions.total({"a": (1.0, 5)}) == 5
    assert retractions.total({"a": (2.0, 0)}) == 5
    assert retractions.total({"a": (3.0, 1)}) == 6


def test_only_engines_in_use_steer_the_farm(tmp_path: Path) -> None:
    """One that died with a queue would say for ever that engines queue."""

    async def scenario() -> None:
        fleet = Fleet(EngineConfig(), logs=tmp_path)
        queueing = {"http://queueing": 3, "http://idle": 0}
        engines = {url: ScriptedEngine(lambda _: [1], url=url, version="step-000000") for url in queueing}
        for engine in engines.values():
            fleet._pool.add(engine)
            load = await engine.load()
            state = replace(load, queued=queueing[engine.url], used_tokens=10, max_total_tokens=100)
            fleet._pool._set(engine.url, health=Health.UP, load=state)
        assert fleet.view() == EngineView(queued=3, used_tokens=20, max_total_tokens=200, retracted_total=0)
        alone = EngineView(queued=0, used_tokens=10, max_total_tokens=100, retracted_total=0)
        fleet._pool._down("http://queueing", "dead")
        assert fleet.view() == alone
        fleet._pool._set("http://queueing", health=Health.UP)
        fleet._pool.drain("http://queueing")
        assert fleet.view() == alone
        fleet._pool._down("http://idle", "dead")
        assert fleet.view() is None
        await fleet.close()

    asyncio.run(scenario())


def test_engine_metrics_are_written_while_they_change(tmp_path: Path) -> None:
    fleet = Fleet(EngineConfig(), logs=tmp_path)
    idle = EngineLoad(
        running=0, queued=0, used_tokens=0, max_total_tokens=100, retracted_total=0, generated_tokens_total=0
    )
    for at_s, load in enumerate([idle, idle, replace(idle, used_tokens=7, running=1), idle]):
        fleet._on_load("http://a", float(at_s), load)
    lines = [json.loads(line) for line in (tmp_path / "engine_metrics.jsonl").read_text().splitlines()]
    assert [(line["at_s"], line["used_tokens"]) for line in lines] == [(0.0, 0), (2.0, 7), (3.0, 0)]
    assert lines[1]["url"] == "http://a"
    assert lines[1]["max_total_tokens"] == 100
