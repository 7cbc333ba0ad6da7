"""Both logs under any interleaving of writers and sealer, with a process or the whole machine dying at any step.

Every process here is a thread with its own log object and its own disk. A disk stops before each step until the
scheduler lets it go on, so that Hypothesis chooses the interleaving. A process that dies makes no further step, and the
write it dies in leaves any number of bytes. When the machine dies, the newest names that no folder fsync has made
durable are taken back as well, as a journalling file system does.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.durable import Disk
from farm.log_bench import synthetic
from farm.policy_log import PolicyLog
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Trajectory

_EPISODES = [replace(synthetic(n, turns=1, context=4, output=2), episode_id=f"e{n}") for n in range(5)]


class Died(BaseException):
    """Raised by every step of a dead process."""


class Machine:
    """What the file system knows but has not made durable: undo functions, oldest first, by folder."""

    def __init__(self, stash: Path) -> None:
        self._stash = stash
        self._names = count()
        self._undurable: list[tuple[Path, Callable[[], None]]] = []

    def keep(self, path: Path) -> Path | None:
        """Another name for what is at ``path`` now."""
        if not path.is_file():
            return None
        kept = self._stash / str(next(self._names))
        kept.hardlink_to(path)
        return kept

    def changed(self, folder: Path, undo: Callable[[], None]) -> None:
        self._undurable.append((folder, undo))

    def synced(self, folder: Path) -> None:
        self._undurable = [entry for entry in self._undurable if entry[0] != folder]

    def settled(self) -> None:
        """A tree is being removed: what came before it in the journal can't be taken back any more."""
        self._undurable.clear()

    def lose_power(self, lost: int) -> None:
        """The newest ``lost`` changes are gone."""
        for _ in range(min(lost, len(self._undurable))):
            self._undurable.pop()[1]()


def _put_back(kept: Path | None, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kept is not None:
        path.hardlink_to(kept)


class MortalDisk(Disk):
    """A disk whose process may die. ``before_step`` says so by raising :class:`Died`."""

    def __init__(self, machine: Machine, before_step: Callable[[], None] = lambda: None) -> None:
        self.machine = machine
        self.before_step = before_step
        self.bytes_at_death = 0
        self.dead = False

    def _step(self) -> None:
        if self.dead:
            raise Died
        try:
            self.before_step()
        except Died:
            self.dead = True
            raise

    def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        try:
            self._step()
        except Died:
            if self.bytes_at_death and not path.exists() and path.parent.exists():
                whole = path.with_name("whole")
                super().write(whole, fill)
                data = whole.read_bytes()
                whole.unlink()
                path.write_bytes(data[: self.bytes_at_death % (len(data) + 1)])
                self.bytes_at_death = 0  # a process dies once
            raise
        super().write(path, fill)
        self.machine.changed(path.parent, partial(path.unlink, missing_ok=True))

    def sync_file(self, path: Path) -> None:
        self._step()
        super().sync_file(path)

    def sync_folder(self, path: Path) -> None:
        self._step()
        super().sync_folder(path)
        self.machine.synced(path)

    def link(self, source: Path, target: Path) -> None:
        self._step()
        super().link(source, target)
        self.machine.changed(target.parent, partial(target.unlink, missing_ok=True))

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        if source.is_dir():
            super().rename(source, target)
            self.machine.changed(target.parent, lambda: super(MortalDisk, self).rename(target, source))
            return
        before, moved = self.machine.keep(target), self.machine.keep(source)
        super().rename(source, target)

        def undo() -> None:
            _put_back(before, target)
            _put_back(moved, source)

        self.machine.changed(target.parent, undo)

    def unlink(self, path: Path) -> None:
        self._step()
        kept = self.machine.keep(path)
        super().unlink(path)
        if kept is not None:
            self.machine.changed(path.parent, partial(_put_back, kept, path))

    def remove_tree(self, path: Path) -> None:
        self._step()
        if path.exists():
            self.machine.settled()
        super().remove_tree(path)


# ------------------------------------------------------------------------------- one process, each step


def _dying_at(step: int) -> Callable[[], None]:
    steps = count()

    def before_step() -> None:
        if next(steps) == step:
            raise Died

    return before_step


def _one_process(folder: Path, disk: Disk, landed: list[str]) -> None:
    with DirectoryLog(folder, disk=disk) as log:
        for batch in (_EPISODES[:2], _EPISODES[2:3], []):
            landed += [t.episode_id for t, won in zip(batch, log.append_many(batch), strict=True) if won]
            log.seal()


@pytest.mark.parametrize(("torn", "lost"), [(0, 0), (1, 1), (5000, 100)])
def test_a_process_dies_at_each_of_its_steps(tmp_path: Path, torn: int, lost: int) -> None:
    for step in count():
        folder, stash = tmp_path / f"log{step}", tmp_path / f"stash{step}"
        stash.mkdir()
        disk = MortalDisk(Machine(stash), _dying_at(step))
        disk.bytes_at_death = torn
        landed: list[str] = []
        try:
            _one_process(folder, disk, landed)
        except Died:
            disk.machine.lose_power(lost)
        _check_log(folder, [(episode_id, "bench") for episode_id in landed])
        shutil.rmtree(folder)
        if not disk.dead:
            break
    assert step > 20


def _check_log(folder: Path, acknowledged: Sequence[tuple[str, str]]) -> list[Trajectory]:
    """A process that starts on what is left finds all that was acknowledged, once, and nothing torn."""
    assert len({episode_id for episode_id, _ in acknowledged}) == len(acknowledged), "two appends won"
    with DirectoryLog(folder) as log:
        assert log.landed() >= {episode_id for episode_id, _ in acknowledged}
        list(log.read(Cursor()))  # readable before the sealer has cleaned up
        log.seal()
        assert log.pending().rows == 0
        rows = [t for _, t in log.read(Cursor())]
        assert {t.episode_id for t in rows} == log.landed()
        found = [(t.episode_id, t.worker) for t in rows]
        assert len({episode_id for episode_id, _ in found}) == len(found), "an episode is in the log twice"
        assert set(acknowledged) <= set(found)
        for t in rows:
            assert t == replace(_EPISODES[int(t.episode_id[1:])], worker=t.worker)
        assert list((folder / "quarantine").iterdir()) == []
        for shard in log.shards():
            assert log.verify(shard)
    return rows


# ------------------------------------------------------------------------- many processes, interleaved


@dataclass
class Process:
    """A thread that makes one disk step whenever the scheduler says so."""

    name: str
    work: Callable[[Process], None]
    disk: MortalDisk
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    dying: bool = False
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._may_go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.disk.before_step = self._wait
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._await_stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def go(self, *, die: bool) -> None:
        """Make one step, or die before it."""
        self.dying = die
        self._may_go.release()
        self._await_stop()

    def _await_stop(self) -> None:
        assert self._stopped.acquire(timeout=30)
        if self.disk.dead or self._finished:
            self._thread.join(30)
            assert not self.alive

    _finished = False

    def _wait(self) -> None:
        self._stopped.release()
        assert self._may_go.acquire(timeout=30)
        if self.dying:
            raise Died

    def _run(self) -> None:
        try:
            self.work(self)
        except Died:
            pass
        except BaseException as error:
            self.failure = error
        self._finished = True
        self._stopped.release()


def _writer(folder: Path, numbers: Sequence[int], process: Process) -> None:
    log = DirectoryLog(folder, disk=process.disk)
    for number in numbers:
        if log.append(replace(_EPISODES[number], worker=process.name)):
            process.acknowledged.append((f"e{number}", process.name))


def _sealer(folder: Path, seals: int, process: Process) -> None:
    with DirectoryLog(folder, disk=process.disk) as log:
        for _ in range(seals):
            log.seal()


PLANS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=3)


