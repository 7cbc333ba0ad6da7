"""The launcher of pods through real kubectl, against a local double of the API (not a cluster), and every object that
the farm makes against the published schemas of several releases."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster_kinds import RUNNER, interpreter, make_attempt, start_cluster
from kube_server import Cluster, kube_cluster

from farm.cluster import Lost
from farm.cluster.kubernetes import KubernetesLauncher
from farm.cluster.kubernetes_pods import WORKER_LABEL, manifests, pod, ticket_secret
from farm.cluster.launcher import Launch, Phase, WorkerState
from farm.cluster.ticket import Credentials, Expected, Ticket
from farm.config import ClusterConfig, KubernetesConfig
from farm.errors import FarmError, UsageError

WAIT_S = 200.0

pytestmark = pytest.mark.timeout(600)
RELEASES = ("1.29", "1.33", "1.37")
SLEEPER = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(600)"


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with kube_cluster(tmp_path / "kube") as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.folder / "kubeconfig"))
        yield cluster


def launch(run: Path, label: str = "farm-0123456789ab", **settings: Any) -> Launch:
    """The "worker" of these tests sleeps until it is told to go."""
    python = run / "python"
    run.mkdir(exist_ok=True)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{SLEEPER}'\n")
    python.chmod(0o755)
    config = {"image": "registry.example/farm:1", "mount": str(run), **settings}
    expected = Expected(software={}, probe="", probe_text="", provider="fake", provider_options={})
    return Launch(
        config=ClusterConfig.model_validate({"kind": "kubernetes", "python": str(python), "kubernetes": config}),
        ticket=Ticket(
            scheduler="tls://127.0.0.1:1", slots=1, credentials=Credentials(ca="", cert="", key=""), expected=expected
        ),
        label=label,
        logs=run / "logs",
        folder=run / "cluster",
    )


def using(launched: Launch, use: Callable[[KubernetesLauncher], Awaitable[None]]) -> None:
    async def main() -> None:
        launcher = KubernetesLauncher(launched)
        try:
            await launcher.prepare()
            await use(launcher)
        finally:
            await launcher.close()

    asyncio.run(main())


async def seen(launcher: KubernetesLauncher, name: str, fits: Callable[[WorkerState], bool]) -> WorkerState:
    async with asyncio.timeout(WAIT_S):
        while not fits(state := (await launcher.look())[name]):  # noqa: ASYNC110 - a server's state
            await asyncio.sleep(0.2)
    return state


def phase(wanted: Phase) -> Callable[[WorkerState], bool]:
    return lambda state: state.phase is wanted


def test_every_object_fits_the_published_schemas() -> None:
    config = KubernetesConfig(image="i", namespace="farms", patch={"nodeSelector": {"pool": "cpu"}})
    objects = manifests(config, run="/runs/first", toml="[cluster]\n")
    objects.append(ticket_secret(name="s", labels={"a": "b"}, ticket="{}"))
    objects += [
        pod(config, name="p", labels={WORKER_LABEL: "w"}, secret="s", command=["a"], leave_s=1.0, provider=provider)
        for provider in ("bubblewrap", "docker", "e2b", "fake")
    ]
    for item in objects:
        for release in RELEASES:
            kubernetes_validate.validate(item, release, strict=True)


def test_farm_manifests_prints_what_kubectl_can_read(tmp_path: Path) -> None:
    toml = tmp_path / "farm.toml"
    toml.write_text('[cluster.kubernetes]\nimage = "registry.example/farm:1"\nnamespace = "farms"\n')
    command = [sys.executable, "-m", "farm.cli", "manifests", "--config", str(toml), "--run"]
    done = subprocess.run([*command, "/runs/first"], capture_output=True, text=True, check=True, timeout=WAIT_S)
    objects = list(yaml.safe_load_all(done.stdout))
    assert {item["kind"] for item in objects} >= {"Deployment", "Role", "NetworkPolicy", "PersistentVolumeClaim"}
    for item in objects:
        kubernetes_validate.validate(item, RELEASES[-1], strict=True)
    told = next(item for item in objects if item["kind"] == "ConfigMap")["data"]["farm.toml"]
    assert told == toml.read_text()
    refused = subprocess.run([*command, "/elsewhere"], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert refused.returncode == 2
    assert "cluster.kubernetes.mount" in refused.stderr


def test_a_pod_begins_leaves_and_ends(tmp_path: Path, kube: Cluster) -> None:
    async def use(launcher: KubernetesLauncher) -> None:
        await launcher.start("worker-0")
        running = await seen(launcher, "worker-0", phase(Phase.RUNNING))
        (name,) = kube.objects["pods"]
        assert name in running.where
        await launcher.withdraw("worker-0")
        assert kube.processes[name].poll() is None, "one that has begun is left alone"
        kube.processes[name].send_signal(signal.SIGKILL)
        ended = await seen(launcher, "worker-0", phase(Phase.ENDED))
        assert ended.code == 137
        await launcher.stop("worker-0")
        assert await launcher.look() == {}
        assert not kube.objects["pods"]
        await launcher.start("worker-1")
        await seen(launcher, "worker-1", phase(Phase.RUNNING))

    using(launch(tmp_path / "run"), use)
    assert not kube.objects["pods"], "closed"
    assert not kube.objects["secrets"]


def test_one_that_waits_is_explained_and_taken_back(tmp_path: Path, kube: Cluster) -> None:
    async def nowhere(launcher: KubernetesLauncher) -> None:
        await launcher.start("worker-0")
        state = await seen(launcher, "worker-0", lambda state: "affinity" in state.message)
        assert (state.phase, state.hopeless) == (Phase.WAITING, False)
        await launcher.withdraw("worker-0")
        assert not kube.objects["pods"]
        assert await launcher.look() == {}

    using(launch(tmp_path / "run", patch={"nodeSelector": {"pool": "none"}}), nowhere)

    async def no_image(launcher: KubernetesLauncher) -> None:
        await launcher.start("worker-0")
        state = await seen(launcher, "worker-0", lambda state: state.hopeless)
        assert "cluster.kubernetes.image" in state.message

    using(launch(tmp_path / "run", image="missing/farm:1"), no_image)


def test_what_a_farm_before_left_is_ended_and_a_stranger_is_not(tmp_path: Path, kube: Cluster) -> None:
    async def leave(label: str, worker: str) -> KubernetesLauncher:
        launcher = KubernetesLauncher(launch(tmp_path / "run", label))
        await launcher.prepare()
        await launcher.start(worker)
        await seen(launcher, worker, phase(Phase.RUNNING))
        return launcher

    async def main() -> None:
        await leave("farm-aaaaaaaaaaaa", "worker-0")  # killed: nothing is closed
        other = await leave("farm-bbbbbbbbbbbb", "worker-0")
        again = KubernetesLauncher(launch(tmp_path / "run", "farm-aaaaaaaaaaaa"))
        await again.prepare()
        await again.start("worker-0")  # the same name, while the old one may still be ending
        await seen(again, "worker-0", phase(Phase.RUNNING))
        async with asyncio.timeout(WAIT_S):
            while len(kube.objects["pods"]) > 2:  # noqa: ASYNC110 - a server's state
                await asyncio.sleep(0.1)
        await again.close()
        assert [name[:17] for name in kube.objects["pods"]] == ["farm-bbbbbbbbbbbb"]
        await other.close()

    asyncio.run(main())
    assert not kube.objects["pods"]
    assert not kube.objects["secrets"]


def test_what_is_wrong_is_said_before_a_worker_starts(
    tmp_path: Path, kube: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: KubernetesLauncher) -> None:
        raise AssertionError("it must not start")

    kube.refuse = "exceeded quota: cpu"
    with pytest.raises(UsageError, match="exceeded quota: cpu"):
        using(launch(tmp_path / "run"), nothing)
    kube.refuse = ""
    with pytest.raises(UsageError, match="restartPolicy"):
        using(launch(tmp_path / "run", patch={"restartPolicy": 7}), nothing)
    with pytest.raises(UsageError, match=r"cluster\.kubernetes\.mount"):
        using(launch(tmp_path / "run", mount="/elsewhere"), nothing)
    with pytest.raises(UsageError, match="kubectl get pods -n other"):
        using(launch(tmp_path / "run", namespace="other"), nothing)
    with pytest.raises(UsageError, match="context"):
        using(launch(tmp_path / "run", context="nope"), nothing)
    assert not kube.objects["pods"]
    assert not kube.objects["secrets"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="kubectl is not on PATH"):
        using(launch(tmp_path / "run"), nothing)


def test_a_quota_met_later_is_for_now_and_a_silent_server_decides_nothing(tmp_path: Path, kube: Cluster) -> None:
    async def use(launcher: KubernetesLauncher) -> None:
        kube.refuse = "exceeded quota: pods"
        with pytest.raises(FarmError, match="exceeded quota"):
            await launcher.start("worker-0")
        kube.refuse = ""
        before = os.environ["KUBECONFIG"]
        broken = json.loads(Path(before).read_text())
        broken["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
        (tmp_path / "broken").write_text(json.dumps(broken))
        os.environ["KUBECONFIG"] = str(tmp_path / "broken")
        try:
            with pytest.raises(FarmError, match="kubectl"):
                await launcher.look()
        finally:
            os.environ["KUBECONFIG"] = before
        assert await launcher.look() == {}

    using(launch(tmp_path / "run"), use)


def test_an_evicted_worker_hands_back_its_episodes(
    tmp_path: Path, kube: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: scheduler, workers, an eviction, the loss as an event, another worker in its place."""
    (tmp_path / "cluster_test_runner.py").write_text(RUNNER)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ClusterConfig.model_validate(
        {
            "kind": "kubernetes", "host": "127.0.0.1", "slots": 2, "workers": "2:3", "python": interpreter(tmp_path),
            "kubernetes": {"image": "registry.example/farm:1", "mount": str(tmp_path)},
        }
    )  # fmt: skip
    (tmp_path / "logs").mkdir()

    async def main() -> None:
        cluster = await start_cluster(
            config, workers=2, runner="cluster_test_runner:Runner", options={"folder": str(tmp_path)},
            scratch=tmp_path / "scratch", run=tmp_path,
        )  # fmt: skip
        try:
            for index in range(4):
                cluster.submit(make_attempt(index, "sleep 600"))
            async with asyncio.timeout(WAIT_S):
                while len(list(tmp_path.glob("started-*"))) < 4:  # noqa: ASYNC110 - files of others
                    await asyncio.sleep(0.1)
                victim = min(kube.objects["pods"])
                kube.delete("pods", victim, {})
                lost = [await cluster.events.get() for _ in range(2)]
                assert all(isinstance(event, Lost) for event in lost)
                assert {event.kind for event in lost if isinstance(event, Lost)} == {"preempted"}
                while (await cluster.scale(2)).workers < 2 or victim in kube.objects["pods"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                assert cluster.events.empty(), "the other worker's go on"
        finally:
            await cluster.close()

    asyncio.run(main())
    assert not kube.objects["pods"]
