"""farm/cluster/kubernetes.py against a script that answers as kubectl does; the real one is in tests/clusters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from farm.cluster.kubernetes import KubernetesLauncher
from farm.cluster.kubernetes_pods import WORKER_LABEL
from farm.cluster.launcher import Launch, Phase
from farm.cluster.ticket import Credentials, Expected, Ticket
from farm.config import ClusterConfig
from farm.errors import FarmError

# It lists the file "pods", makes the pod in the file "made", and says of a removal what is in the file "refuse".
KUBECTL = """
case " $* " in
*" create "*) cat >/dev/null; cat "$here/made";;
*" get "*) cat "$here/pods";;
*" delete "*" --filename=- "*) cat >/dev/null; [ ! -e "$here/refuse" ] || { cat "$here/refuse" >&2; exit 1; };;
esac
"""


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kube"
    folder.mkdir()
    path = folder / "kubectl"
    path.write_text(f"#!/bin/bash\nhere={folder}\n{KUBECTL}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    listed(folder)
    (folder / "made").write_text(json.dumps(pod("1", "Pending")))
    return folder


def pod(version: str, phase: str, **metadata: Any) -> dict[str, Any]:
    named = {"name": "farm-1-worker-0", "uid": "u-0", "labels": {WORKER_LABEL: "worker-0"}, **metadata}
    return {"metadata": {**named, "resourceVersion": version}, "status": {"phase": phase}}


def listed(kube: Path, *pods: dict[str, Any]) -> None:
    (kube / "pods").write_text(json.dumps({"items": pods}))


def using(tmp_path: Path, use: Callable[[KubernetesLauncher, list[float]], Awaitable[None]]) -> None:
    expected = Expected(software={}, probe="", probe_text="", provider="fake", provider_options={})
    launch = Launch(
        config=ClusterConfig.model_validate(
            {"kind": "kubernetes", "kubernetes": {"image": "i", "namespace": "farms", "mount": str(tmp_path)}}
        ),
        ticket=Ticket(
            scheduler="tls://h:1", slots=1, credentials=Credentials(ca="", cert="", key=""), expected=expected
        ),
        label="farm-1",
        logs=tmp_path / "logs",
        folder=tmp_path / "cluster",
    )
    clock = [0.0]

    async def main() -> None:
        launcher = KubernetesLauncher(launch, clock=lambda: clock[0])
        try:
            await launcher.prepare()
            await use(launcher, clock)
        finally:
            listed(tmp_path / "kube")
            await launcher.close()

    asyncio.run(main())


def test_one_that_was_stopped_is_not_taken_in_again_while_it_ends(tmp_path: Path, kube: Path) -> None:
    async def use(launcher: KubernetesLauncher, clock: list[float]) -> None:
        await launcher.start("worker-0")
        listed(kube, pod("2", "Running"))
        clock[0] += 10.0
        assert (await launcher.look())["worker-0"].phase is Phase.RUNNING
        (kube / "refuse").write_text("Error from server (InternalError): try again\n")
        with pytest.raises(FarmError, match="worker-0 could not be ended"):
            await launcher.stop("worker-0")
        assert set(await launcher.look()) == {"worker-0"}
        (kube / "refuse").unlink()
        await launcher.stop("worker-0")
        for pods in ([pod("3", "Running", deletionTimestamp="2026-11-30T02:17:24Z")], []):
            listed(kube, *pods)
            clock[0] += 10.0
            assert await launcher.look() == {}

    using(tmp_path, use)


def test_one_that_was_taken_back_has_not_failed_and_one_that_began_just_then_counts(tmp_path: Path, kube: Path) -> None:
    async def taken_back(launcher: KubernetesLauncher, clock: list[float]) -> None:
        await launcher.start("worker-0")
        await launcher.withdraw("worker-0")
        for pods in ([pod("2", "Pending", deletionTimestamp="2026-11-30T02:17:24Z")], []):
            listed(kube, *pods)
            clock[0] += 10.0
            assert {state.phase for state in (await launcher.look()).values()} <= {Phase.WAITING}

    using(tmp_path, taken_back)

    async def began(launcher: KubernetesLauncher, clock: list[float]) -> None:
        await launcher.start("worker-0")
        (kube / "refuse").write_text("Error from server (Conflict): the resourceVersion does not match\n")
        await launcher.withdraw("worker-0")
        listed(kube, pod("2", "Running"))
        assert (await launcher.look())["worker-0"].phase is Phase.RUNNING
        listed(kube)
        clock[0] += 10.0
        assert (await launcher.look())["worker-0"].phase is Phase.ENDED

    using(tmp_path, began)
