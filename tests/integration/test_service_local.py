"""The driver against an in-process cluster: landing, retries, drops, drain, stop, restart, loud failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makers import make_task

from farm.cluster import ClusterEvent, Finished, Lost, Size
from farm.config import FarmConfig, parse_config
from farm.dispatch import EndlessPlan, FinitePlan, Plan, PlanSpec
from farm.elastic import EngineView
from farm.errors import EngineError, FarmError
from farm.failure_memory import read_failures
from farm.policy_log import PolicyLog
from farm.run_folder import RunFolder
from farm.sandbox.fake import FakeProvider
from farm.service import Farm, FarmParts, Placement
from farm.start import open_run
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Attempt,
    Boundary,
    Cursor,
    Dropped,
    Evidence,
    Failed,
    Graded,
    PolicyVersion,
    Task,
    Trajectory,
)
from farm.worker import Receipt, Returned, bare_trajectory

Behave = Callable[[Attempt], Coroutine[Any, Any, Trajectory]]


def graded(attempt: Attempt, reward: float = 1.0) -> Trajectory:
    evidence = Evidence(statuses={}, resolved=reward == 1.0, patch_applied=True, exit_code=0, log_tail="")
    row = bare_trajectory(
        attempt, Failed(boundary=Boundary.FARM, kind="x", message=""), worker="w", started_at_s=1.0, ended_at_s=2.0
    )
    return replace(row, outcome=Graded(reward=reward, evidence=evidence))


def failed(attempt: Attempt, boundary: Boundary, *, retryable: bool = True) -> Trajectory:
    outcome = Failed(boundary=boundary, kind="broken", message="m", retryable=retryable)
    return bare_trajectory(attempt, outcome, worker="w", started_at_s=1.0, ended_at_s=2.0)


class InProcessCluster:
    """``farm.cluster.Cluster`` as asyncio tasks; graded attempts are put into the log, as a worker does."""

    address = "in-process"

    def __init__(self, log: DirectoryLog, behave: Behave, *, slots: int = 4) -> None:
        self.events: asyncio.Queue[ClusterEvent] = asyncio.Queue()
        self.log, self.behave, self.slots = log, behave, slots
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.submitted: list[Attempt] = []
        self.peak = 0
        self.broken = False

    def submit(self, attempt: Attempt) -> None:
        key = (attempt.episode.id, attempt.number)
        self.submitted.append(attempt)
        self.running[key] = asyncio.create_task(self._run(key, attempt))
        self.peak = max(self.peak, len(self.running))

    async def _run(self, key: tuple[str, int], attempt: Attempt) -> None:
        event: ClusterEvent
        try:
            row = await self.behave(attempt)
            result: Receipt | Returned
            if isinstance(row.outcome, Failed):
                result = Returned(trajectory=row, failed=row.outcome)
            else:
                assert isinstance(row.outcome, Graded)
                first = self.log.append(row)
                result = Receipt(
                    episode_id=row.episode_id,
                    attempt=row.attempt,
                    first=first,
                    reward=row.outcome.reward,
                    end_reason=row.end_reason,
                    turns=0,
                    usage=row.usage,
                    total_tokens=0,
                    oldest_step=None,
                    started_at_s=1.0,
                    ended_at_s=2.0,
                    worker="w",
                )
            event = Finished(episode_id=key[0], number=key[1], result=result)
        except asyncio.CancelledError:
            event = Lost(episode_id=key[0], number=key[1], worker="w", kind="cancelled", message="")
        except ConnectionError:
            event = Lost(episode_id=key[0], number=key[1], worker="w", kind="worker_lost", message="died")
        del self.running[key]
        self.events.put_nowait(event)

    async def cancel(self, episode_id: str, number: int) -> None:
        task = self.running.get((episode_id, number))
        if task is not None:
            task.cancel()

    async def scale(self, workers: int) -> Size:
        if self.broken:
            raise FarmError("the scheduler is gone", kind="cluster")
        return Size(workers=workers, draining=0, slots=self.slots)

    async def close(self) -> None:
        for task in list(self.running.values()):
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)


class Setting:
    """One run folder, and farms on it."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        base: dict[str, Any] = {
            "rollout": {"purpose": "eval", "group_size": 2},
            "retry": {"delay_s": 0.0, "engine": 2},
            "log": {"seal_rows": 4},
        }
        for name, values in sections.items():
            base[name] = {**base.get(name, {}), **values}
        self.config: FarmConfig = parse_config(base)
        self.run_folder: RunFolder = open_run(folder, self.config)
        self.spec = PlanSpec(
            group_size=self.config.rollout.group_size,
            seed=0,
            purpose=self.config.rollout.purpose,
            sampling=self.config.rollout.sampling,
            limits=self.config.limits.limits,
        )

    def tasks(self, count: int) -> list[Task]:
        return [make_task(f"t{index}") for index in range(count)]

    def finite(self, count: int) -> Plan:
        return FinitePlan(self.tasks(count), self.spec)

    async def farm(
        self,
        plan: Plan,
        behave: Behave,
        *,
        slots: int = 4,
        during: Callable[[Farm, InProcessCluster], Coroutine[Any, Any, None]] | None = None,
        policies: PolicyLog | None = None,
        engines: FakeEngines | None = None,
        now: Callable[[], float] = time.time,
    ) -> tuple[Farm, InProcessCluster]:
        with DirectoryLog(self.run_folder.trajectories) as log:
            cluster = InProcessCluster(log, behave, slots=slots)
            farm = Farm(
                FarmParts(
                    run=self.run_folder,
                    config=self.config,
                    plan=plan,
                    cluster=cluster,
                    log=log,
                    policies=policies,
                    fleet=engines,
                    provider=FakeProvider(),
                ),
                now=now,
            )
            beside = asyncio.create_task(during(farm, cluster)) if during else None
            try:
                async with asyncio.timeout(30):
                    await farm.run()
            finally:
                if beside is not None:
                    beside.cancel()
                    await asyncio.gather(beside, return_exceptions=True)
                await cluster.close()
        return farm, cluster

    def rows(self) -> list[Trajectory]:
        log = DirectoryLog(self.run_folder.trajectories, create=False)
        return [row for _, row in log.read(Cursor())]


