from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from farm.durable import FolderLock
from farm.errors import FarmError, UsageError
from farm.policy_log import PolicyLog


def weights(fill: bytes = b"w", config: str = "{}") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(fill * 100)
        (folder / "config.json").write_text(config)

    return write


def test_versions_come_back_by_step(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    assert log.latest() is None
    assert log.versions() == []
    for step in (0, 1, 12):
        log.publish(step, weights(b"%d" % step), consumed_groups=16 * step)
    latest = log.latest()
    assert latest is not None
    assert (latest.name, latest.consumed_groups) == ("step-000012", 192)
    assert [v.step for v in PolicyLog(tmp_path / "policies", create=False).versions()] == [0, 1, 12]
    assert log.get(1) == log.versions()[1]
    assert log.get(2) is None


def test_the_digest_is_that_of_the_weights(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    version = log.publish(0, weights(), consumed_groups=0)
    line = f"{hashlib.sha256(b'w' * 100).hexdigest()}  model.safetensors\n"
    assert version.digest == hashlib.sha256(line.encode()).hexdigest()
    assert log.verify(version)
    (Path(version.path) / "model.safetensors").write_bytes(b"x" * 100)
    assert not log.verify(version)


def test_publishing_the_same_bytes_again_changes_nothing(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    first = log.publish(3, weights(), consumed_groups=4)
    assert log.publish(3, weights(), consumed_groups=4) == first
    assert PolicyLog(tmp_path / "policies").publish(3, weights(), consumed_groups=4) == first


@pytest.mark.parametrize(("fill", "groups"), [(b"x", 4), (b"w", 5)])
def test_publishing_something_else_under_the_same_step_is_refused(tmp_path: Path, fill: bytes, groups: int) -> None:
    log = PolicyLog(tmp_path / "policies")
    first = log.publish(3, weights(), consumed_groups=4)
    with pytest.raises(UsageError, match="step-000003 is published already"):
        log.publish(3, weights(fill), consumed_groups=groups)
    assert log.versions() == [first]
    assert log.verify(first)


def test_a_publication_that_fails_leaves_nothing(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")

    def broken(folder: Path) -> None:
        weights()(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        log.publish(0, broken, consumed_groups=0)
    with pytest.raises(FarmError, match="nothing was written"):
        log.publish(0, lambda _: None, consumed_groups=0)
    with pytest.raises(UsageError, match="steps from 0"):
        log.publish(-1, weights(), consumed_groups=0)
    assert log.versions() == []
    assert sorted(path.name for path in log.path.iterdir()) == ["log.json", "publisher.lock"]


def test_one_publisher_at_a_time(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    other = FolderLock(log.path / "publisher.lock", "publisher")
    other.acquire()
    with pytest.raises(UsageError, match="is the publisher already"):
        log.publish(0, weights(), consumed_groups=0)
    other.release()
    log.publish(0, weights(), consumed_groups=0)


def test_what_a_dead_publisher_left_is_cleared_away(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    stray = log.path / ".step-000007.1-abc.tmp"
    stray.mkdir()
    (stray / "model.safetensors").write_bytes(b"half")
    assert log.versions() == []
    log.publish(0, weights(), consumed_groups=0)
    assert not stray.exists()


def test_prune_keeps_the_first_and_the_newest_and_what_is_known_of_the_others(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    for step in range(8):
        log.publish(step, weights(b"%d" % step), consumed_groups=step)
    known = log.history()
    assert log.prune(keep=3) == [1, 2, 3, 4]
    assert log.prune(keep=3) == log.prune(keep=99) == []
    again = PolicyLog(log.path)
    assert [v.step for v in again.versions()] == [0, 5, 6, 7]
    assert again.history() == known
    assert again.get(4) is None
    assert not Path(known[4].path).exists()
    assert PolicyLog(log.path).prune(keep=1) == [5, 6]
    with pytest.raises(UsageError, match="at least 1"):
        log.prune(keep=0)


def test_a_pruned_version_is_still_published(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    for step in range(3):
        log.publish(step, weights(b"%d" % step), consumed_groups=step)
    published = log.get(1)
    log.prune(keep=1)
    assert log.publish(1, weights(b"1"), consumed_groups=1) == published, "a trainer that resumes from before it"
    assert log.get(1) is None
    with pytest.raises(UsageError, match="step-000001 is published already"):
        log.publish(1, weights(b"x"), consumed_groups=1)


def test_wait_returns_the_newest_or_nothing(tmp_path: Path) -> None:
    log = PolicyLog(tmp_path / "policies")
    log.publish(0, weights(), consumed_groups=0)

    async def main() -> None:
        assert await log.wait(0, 0.0) is None
        assert await log.wait(-1, 0.0) == log.get(0)
        waiting = asyncio.create_task(log.wait(0, 20.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(log.publish, 2, weights(b"2"), consumed_groups=1)
        assert await waiting == log.get(2)

    asyncio.run(main())


def test_foreign_and_other_schemas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a rollout-farm policy log"):
        PolicyLog(tmp_path / "none", create=False)
    log = PolicyLog(tmp_path / "policies")
    version = log.publish(0, weights(), consumed_groups=0)
    record = Path(version.path) / "policy.json"
    for text, expected in [
        (json.dumps(json.loads(record.read_text()) | {"schema_version": 9}), "schema version 9"),
        (json.dumps(json.loads(record.read_text()) | {"step": 1}), "says step 1, its name says 0"),
        ("{", "unreadable"),
    ]:
        record.write_text(text)
        with pytest.raises(UsageError, match=expected):
            PolicyLog(tmp_path / "policies").latest()
    (log.path / "log.json").write_text('{"format": "rollout-farm policy log", "schema_version": 2}')
    with pytest.raises(UsageError, match="use a newer rollout-farm"):
        PolicyLog(tmp_path / "policies")
