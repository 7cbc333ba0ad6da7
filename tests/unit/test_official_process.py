"""The grading process from the farm's side: whatever it does, the farm gets a grade or an error of the grader."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from farm.errors import GraderError, UsageError
from farm.grader import official
from farm.grader.official import OfficialGrade, OfficialGrading, check_installed
from farm.grader.official_worker import answer

STUB = Path(__file__).parents[1] / "support" / "official_stub.py"
T = TypeVar("T")


def use(work: Callable[[OfficialGrading], Awaitable[T]], *flags: str, **options: Any) -> T:
    async def main() -> T:
        command = (sys.executable, str(STUB), *flags)
        async with OfficialGrading(command=command, **{"request_s": 20.0, "start_s": 20.0, **options}) as grading:
            return await work(grading)

    return asyncio.run(main())


def grade(grading: OfficialGrading, patch: str, log: str = "") -> Awaitable[OfficialGrade]:
    return grading.grade({"instance_id": "i"}, patch=patch, model="m", log=log)


def test_one_process_answers_all() -> None:
    async def work(grading: OfficialGrading) -> tuple[list[OfficialGrade], int]:
        answers = await asyncio.gather(*(grade(grading, patch) for patch in ("good", "bad", "good")))
        return answers, grading.starts

    answers, starts = use(work)
    assert [answer.resolved for answer in answers] == [True, False, True]
    assert len({answer.report["pid"] for answer in answers}) == starts == 1


@pytest.mark.parametrize(
    ("patch", "kind", "message"),
    [
        ("die", "died", "the grading process died; it said: killed by a stray byte"),
        ("garbage", "protocol", "can't be read"),
        ("huge", "protocol", "announced an answer of"),
        ("memory", "memory", "ran out of memory"),
    ],
)
def test_a_broken_process_is_an_error_and_the_next_one_is_fresh(patch: str, kind: str, message: str) -> None:
    async def work(grading: OfficialGrading) -> tuple[GraderError, OfficialGrade, int]:
        with pytest.raises(GraderError, match=message) as caught:
            await grade(grading, patch)
        return caught.value, await grade(grading, "good"), grading.starts

    error, after, starts = use(work)
    assert (error.kind, error.retryable) == (kind, True)
    assert after.resolved
    assert starts == 3  # the request that broke it was tried once more


def test_no_answer_in_time() -> None:
    async def work(grading: OfficialGrading) -> OfficialGrade:
        with pytest.raises(GraderError, match=r"no answer in 0\.3 s") as caught:
            await grade(grading, "hang")
        assert caught.value.kind == "timeout"
        return await grade(grading, "good")

    assert use(work, request_s=0.3).resolved


def test_a_death_of_its_own_costs_nothing(tmp_path: Path) -> None:
    async def work(grading: OfficialGrading) -> int:
        await grade(grading, "die once", log=str(tmp_path / "was here"))
        return grading.starts

    assert use(work) == 2


def test_a_refusal_is_final_and_the_process_goes_on() -> None:
    async def work(grading: OfficialGrading) -> int:
        with pytest.raises(GraderError, match="no_such_parser") as caught:
            await grade(grading, "refuse")
        assert (caught.value.kind, caught.value.retryable) == ("official", False)
        await grade(grading, "good")
        return grading.starts

    assert use(work) == 1


def test_a_process_that_has_grown_is_replaced() -> None:
    async def work(grading: OfficialGrading) -> set[int]:
        return {(await grade(grading, patch)).report["pid"] for patch in ("grown", "good", "good")}

    assert len(use(work)) == 2


def test_a_cancelled_request_leaves_no_answer_for_the_next() -> None:
    async def work(grading: OfficialGrading) -> OfficialGrade:
        await grade(grading, "good")
        late = asyncio.ensure_future(grade(grading, "hang"))
        await asyncio.sleep(0.1)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        return await grade(grading, "good")

    assert use(work).resolved


def test_one_that_does_not_start() -> None:
    async def work(grading: OfficialGrading) -> None:
        await grade(grading, "good")

    with pytest.raises(GraderError, match="what it needs is not there"):
        use(work, "--no-hello")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        assert name == "swebench"
        return installed[0] if installed else missing()

    def missing() -> str:
        raise official.importlib.metadata.PackageNotFoundError("swebench")

    installed: list[str] = []
    monkeypatch.setattr(official.importlib.metadata, "version", version)
    with pytest.raises(UsageError, match=r"rollout-farm\[swebench\]"):
        check_installed()
    installed.append("4.1.0")
    with pytest.raises(UsageError, match=r"swebench 4\.1\.0 is installed"):
        check_installed()
    installed[0] = "5.0.2"
    check_installed()


def test_errors_of_the_package_travel_as_answers() -> None:
    told = answer({"op": "no such"})
    assert not told["ok"]
    assert told["rss_bytes"] > 0
