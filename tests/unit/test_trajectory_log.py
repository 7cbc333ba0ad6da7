from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farm.durable import Disk
from farm.errors import FarmError, UsageError
from farm.log_bench import synthetic
from farm.trajectory_codec import decode, encode
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Trajectory


def episode(number: int, worker: str = "w") -> Trajectory:
    return replace(synthetic(number, turns=2, context=8, output=3), episode_id=f"e{number}", worker=worker)


def rows(log: DirectoryLog) -> list[Trajectory]:
    return [t for _, t in log.read(Cursor())]


# ----------------------------------------------------------------------------------------- two at once


class _Meanwhile(Disk):
    """Lets something happen right before, or right after, the first link."""

    def __init__(self, *, before: Callable[[], object] = bool, after: Callable[[], object] = bool) -> None:
        self._before, self._after = [before], [after]

    def link(self, source: Path, target: Path) -> None:
        while self._before:
            self._before.pop()()
        super().link(source, target)
        while self._after:
            self._after.pop()()


def test_an_append_that_was_overtaken_by_another_and_its_seal_loses(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:

        def overtake() -> None:
            assert log.append(episode(1, "fast"))
            assert log.seal() is not None

        slow = DirectoryLog(tmp_path / "log", disk=_Meanwhile(before=overtake))
        assert not slow.append(episode(1, "slow"))
        assert log.pending().rows == 0
        assert [t.worker for t in rows(log)] == ["fast"]


def test_an_append_that_is_sealed_before_it_returns_wins(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        slow = DirectoryLog(tmp_path / "log", disk=_Meanwhile(after=log.seal))
        assert slow.append(episode(1))
        assert rows(log) == [episode(1)]


def test_there_is_one_sealer(tmp_path: Path) -> None:
    first, second = DirectoryLog(tmp_path / "log"), DirectoryLog(tmp_path / "log")
    first.append(episode(1))
    first.seal()
    second.append(episode(2))
    with pytest.raises(UsageError, match=f"process {os.getpid()} is the sealer already"):
        second.seal()
    first.close()
    assert second.seal() is not None
    second.close()


def test_append_many_says_which_landed(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "log")
    log.append(episode(1))
    assert log.append_many(episode(n) for n in (0, 1, 2, 2)) == [True, False, True, False]
    assert log.landed() == {"e0", "e1", "e2"}
    assert log.append_many([]) == []


# -------------------------------------------------------------------------------------------- recovery


def test_a_torn_open_file_is_put_aside_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        for number in range(4):
            log.append(episode(number))
        opened = tmp_path / "log" / "open"
        whole = (opened / "e1.arrow").read_bytes()
        (opened / "e1.arrow").write_bytes(whole[: len(whole) // 2])
        (opened / "e2.arrow").write_bytes(whole)  # another episode's file
        (opened / "e3.arrow").write_bytes(b"")
        log.seal()
        assert [t.episode_id for t in rows(log)] == ["e0"]
        assert log.landed() == {"e0"}
        reasons = [path.read_text() for path in sorted((tmp_path / "log" / "quarantine").glob("*.reason.txt"))]
        assert [reason.split(",")[0].strip() for reason in reasons] == ["no end mark", "holds episode e1", "0 bytes"]
        assert "quarantined" in caplog.text
        assert log.append(episode(1))  # re-issued
        log.seal()
        assert {t.episode_id for t in rows(log)} == {"e0", "e1"}


def test_open_files_that_are_in_a_shard_already_are_removed(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        log.append(episode(1))
        left = tmp_path / "log" / "open" / "e1.arrow"
        data = left.read_bytes()
        log.seal()
        left.write_bytes(data)
    with DirectoryLog(tmp_path / "log") as log:
        assert not log.append(episode(1))
        assert log.seal() is None
        assert not left.exists()
        assert rows(log) == [episode(1)]


def test_the_sealer_clears_away_old_temporary_files_only(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        folder = tmp_path / "log" / "open" / "tmp"
        for name, age_s in (("old.tmp", 3600), ("new.tmp", 1)):
            (folder / name).write_bytes(b"half")
            at = (folder / name).stat().st_mtime - age_s
            os.utime(folder / name, (at, at))
        log.seal()
        assert [path.name for path in folder.iterdir()] == ["new.tmp"]


def test_a_lost_sidecar_is_made_up_for(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        log.append(episode(1))
        shard = log.seal()
    (tmp_path / "log" / "shard-00000000.json").unlink()
    again = DirectoryLog(tmp_path / "log")
    assert again.shards() == [shard]
    assert again.verify(again.shards()[0])


def test_an_altered_shard_is_noticed(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        log.append(episode(1))
        shard = log.seal()
    assert shard is not None
    data = bytearray(Path(shard.path).read_bytes())
    data[100] ^= 1
    Path(shard.path).write_bytes(data)
    again = DirectoryLog(tmp_path / "log")
    assert not again.verify(shard)
    with pytest.raises(FarmError, match=r"shard-00000000\.parquet: unreadable") as caught:
        rows(again)
    assert caught.value.kind == "corrupt_shard"


# ------------------------------------------------------------------------------------------- bad input


def test_folders_that_are_not_a_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a rollout-farm trajectory log"):
        DirectoryLog(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt' but no log\.json"):
        DirectoryLog(tmp_path / "foreign")
    with pytest.raises(UsageError, match="is a file"):
        DirectoryLog(tmp_path / "foreign" / "notes.txt")


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ({"format": "rollout-farm trajectory log", "schema_version": 99}, "schema version 99, .*; use a newer"),
        (
            {"format": "rollout-farm trajectory log", "schema_version": 0},
            "schema version 0, .*that wrote it",
        ),
        ({"format": "rollout-farm policy log", "schema_version": 1}, "is a 'rollout-farm policy log'"),
        ([], "unreadable"),
    ],
)
def test_other_schemas_are_refused(tmp_path: Path, marker: object, expected: str) -> None:
    DirectoryLog(tmp_path / "log")
    (tmp_path / "log" / "log.json").write_text(json.dumps(marker))
    with pytest.raises(UsageError, match=expected) as caught:
        DirectoryLog(tmp_path / "log")
    assert "\n" not in str(caught.value)


def test_a_parquet_file_from_elsewhere_is_refused(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "log")
    pq.write_table(pa.table({"episode_id": ["x"]}), tmp_path / "log" / "shard-00000000.parquet")
    with pytest.raises(UsageError, match="is not a trajectory file"):
        log.shards()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 300])
def test_an_id_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    log = DirectoryLog(tmp_path / "log")
    with pytest.raises(UsageError, match="episode id"):
        log.append(replace(episode(1), episode_id=name))


# ---------------------------------------------------------------------------------------------- values


def test_text_that_is_not_unicode_does_not_lose_the_episode() -> None:
    trajectory = replace(episode(1), patch="a\ud800b")
    assert decode(encode([trajectory])) == [replace(trajectory, patch="a?b")]


def test_log_probs_are_kept_as_float32() -> None:
    turn = replace(episode(1).turns[0], output_logprobs=(-0.1, -0.5, float("-inf")))
    (kept,) = decode(encode([replace(episode(1), turns=(turn,))]))
    assert kept.turns[0].output_logprobs == (-0.10000000149011612, -0.5, float("-inf"))


def test_a_value_that_does_not_fit_is_an_error_not_a_wrong_number() -> None:
    turn = replace(episode(1).turns[0], output_ids=(2**31,))
    with pytest.raises(FarmError, match="episode e1 can't be stored") as caught:
        encode([replace(episode(1), turns=(turn,))])
    assert caught.value.kind == "unstorable"


def test_find_looks_everywhere(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        log.append(episode(1))
        log.seal()
        log.append(episode(2))
        assert [log.find(f"e{n}") for n in (1, 2, 3)] == [episode(1), episode(2), None]


def test_pending_says_what_waits(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as log:
        assert log.pending().oldest_at_s is None
        log.append_many([episode(1), episode(2)])
        pending = log.pending()
        assert pending.rows == 2
        assert pending.bytes > 1000
        assert pending.oldest_at_s is not None
        log.seal()
        assert log.pending().rows == 0
