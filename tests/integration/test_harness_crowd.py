"""Endless generations beside a small crowd, on a real embedded engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from farm.engine.launch import EngineOptions, launch_engine
from harness.crowd import ENDLESS, OTHER, CrowdPlan, Played, play

POLICY = Path(__file__).parents[2] / "datasets" / "micro" / "base-policy"
PLAN = CrowdPlan(endless=3, others=2, budget_tokens=768, longest_tokens=700, cap_tokens=192, timeout_s=0.5, fill_s=60.0)


def test_endless_generations_block_the_others_until_cap_and_admission_hold_them(tmp_path: Path) -> None:
    async def scenario() -> dict[str, Played]:
        options = EngineOptions(
            model=str(POLICY),
            version="step-000000",
            max_total_tokens=PLAN.budget_tokens,
            context_length=PLAN.longest_tokens,
            clip_new_tokens=2,
        )
        engine = await launch_engine(options, run_folder=tmp_path)
        try:
            return await play(engine.url, PLAN)
        finally:
            await engine.stop()

    played = asyncio.run(scenario())
    alone, guarded = played["alone"], played["guarded"]
    assert alone.full_at_s is not None
    assert alone.loads[-1][1].retracted_total > 0
    assert guarded.full_at_s is None
    assert guarded.loads[-1][1].retracted_total == alone.loads[-1][1].retracted_total, "none with cap and admission"
    for one in played.values():
        assert [client.kind for client in one.clients] == [ENDLESS] * 3 + [OTHER] * 2
        assert max(load.used_tokens for _, load in one.loads) <= PLAN.budget_tokens
    assert all(client.tokens for client in guarded.clients if client.kind == OTHER)
