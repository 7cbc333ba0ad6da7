"""What a worker makes of an attempt: it lands what was graded, returns what failed, and never hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from farm.dispatch import FinitePlan, PlanSpec
from farm.errors import FarmError
from farm.suites import micro
from farm.trajectory_log import DirectoryLog
from farm.types import Attempt, Boundary, EndReason, Limits, SamplingParams, Trajectory
from farm.worker import EpisodeWorker, Receipt, Returned, WorkerOptions


def make_attempt(*, number: int = 1, engine_url: str = "", limits: Limits | None = None) -> Attempt:
    (task,) = micro.load("benchmark")[:1]
    spec = PlanSpec(group_size=1, seed=0, purpose="eval", sampling=SamplingParams(), limits=limits or Limits())
    (episode,) = FinitePlan([task], spec).group(0)
    return Attempt(episode=episode, number=number, engine_url=engine_url, min_version=0, queued_at_s=0.0)


def options(folder: Path, **changes: object) -> WorkerOptions:
    given = WorkerOptions(
        log_path=str(folder / "log"),
        provider="bubblewrap",
        agent="null",
        renderer="micro",
        grader="tests",
        model_path="",
    )
    return replace(given, **changes)  # type: ignore[arg-type]


class ToldLate(EpisodeWorker):
    """Told to go a moment after its sandboxes were: by then an episode has ended without them."""

    async def _episode(self, attempt: Attempt) -> Trajectory:
        trajectory = await super()._episode(attempt)
        asyncio.get_running_loop().call_later(0.005, self.distrust)
        return trajectory


class Stuck(EpisodeWorker):
    """An episode that never ends and does not listen."""

    async def _episode(self, attempt: Attempt) -> Trajectory:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if asyncio.current_task() in self.spared:
                    raise
                self.spared.add(asyncio.current_task())

    spared: set[object]


def test_a_graded_attempt_is_in_the_log_before_anybody_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        worker = EpisodeWorker(worker="w1", options=options(tmp_path))
        first = await worker.run(make_attempt())
        again = await worker.run(make_attempt(number=2))
        await worker.close()
        assert isinstance(first, Receipt)
        assert (first.first, first.reward, first.worker, first.attempt) == (True, 0.0, "w1", 1)
        assert DirectoryLog(tmp_path / "log").landed() == {first.episode_id}
        assert isinstance(again, Receipt)
        assert not again.first

    asyncio.run(main())


def test_a_failed_attempt_comes_back_whole_and_is_not_in_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        worker = EpisodeWorker(worker="w1", options=options(tmp_path, fault_rate=1.0))
        returned = await worker.run(make_attempt())
        await worker.close()
        assert isinstance(returned, Returned)
        assert returned.trajectory.outcome == returned.failed
        assert DirectoryLog(tmp_path / "log").landed() == frozenset()

    asyncio.run(main())


def test_an_agent_that_samples_without_an_engine_fails_at_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        worker = EpisodeWorker(worker="w1", options=options(tmp_path, agent="bash"))
        returned = await worker.run(make_attempt())
        await worker.close()
        assert isinstance(returned, Returned)
        assert (returned.failed.boundary, returned.failed.retryable) == (Boundary.ENGINE, False)

    asyncio.run(main())


def test_an_attempt_that_ignores_its_limit_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Stuck(worker="w1", options=options(tmp_path), wall_slack_s=0.05, cancel_grace_s=0.05)
        worker.spared = set()
        limits = Limits(tool_s=0.01, agent_s=0.02, grade_s=0.02, episode_s=0.05)
        returned = await worker.run(make_attempt(limits=limits))
        assert isinstance(returned, Returned)
        assert (returned.failed.boundary, returned.failed.kind) == (Boundary.FARM, "wall_limit")

    asyncio.run(main())


def test_cancellation_passes_through(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Stuck(worker="w1", options=options(tmp_path), cancel_grace_s=0.05)
        worker.spared = set()
        running = asyncio.create_task(worker.run(make_attempt()))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


class FullDisk(DirectoryLog):
    """Full for the first ``times`` appends."""

    times = 1

    def append(self, trajectory: Trajectory) -> bool:
        if self.times:
            self.times -= 1
            raise FarmError("no space left", kind="disk_full")
        return super().append(trajectory)


def test_a_finished_episode_waits_for_room_on_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        worker = EpisodeWorker(worker="w1", options=options(tmp_path))
        worker.log = FullDisk(tmp_path / "log")
        assert isinstance(await worker.run(make_attempt()), Receipt)
        await worker.close()

    asyncio.run(main())


@pytest.mark.parametrize("told_first", [True, False])
def test_a_worker_that_is_being_taken_away_lands_nothing(tmp_path: Path, told_first: bool) -> None:
    async def main() -> None:
        worker = (EpisodeWorker if told_first else ToldLate)(worker="w1", options=options(tmp_path))
        if told_first:
            worker.distrust()
        result = await worker.run(make_attempt())
        await worker.close()
        assert isinstance(result, Returned)
        assert (result.failed.boundary, result.failed.kind, result.failed.retryable) == (
            Boundary.FARM,
            "preempted",
            True,
        )
        # The driver lands this very row when no attempt is left: it must not have the grade.
        assert result.trajectory.outcome == result.failed
        assert result.trajectory.end_reason is EndReason.FAILED
        assert DirectoryLog(tmp_path / "log").landed() == set()

    asyncio.run(main())