@given(plans=PLANS, seals=st.integers(0, 3), data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_interleaving_with_any_deaths(plans: list[list[int]], seals: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, stash = Path(place) / "log", Path(place) / "stash"
        stash.mkdir()
        DirectoryLog(folder)
        machine = Machine(stash)
        processes = [
            Process(f"w{i}", partial(_writer, folder, plan), MortalDisk(machine)) for i, plan in enumerate(plans)
        ]
        if seals:
            processes.append(Process("sealer", partial(_sealer, folder, seals), MortalDisk(machine)))
        power_fails_at = data.draw(st.none() | st.integers(0, 60), label="power fails at")
        reader = _Reader(folder)
        process = processes[0]
        burst = 0  # steps that the same process still makes: long ones let a whole seal fall into one append
        for step in count():
            alive = [p for p in processes if p.alive]
            if not alive:
                break
            if step == power_fails_at:
                for process in alive:
                    process.go(die=True)
                machine.lose_power(data.draw(st.integers(0, 20), label="lost"))
                break
            if not burst or not process.alive:
                process = alive[data.draw(st.integers(0, len(alive) - 1), label="who")]
                burst = data.draw(st.sampled_from([1, 1, 2, 4, 20]), label="steps")
            burst -= 1
            die = data.draw(st.integers(0, 40), label="dies") == 40
            if die:
                process.disk.bytes_at_death = data.draw(st.integers(0, 20_000), label="torn")
            process.go(die=die)
            if step % 5 == 0:
                reader.follow()
        assert [p.failure for p in processes if p.failure] == []
        rows = _check_log(folder, [a for p in processes for a in p.acknowledged])
        if power_fails_at is None:
            reader.follow()
            assert reader.rows == rows


class _Reader:
    """Reads on from its cursor, as a trainer does."""

    def __init__(self, folder: Path) -> None:
        self._log = DirectoryLog(folder)
        self._cursor = Cursor()
        self.rows: list[Trajectory] = []

    def follow(self) -> None:
        for cursor, trajectory in self._log.read(self._cursor):
            assert cursor > self._cursor
            self._cursor = cursor
            self.rows.append(trajectory)


# ------------------------------------------------------------------------------------------ policy log


def _weights(fill: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(fill * 1000)
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("lost", [0, 1, 100])
def test_a_publisher_dies_at_each_of_its_steps(tmp_path: Path, lost: int) -> None:
    for step in count():
        folder, stash = tmp_path / f"policies{step}", tmp_path / f"stash{step}"
        stash.mkdir()
        disk = MortalDisk(Machine(stash), _dying_at(step))
        published = []
        try:
            log = PolicyLog(folder, disk=disk)
            for number, fill in enumerate((b"a", b"b", b"c")):
                published.append(log.publish(number, partial(_weights, fill), consumed_groups=number))
            assert log.prune(keep=1) == [1]
        except Died:
            disk.machine.lose_power(lost)
        again = PolicyLog(folder)
        there = again.versions()
        assert all(again.verify(version) for version in there)
        known = {version.step: version.digest for version in again.history()}
        assert known == known | {version.step: version.digest for version in published}
        if disk.dead:
            assert not published or again.latest() is not None
            last = len(published) - 1
            assert there == [] or there[-1].step in (last, last + 1)
        resumed = again.publish(2, partial(_weights, b"c"), consumed_groups=2)
        assert again.latest() == resumed
        assert not list(folder.glob(".step-*"))
        shutil.rmtree(folder)
        if not disk.dead:
            break
    assert step > 20
