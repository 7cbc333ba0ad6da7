"""Real processes, killed at any moment with SIGKILL: the log is readable, whole, and has each episode once."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path

from farm.policy_log import PolicyLog
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor

# Programs for a fork server that has imported the log: a process costs milliseconds. Each gets ``say`` (a pipe's end).
_WRITER = """
from dataclasses import replace
from farm.log_bench import synthetic
from farm.trajectory_log import DirectoryLog
log = DirectoryLog(folder)
say.send("ready")
for number in range(first, first + 100_000):
    trajectory = replace(synthetic(number, turns=2, context=200, output=50), worker=name)
    if log.append(trajectory):
        say.send(trajectory.episode_id)
"""

_SEALER = """
from farm.trajectory_log import DirectoryLog
log = DirectoryLog(folder)
say.send("ready")
while True:
    log.seal()
"""

_PUBLISHER = """
from farm.policy_log import PolicyLog
log = PolicyLog(folder)
say.send("ready")
for step in range(100_000):
    def write(folder):
        for part in range(3):
            (folder / f"model-{part}.safetensors").write_bytes(bytes([step % 256]) * 300_000)
    log.publish(step, write, consumed_groups=step)
    say.send(step)
"""


@contextmanager
def _killed_at_the_end(program: str, **names: object) -> Iterator[Connection]:
    """Run a program until the block ends; what it said can be received after that, up to ``EOFError``."""
    context = multiprocessing.get_context("forkserver")
    # (Arrow imports pandas, where there is one, at the first conversion.)
    context.set_forkserver_preload(["farm.log_bench", "farm.policy_log", "pandas"])
    heard, say = context.Pipe(duplex=False)
    process = context.Process(target=exec, args=(program, {**names, "say": say}))
    process.start()
    say.close()
    try:
        assert heard.poll(60)
        assert heard.recv() == "ready"
        yield heard
    finally:
        process.kill()
        process.join(30)
        process.close()


def _said(heard: Connection) -> list[object]:
    said = []
    with heard:
        while True:
            try:
                said.append(heard.recv())
            except EOFError:
                return said


def test_writers_and_sealers_killed_in_turn_lose_and_double_nothing(tmp_path: Path) -> None:
    source = random.Random(5)
    folder = tmp_path / "log"
    acknowledged: list[tuple[object, str]] = []
    read: list[str] = []
    cursor, reader = Cursor(), DirectoryLog(folder)
    for kill in range(6):
        names = [f"{kill}a", f"{kill}b"]
        with ExitStack() as stack:
            writers = [
                stack.enter_context(_killed_at_the_end(_WRITER, folder=str(folder), name=name, first=7 * kill))
                for name in names
            ]
            sealer = stack.enter_context(_killed_at_the_end(_SEALER, folder=str(folder)))
            assert wait(writers, 60), "no writer came to an append"
            time.sleep(source.uniform(0.0, 0.2))
        _said(sealer)
        for name, heard in zip(names, writers, strict=True):
            acknowledged += [(episode_id, name) for episode_id in _said(heard)]
        for after, trajectory in reader.read(cursor):
            assert after > cursor
            cursor = after
            read.append(trajectory.episode_id)

    assert acknowledged
    with DirectoryLog(folder) as log:
        assert log.landed() >= {episode_id for episode_id, _ in acknowledged}
        log.seal()
        rows = [t for _, t in log.read(Cursor())]
    found = [(t.episode_id, t.worker) for t in rows]
    assert len({episode_id for episode_id, _ in found}) == len(found), "an episode is there twice"
    assert set(acknowledged) <= set(found), "an episode was lost"
    assert [episode_id for episode_id, _ in found][: len(read)] == read, "a reader saw something else"
    assert not list((folder / "quarantine").iterdir())


def test_a_publisher_killed_at_any_moment_leaves_whole_versions(tmp_path: Path) -> None:
    source = random.Random(6)
    folder = tmp_path / "policies"
    published = 0
    for _ in range(5):
        with _killed_at_the_end(_PUBLISHER, folder=str(folder)) as heard:
            assert heard.poll(60), "it came to no publication"
            time.sleep(source.uniform(0.0, 0.2))
        said = _said(heard)
        published = max([published, *(int(str(step)) + 1 for step in said)])
        log = PolicyLog(folder)
        versions = log.versions()
        assert [v.step for v in versions] == list(range(len(versions)))
        assert len(versions) in (published, published + 1)
        assert all(log.verify(v) for v in versions)
        published = len(versions)
