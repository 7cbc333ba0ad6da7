"""Tests that need the extra ``swebench``. They run by ``make test-swebench``, which sets the variable. What needs the
rows of SWE-bench Verified is skipped where they are not at hand (ROLLOUT_FARM_DATA).

All share one grading process, as a worker's gradings do: its start takes seconds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from farm.grader.official import OfficialGrading

if os.environ.get("ROLLOUT_FARM_TEST_SWEBENCH") != "1":
    collect_ignore_glob = ["test_*.py"]

Use = Callable[[Callable[[OfficialGrading], Awaitable[Any]]], Any]


@pytest.fixture(scope="session")
def use() -> Iterator[Use]:
    """Runs what it is given with the one grading process."""
    grading = OfficialGrading()
    with asyncio.Runner() as runner:

        async def call(work: Callable[[OfficialGrading], Awaitable[Any]]) -> Any:
            return await work(grading)

        runner.run(call(lambda official: official.classify("")))  # started before any test counts its processes
        yield lambda work: runner.run(call(work))
        assert grading.starts == 1, "the grading process was replaced"
        runner.run(grading.close())
