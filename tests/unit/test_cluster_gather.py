"""Results that are gathered together: one whose worker is gone costs the others nothing but time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farm.cluster import dask_cluster
from farm.cluster.dask_cluster import DaskCluster
from farm.errors import FarmError


class Client:
    """Of Dask's client: gathers what there is, and waits for ever where ``lost`` is among it."""

    async def gather(self, futures: dict[str, str], *, errors: str) -> dict[str, str]:
        assert errors == "skip"
        if "lost" in futures.values():
            await asyncio.Event().wait()
        return {key: f"result of {key}" for key in futures}


def test_a_result_that_never_comes_does_not_spoil_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "_GATHER_S", 0.1)

    async def main() -> list[Any]:
        anything: Any = Client()
        cluster = DaskCluster(anything, anything)
        futures: dict[str, Any] = {"a": "there", "b": "lost", "c": "there"}
        fetched = (cluster._fetch(key, future) for key, future in futures.items())
        return await asyncio.gather(*fetched, return_exceptions=True)

    first, lost, last = asyncio.run(main())
    assert (first, last) == ("result of a", "result of c")
    assert isinstance(lost, FarmError)
    assert lost.kind == "gather"
