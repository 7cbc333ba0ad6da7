"""farm/cluster/opening.py: its folder, and workers that die while they are set up; and certificates for a folder."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.comm import CommClosedError

from farm.cluster import Cluster, opening
from farm.cluster.certificates import write_credentials
from farm.cluster.opening import OpenCluster
from farm.config import ClusterConfig
from farm.errors import FarmError, UsageError

# ------------------------------------------------------------------------------------------------ set-up


class FakeClient:
    """One worker. ``refusals``: how many times it can't be set up; None in it: it does not answer at all."""

    def __init__(self, *refusals: Exception | None) -> None:
        self.refusals = list(refusals)
        self.set_up = 0
        self.scheduler = SimpleNamespace(address="tls://h:1", farm_plan=self.plan)

    async def plan(self, **_: object) -> dict[str, Any]:
        return {"live": ["w"], "slots": 1, "draining": [], "empty_names": [], "empty_addresses": []}

    async def register_plugin(self, _: object) -> None:
        if self.refusals:
            if (error := self.refusals.pop(0)) is not None:
                raise error
            await asyncio.Event().wait()
        self.set_up += 1


def start(client: Any) -> Cluster:
    opened = OpenCluster(ClusterConfig(), client, SimpleNamespace())
    return asyncio.run(opened.start(workers=1, runner="module:Runner", options={}))


def test_a_worker_that_dies_before_it_is_set_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_ASK_S", 0.05)
    for refusal in (CommClosedError("in <TLS>: Stream is closed"), None):
        client = FakeClient(refusal)
        assert start(client).address == "tls://h:1"
        assert client.set_up == 1
    for refusals, said in (
        ([CommClosedError("first"), CommClosedError("in <TLS>: Stream is closed")], "Stream is closed"),
        ([None, None], "no answer within 0.05 s"),
    ):
        with pytest.raises(FarmError, match=f"could not be set up: .*{said}"):
            start(FakeClient(*refusals))


# ------------------------------------------------------------------------------------------------ folder


def make_folder(folder: Path) -> None:
    """Made, found to be new, and taken away again."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as ends:
            await opening._make_folder(folder, ends)
            assert list(folder.iterdir()) == []
            (folder / "ticket.json").write_text("{}")

    asyncio.run(main())


def test_the_folder_of_a_farm_before_may_take_a_while_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tries, really = tmp_path / "cluster", [0], shutil.rmtree

    def busy(path: Path, *, ignore_errors: bool) -> None:
        tries[0] += 1
        if tries[0] % 3 == 0:  # somebody writes there, or has a file open on NFS
            really(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", busy)
    folder.mkdir()
    (folder / "probe-1").write_text("of a farm before")
    make_folder(folder)
    assert tries == [6]
    assert not folder.exists()


def test_a_folder_that_stays_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_REMOVE_S", 0.0)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cluster").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"cluster: a farm before left it, and it can't be removed"):
        make_folder(tmp_path / "cluster")


# ------------------------------------------------------------------------------------------- certificates


def test_a_folder_that_has_one_file_of_the_three_gets_none(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("of another authority")
        with pytest.raises(UsageError, match=f"{name}: is there already; name a new folder"):
            write_credentials(folder)
        assert [path.name for path in folder.iterdir()] == [name]