class FakeEngines:
    """``farm.service.Engines`` with room for ``room`` attempts."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: set[tuple[str, int]] = set()
        self.wanted: list[int] = []

    def place(self, key: tuple[str, int], *, group_id: str, tokens: int) -> Placement | None:
        if len(self.held) >= self.room:
            return None
        self.held.add(key)
        return Placement(url="http://engine", step=self.wanted[-1])

    def witness(self, key: tuple[str, int], *, failed: str | None) -> None:
        assert key in self.held, "told before it is released"

    def release(self, key: tuple[str, int]) -> None:
        self.held.discard(key)

    def capacity(self, tokens: int) -> int:
        return 100  # more than there is room for: attempts that can't be placed must simply wait

    def view(self) -> EngineView | None:
        return EngineView(queued=0, used_tokens=0, max_total_tokens=1, retracted_total=0)

    def want(self, version: PolicyVersion) -> None:
        self.wanted.append(version.step)

    async def supervise(self) -> None:
        await asyncio.Event().wait()

    def status(self) -> list[dict[str, Any]]:
        return []


class HopelessEngines(FakeEngines):
    """None of them will ever hold an episode."""

    def capacity(self, tokens: int) -> int:
        raise EngineError(f"no engine is left that could hold an episode of {tokens} tokens", kind="no_engine")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the driver has no event for what a test waits for
        await asyncio.sleep(0.01)


async def solve(attempt: Attempt) -> Trajectory:
    return graded(attempt)


def test_a_farm_ends_with_the_reason_when_no_engine_will_ever_hold_its_episodes(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    with pytest.raises(EngineError, match="no engine is left"):
        asyncio.run(setting.farm(setting.finite(1), solve, engines=HopelessEngines(room=0)))
    assert json.loads((tmp_path / "farm.json").read_text())["state"] == "failed"


def test_a_finite_plan_lands_every_episode_once_and_seals_it(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    farm, cluster = asyncio.run(setting.farm(setting.finite(6), solve))
    rows = setting.rows()
    assert len(rows) == len({row.episode_id for row in rows}) == 12
    assert set(Counter(row.group_id for row in rows).values()) == {2}
    assert cluster.peak <= 4
    assert farm.finished
    status = json.loads((tmp_path / "farm.json").read_text())
    assert (status["state"], status["episodes"]["landed"]) == ("finished", 12)


def test_failures_are_retried_within_their_budget_and_land_as_failed_beyond(tmp_path: Path) -> None:
    setting = Setting(tmp_path)

    async def behave(attempt: Attempt) -> Trajectory:
        if attempt.episode.task.instance_id == "t0" and attempt.number <= 2:
            return failed(attempt, Boundary.ENGINE)
        if attempt.episode.task.instance_id == "t1":
            return failed(attempt, Boundary.ENGINE)
        if attempt.episode.task.instance_id == "t2":
            return failed(attempt, Boundary.SANDBOX_START, retryable=False)
        return graded(attempt)

    asyncio.run(setting.farm(setting.finite(4), behave))
    by_task: dict[str, list[Trajectory]] = {}
    for row in setting.rows():
        by_task.setdefault(row.instance_id, []).append(row)
    assert all(len(rows) == 2 for rows in by_task.values())
    for row in by_task["t0"]:
        assert isinstance(row.outcome, Graded)
        assert [(p.attempt, p.boundary) for p in row.prior] == [(1, Boundary.ENGINE), (2, Boundary.ENGINE)]
    for row in by_task["t1"]:
        assert isinstance(row.outcome, Failed)
        assert (row.attempt, len(row.prior), row.outcome.kind) == (3, 2, "broken")
    for row in by_task["t2"]:
        assert isinstance(row.outcome, Failed)
        assert (row.attempt, row.prior) == (1, ())


def test_lost_workers_do_not_use_up_the_budget_of_a_boundary(tmp_path: Path) -> None:
    setting = Setting(tmp_path)

    async def behave(attempt: Attempt) -> Trajectory:
        if attempt.number <= 4:
            raise ConnectionError
        return graded(attempt)

    asyncio.run(setting.farm(setting.finite(1), behave))
    for row in setting.rows():
        assert isinstance(row.outcome, Graded)
        assert [p.kind for p in row.prior] == ["worker_lost"] * 4


def test_drain_finishes_what_runs_and_a_second_farm_completes_the_rest(tmp_path: Path) -> None:
    setting = Setting(tmp_path)

    async def first() -> None:
        release = asyncio.Event()

        async def behave(attempt: Attempt) -> Trajectory:
            await release.wait()
            return graded(attempt)

        async def during(farm: Farm, cluster: InProcessCluster) -> None:
            await until(lambda: len(cluster.running) >= 3)
            farm.drain()
            assert farm.draining
            release.set()

        farm, cluster = await setting.farm(setting.finite(5), behave, slots=3, during=during)
        assert len(cluster.submitted) == 3
        assert not farm.finished

    asyncio.run(first())
    assert len(setting.rows()) == 3
    farm, cluster = asyncio.run(setting.farm(setting.finite(5), solve))
    assert len(cluster.submitted) == 7, "nothing that has landed runs again"
    rows = setting.rows()
    assert len(rows) == len({row.episode_id for row in rows}) == 10
    assert farm.finished


def test_stop_gives_up_what_runs_and_it_is_run_again(tmp_path: Path) -> None:
    setting = Setting(tmp_path)

    async def hang(attempt: Attempt) -> Trajectory:
        await asyncio.sleep(3600)
        return graded(attempt)

    async def during(farm: Farm, cluster: InProcessCluster) -> None:
        await until(lambda: bool(cluster.running))
        farm.drain()
        farm.stop()

    asyncio.run(setting.farm(setting.finite(2), hang, during=during))
    assert setting.rows() == []
    asyncio.run(setting.farm(setting.finite(2), solve))
    assert len(setting.rows()) == 4


def test_failures_are_remembered_over_a_restart(tmp_path: Path) -> None:
    setting = Setting(tmp_path)

    async def during(farm: Farm, cluster: InProcessCluster) -> None:
        await until(lambda: len(cluster.submitted) >= 4)
        farm.drain()
        farm.stop()

    async def behave(attempt: Attempt) -> Trajectory:
        if attempt.number == 1:
            return failed(attempt, Boundary.ENGINE)
        await asyncio.sleep(3600)
        return graded(attempt)

    asyncio.run(setting.farm(setting.finite(1), behave, during=during))
    path = setting.run_folder.logs / "failures.jsonl"
    remembered = read_failures(path, frozenset())
    assert {len(failures) for failures in remembered.failures.values()} == {1}
    assert not remembered.forgiven
    with path.open("a") as file:
        file.write('{"episode_id": "torn')
    asyncio.run(setting.farm(setting.finite(1), solve))
    for row in setting.rows():
        assert [(p.attempt, p.boundary) for p in row.prior] == [(1, Boundary.ENGINE)]
        assert row.attempt == 2


def test_when_everything_fails_the_farm_stops_by_itself_and_a_later_one_completes_it(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    count = 40

    async def behave(attempt: Attempt) -> Trajectory:
        if attempt.episode.task.instance_id == "t0":
            return graded(attempt)
        await asyncio.sleep(0.005)
        return failed(attempt, Boundary.GRADER)

    def fast() -> float:
        return time.time() * 100

    farm, _ = asyncio.run(setting.farm(setting.finite(count), behave, now=fast))
    assert not farm.finished
    assert farm.tripped is not None
    assert (farm.tripped.boundary, farm.tripped.kind) == (Boundary.GRADER, "broken")
    assert {row.instance_id for row in setting.rows()} == {"t0"}, "none of it landed as failed"
    status = json.loads((tmp_path / "farm.json").read_text())
    assert status["state"] == "stopped"
    assert "attempts failed at grader (broken)" in status["tripped"]

    remembered = read_failures(setting.run_folder.logs / "failures.jsonl", frozenset())
    assert remembered.forgiven == {(e, f.attempt) for e, fs in remembered.failures.items() for f in fs}
    farm, _ = asyncio.run(setting.farm(setting.finite(count), solve, slots=16))
    assert farm.finished
    rows = setting.rows()
    assert len(rows) == len({row.episode_id for row in rows}) == 2 * count
    assert all(isinstance(row.outcome, Graded) for row in rows)
    assert any(row.prior for row in rows)


def test_attempts_wait_for_room_on_an_engine_without_using_numbers(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    policies = PolicyLog(setting.run_folder.policies)
    policies.publish(0, lambda folder: (folder / "w.safetensors").write_bytes(b"0"), consumed_groups=0)
    engines = FakeEngines(room=2)

    async def behave(attempt: Attempt) -> Trajectory:
        assert len(engines.held) <= 2
        assert attempt.engine_url == "http://engine"
        await asyncio.sleep(0.01)
        return graded(attempt)

    _, cluster = asyncio.run(setting.farm(setting.finite(3), behave, policies=policies, engines=engines))
    assert {attempt.number for attempt in cluster.submitted} == {1}
    assert len(setting.rows()) == 6
    assert not engines.held


def test_the_lead_over_the_trainer_is_bounded_and_stale_groups_are_dropped(tmp_path: Path) -> None:
    setting = Setting(
        tmp_path,
        rollout={"purpose": "rl", "groups_per_step": 1, "max_staleness": 1},
        retry={"delay_s": 0.3, "engine": 100},
        log={"seal_rows": 1},
    )
    policies = PolicyLog(setting.run_folder.policies)

    def publish(step: int, consumed: int) -> None:
        policies.publish(
            step, lambda folder: (folder / "w.safetensors").write_bytes(b"%d" % step), consumed_groups=consumed
        )

    publish(0, 0)
    plan = EndlessPlan(setting.tasks(3), setting.spec)
    doomed = plan.group(0)[1].id

    async def behave(attempt: Attempt) -> Trajectory:
        if attempt.episode.id == doomed:
            return failed(attempt, Boundary.ENGINE)
        return graded(attempt, reward=0.0)

    async def during(farm: Farm, cluster: InProcessCluster) -> None:
        await until(lambda: len(setting.rows()) >= 3)
        opened = {attempt.episode.group_id for attempt in cluster.submitted}
        assert len(opened) == 2, "(max_staleness + 1) * groups_per_step groups ahead of a trainer that consumed none"
        publish(1, 0)
        publish(2, 1)  # two steps on: group 0 can't be trained on within the bound any more
        await until(lambda: any(isinstance(row.outcome, Dropped) for row in setting.rows()))
        farm.drain()

    engines = FakeEngines(room=10)
    asyncio.run(setting.farm(plan, behave, during=during, policies=policies, engines=engines))
    dropped = {row.episode_id: (row.outcome, row.prior) for row in setting.rows() if isinstance(row.outcome, Dropped)}
    assert set(dropped) == {doomed}
    outcome, prior = dropped[doomed]
    assert "stale" in outcome.reason
    assert prior
    assert engines.wanted[0] == 0
    assert engines.wanted[-1] == 2


def test_a_broken_part_breaks_the_farm_loudly(tmp_path: Path) -> None:
    setting = Setting(tmp_path)

    async def slow(attempt: Attempt) -> Trajectory:
        await asyncio.sleep(3600)
        return graded(attempt)

    async def during(_farm: Farm, cluster: InProcessCluster) -> None:
        await until(lambda: bool(cluster.running))
        cluster.broken = True

    with pytest.raises(FarmError, match="scheduler is gone"):
        asyncio.run(setting.farm(setting.finite(1), slow, during=during))
    assert json.loads((tmp_path / "farm.json").read_text())["state"] == "failed"
