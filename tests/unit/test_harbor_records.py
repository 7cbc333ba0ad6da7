"""The records of open Harbor environments: what a sweep of another process finds, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from farm.sandbox.harbor_records import Records
from farm.sandbox.state import state_directory

_OTHER = """
import sys
from farm.sandbox.harbor_records import Records
Records("docker").add(session="farm-theirs", owner="o", deadline_at_s=100.0, folder="/none", network=False)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", None)
    return state_directory() / "harbor"


def opened(session: str, *, environment: str = "docker", deadline_at_s: float = 100.0) -> Records:
    records = Records(environment)
    records.add(session=session, owner="o", deadline_at_s=deadline_at_s, folder="/none", network=False)
    return records


def overdue(now_s: float, *, environment: str = "docker") -> list[str]:
    with Records(environment).overdue(now_s=now_s) as found:
        return [record.session for record in found]


def test_one_in_time_is_left_alone_and_an_overdue_one_is_over() -> None:
    owner = opened("farm-1")
    opened("farm-2", deadline_at_s=200.0)
    assert overdue(50.0) == []
    assert not owner.is_over("farm-1")
    assert overdue(150.0, environment="modal") == []  # of another kind: this sweeper can't stop them
    assert overdue(150.0) == ["farm-1"]
    assert owner.is_over("farm-1")
    assert not owner.is_over("farm-2")


def test_one_of_a_dead_owner_is_found_in_time() -> None:
    subprocess.run([sys.executable, "-c", _OTHER], check=True, env=dict(os.environ))
    opened("farm-mine")
    assert overdue(50.0) == ["farm-theirs"]


def test_one_that_was_not_stopped_is_found_again_until_it_is(directory: Path) -> None:
    records = opened("farm-1")
    assert overdue(150.0) == ["farm-1"]
    assert overdue(150.0) == ["farm-1"]
    records.remove("farm-1")
    assert overdue(150.0) == []
    records = opened("farm-2")
    records.end("farm-2")
    assert overdue(50.0) == ["farm-2"]
    assert overdue(100.0 + 48 * 3_600.0) == []  # two days: given up
    assert list(directory.iterdir()) == []


def test_two_sweeps_share_the_work() -> None:
    opened("farm-1")
    with Records("docker").overdue(now_s=150.0) as first:
        assert [record.session for record in first] == ["farm-1"]
        assert overdue(150.0) == []


def test_what_is_no_record_is_passed_over(directory: Path) -> None:
    opened("farm-1")
    (directory / "farm-0.json").write_text("{")
    (directory / "farm-3.json").write_text('{"session": "x"}')
    assert overdue(150.0) == ["farm-1"]
