"""farm/cluster/kubernetes_pods.py: objects out, and what pods as a server lists them stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from farm.cluster.kubernetes_pods import WORKER_LABEL, inside, manifests, merged, pod, state_of, ticket_secret
from farm.cluster.launcher import REFUSED, Phase
from farm.config import ClusterConfig, KubernetesConfig


def made(provider: str = "e2b", **settings: Any) -> dict[str, Any]:
    return pod(
        KubernetesConfig(image="registry.example/farm:1", claim="runs", mount="/runs", **settings),
        name="farm-1-worker-0",
        labels={WORKER_LABEL: "worker-0"},
        secret="farm-1",
        command=["python", "-m", "farm.cluster.worker"],
        leave_s=90.0,
        provider=provider,
    )


def test_a_pod_gets_the_drain_guard_and_no_more_rights_than_it_needs() -> None:
    spec = made()["spec"]
    assert spec["terminationGracePeriodSeconds"] > 90
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    security = spec["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert made()["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["runs"] == "/runs"


def test_sandboxes_of_the_host_kernel_get_what_they_need_and_only_they() -> None:
    spec = made("bubblewrap")["spec"]
    assert spec["hostUsers"] is False
    assert spec["containers"][0]["securityContext"]["procMount"] == "Unmasked"
    assert "hostUsers" not in made("e2b")["spec"]


def test_a_patch_is_laid_over_the_spec() -> None:
    patch = {
        "nodeSelector": {"pool": "cpu"},
        "containers": [{"name": "worker", "env": [{"name": "A", "value": "1"}]}, {"name": "side", "image": "s"}],
        "tolerations": [{"key": "k"}],
    }
    spec = made(patch=patch)["spec"]
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert [container["name"] for container in spec["containers"]] == ["worker", "side"]
    assert spec["containers"][0]["image"] == "registry.example/farm:1"
    assert {env["name"] for env in spec["containers"][0]["env"]} == {"HOME", "A"}
    assert spec["tolerations"] == [{"key": "k"}]
    assert merged([1, 2], [3]) == [3]


def test_the_ticket_is_a_secret() -> None:
    secret = ticket_secret(name="farm-1", labels={}, ticket="{}")
    assert secret["stringData"] == {"ticket.json": "{}"}


def listed(
    phase: str, *, container: dict[str, Any] | None = None, deleted: bool = False, **status: Any
) -> dict[str, Any]:
    states = {"containerStatuses": [{"state": container}]} if container else {}
    metadata = {"name": "p", **({"deletionTimestamp": "2026-11-30T00:00:00Z"} if deleted else {})}
    return {"metadata": metadata, "status": {"phase": phase, **states, **status}}


def test_a_pod_that_waits_says_for_what() -> None:
    unmet = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    state = state_of(listed("Pending", conditions=[unmet]))
    assert (state.phase, state.hopeless) == (Phase.WAITING, False)  # an autoscaler may bring a node
    assert "0/3 nodes" in state.message
    state = state_of(listed("Pending", container={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}))
    assert state.hopeless
    assert "cluster.kubernetes.image" in state.message
    assert not state_of(listed("Pending", container={"waiting": {"reason": "ContainerCreating"}})).hopeless
    assert state_of(listed("Pending")).phase is Phase.WAITING


def test_a_pod_that_is_being_deleted_is_leaving() -> None:
    assert state_of(listed("Running", container={"running": {}})).leaving is False
    assert state_of(listed("Running", container={"running": {}}, deleted=True)).leaving is True
    assert state_of(listed("Unknown")).phase is Phase.RUNNING, "its node may come back with it"


def test_how_a_pod_ended() -> None:
    def ended(phase: str, code: int, message: str = "", reason: str = "Error", **more: Any) -> Any:
        return state_of(
            listed(phase, container={"terminated": {"exitCode": code, "message": message, "reason": reason}}, **more)
        )

    assert ended("Succeeded", 0).code == 0
    refused = ended("Failed", REFUSED, "some warning\nfarm: host-1: has no bwrap\n")
    assert (refused.code, refused.message) == (REFUSED, "host-1: has no bwrap")
    assert ended("Failed", 137, reason="OOMKilled").message == "OOMKilled"
    assert ended("Failed", 137, reason="OOMKilled").code == 137
    assert ended("Failed", 143, deleted=True).code is None
    assert state_of(listed("Failed", reason="Evicted")).code is None


def test_bad_settings_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="mount"):
        KubernetesConfig(mount="runs")
    with pytest.raises(ValidationError, match=r"kubernetes\.image"):
        ClusterConfig(kind="kubernetes")
    assert inside(tmp_path / "a" / "b", str(tmp_path / "a"))
    assert not inside(tmp_path / "ab", str(tmp_path / "a"))


def test_a_farm_in_the_cluster_is_reached_by_its_workers_only() -> None:
    objects = manifests(KubernetesConfig(image="i", namespace="farms"), run="/runs/first", toml="")
    by_kind = {item["kind"]: item for item in objects}
    assert all(item["metadata"]["namespace"] == "farms" for item in objects)
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "NetworkPolicy"):
        spec = by_kind[kind]["spec"]
        selector = spec["selector"] if kind == "Service" else spec["podSelector"]["matchLabels"]
        assert selector.items() <= labels.items()
    rules = by_kind["Role"]["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"create", "delete", "deletecollection", "list"}
