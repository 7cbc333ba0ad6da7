"""What the farm says to Kubernetes and what its answers mean. PURE: records in, records out.

Not run on a cluster: the objects are checked against the published schemas, the launcher against a local server.

The drain guard is the same as everywhere: a surplus worker is drained and closes by itself, and its pod then ends. What
Kubernetes takes away (an eviction, a drained node, a preemption) gets SIGTERM and ``terminationGracePeriodSeconds``,
which is ``cluster.leave_s`` and what the worker needs afterwards; a preStop hook would do no more than that signal. The
cluster autoscaler is told not to evict workers at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.cluster.launcher import REFUSED, Phase, WorkerState
from farm.config import KubernetesConfig

APP = {"app.kubernetes.io/name": "rollout-farm"}
FARM_LABEL = "rollout-farm/farm"
START_LABEL = "rollout-farm/start"
WORKER_LABEL = "rollout-farm/worker"
TICKET_FOLDER = "/etc/rollout-farm"
TICKET_FILE = "ticket.json"

_FARM = "rollout-farm"
_TOML = "farm.toml"
_PORT = 8786
_RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "deletecollection", "list"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "deletecollection"]},
]

_END_S = 50  # what a worker needs to end after leave_s, however bad things are

# Why a container does not begin -> what to do. Others (an image that is being pulled) end by waiting.
_HOPELESS = {
    "CreateContainerConfigError": "correct what cluster.kubernetes.patch refers to (a secret or config map)",
    "ErrImageNeverPull": "put the image on the nodes, or allow them to pull it",
    "ImagePullBackOff": "correct cluster.kubernetes.image, or give cluster.kubernetes.patch its imagePullSecrets",
    "InvalidImageName": "correct cluster.kubernetes.image",
}


def pod(
    config: KubernetesConfig,
    *,
    name: str,
    labels: Mapping[str, str],
    secret: str,
    command: Sequence[str],
    leave_s: float,
    provider: str,
) -> dict[str, Any]:
    """One worker. ``provider``: of its sandboxes, which decides what the container must be allowed to do."""
    resources = {"cpu": config.cpu, "memory": config.memory}
    container: dict[str, Any] = {
        "name": "worker",
        "image": config.image,
        "command": list(command),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {
            "requests": {key: value for key, value in resources.items() if value},
            "limits": {"memory": config.memory} if config.memory else {},
        },
        "securityContext": _container_security(provider),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "runs", "mountPath": config.mount},
            {"name": "ticket", "mountPath": TICKET_FOLDER, "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # the farm decides what comes in its place
        "terminationGracePeriodSeconds": int(leave_s) + _END_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # then orphans of sandboxes are reaped, and the worker is not process 1
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": config.user,
            "runAsGroup": config.user,
            "fsGroup": config.user,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": config.claim}},
            {"name": "ticket", "secret": {"secretName": secret, "defaultMode": 0o440}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }
    if provider == "bubblewrap":
        spec["hostUsers"] = False  # procMount Unmasked is only allowed with it
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**APP, **labels},
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
        },
        "spec": spec,
    }
    return {**made, "spec": merged(spec, config.patch)}


def _container_security(provider: str) -> dict[str, Any]:
    least = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if provider == "bubblewrap":
        # Sandboxes are user namespaces with mounts of their own, a /proc included; the usual seccomp profile and the
        # masked /proc forbid both. What runs in them is behind the farm's own filter.
        return {**least, "seccompProfile": {"type": "Unconfined"}, "procMount": "Unmasked"}
    return {**least, "seccompProfile": {"type": "RuntimeDefault"}}


def ticket_secret(*, name: str, labels: Mapping[str, str], ticket: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {**APP, **labels}},
        "type": "Opaque",
        "stringData": {TICKET_FILE: ticket},
    }


def merged(base: Any, patch: Any) -> Any:
    """``patch`` over ``base``: tables key by key; lists of named things by their names; anything else replaces."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        return {**base, **{key: merged(base[key], value) if key in base else value for key, value in patch.items()}}
    if _named(base) and _named(patch):
        changes = {item["name"]: item for item in patch}
        kept = [merged(item, changes.pop(item["name"], {})) for item in base]
        return [*kept, *changes.values()]
    return patch


def _named(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) and "name" in item for item in value)


def state_of(listed: Mapping[str, Any]) -> WorkerState:
    """What one pod, as the API server lists it, stands for."""
    status, metadata = listed.get("status", {}), listed["metadata"]
    where = f"pod {metadata['name']}"
    leaving = "deletionTimestamp" in metadata
    phase = status.get("phase")
    containers = status.get("containerStatuses") or [{}]
    container: Mapping[str, Any] = containers[0].get("state", {})
    if phase == "Pending":
        return _waiting(status, container.get("waiting", {}), where)
    if phase not in {"Succeeded", "Failed"}:  # Running, or Unknown: its node does not answer
        return WorkerState(phase=Phase.RUNNING, where=where, leaving=leaving)
    ended = container.get("terminated", {})
    told = str(ended.get("message", "")).strip().rpartition("\n")[2].strip()
    code = 0 if phase == "Succeeded" else ended.get("exitCode")
    if code == REFUSED and told.startswith("farm: "):
        return WorkerState(phase=Phase.ENDED, where=where, code=REFUSED, message=told.removeprefix("farm: "))
    reason = status.get("reason") or ended.get("reason") or phase  # Evicted, OOMKilled, Error
    if status.get("reason") or leaving:
        code = None  # it was told to go
    return WorkerState(phase=Phase.ENDED, where=where, code=code, message=f"{reason}: {told}".rstrip(": "))


def _waiting(status: Mapping[str, Any], container: Mapping[str, Any], where: str) -> WorkerState:
    reason, said = str(container.get("reason", "")), str(container.get("message", ""))
    if not reason:
        unmet = [item for item in status.get("conditions") or () if item.get("status") == "False"]
        if unmet:
            reason, said = str(unmet[0].get("reason", "")), str(unmet[0].get("message", ""))
    remedy = _HOPELESS.get(reason, "")
    told = f"{where} waits ({': '.join(filter(None, (reason, said))) or 'for a node'})"
    return WorkerState(
        phase=Phase.WAITING, where=where, message=f"{told}; {remedy}" if remedy else told, hopeless=bool(remedy)
    )


def inside(run: Path, mount: str) -> bool:
    """The run folder lies in what the claim holds, at the same path here and in the pods."""
    return run.is_relative_to(mount)


# ------------------------------------------------------------------------------- a farm in the cluster itself


def manifests(config: KubernetesConfig, *, run: str, toml: str) -> list[dict[str, Any]]:
    """Everything for a farm that runs in the cluster too: rights to make worker pods, the claim, the scheduler's name
    and who may reach it, and the farm, which works on the run folder ``run`` by the configuration file ``toml``."""
    driver = {**APP, "app.kubernetes.io/component": "farm"}
    namespace = {"namespace": config.namespace} if config.namespace else {}

    def made(api: str, kind: str, name: str = _FARM, **parts: Any) -> dict[str, Any]:
        return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": APP, **namespace}, **parts}

    workers = {"podSelector": {"matchExpressions": [{"key": WORKER_LABEL, "operator": "Exists"}]}}
    template = {"metadata": {"labels": driver}, "spec": _farm_spec(config, run)}
    return [
        made("v1", "ServiceAccount"),
        made("rbac.authorization.k8s.io/v1", "Role", rules=_RULES),
        made(
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": _FARM},
            subjects=[{"kind": "ServiceAccount", "name": _FARM, **namespace}],
        ),
        made(
            "v1",
            "PersistentVolumeClaim",
            name=config.claim,
            spec={"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
        ),
        made("v1", "ConfigMap", data={_TOML: toml}),
        made(
            "v1",
            "Service",
            spec={
                "clusterIP": "None",  # its name is the farm's own address
                "publishNotReadyAddresses": True,
                "selector": driver,
                "ports": [{"name": "scheduler", "port": _PORT, "targetPort": "scheduler"}],
            },
        ),
        made(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            spec={
                "podSelector": {"matchLabels": driver},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [workers], "ports": [{"protocol": "TCP", "port": "scheduler"}]}],
            },
        ),
        made(
            "apps/v1",
            "Deployment",
            spec={
                "replicas": 1,
                "strategy": {"type": "Recreate"},  # one farm per run folder
                "selector": {"matchLabels": driver},
                "template": template,
            },
        ),
    ]


def _farm_spec(config: KubernetesConfig, run: str) -> dict[str, Any]:
    owner = {"runAsNonRoot": True, "runAsUser": config.user, "runAsGroup": config.user, "fsGroup": config.user}
    command = ["farm", "up", "--cluster=kubernetes", f"--run={run}", f"--config={TICKET_FOLDER}/{_TOML}"]
    return {
        "serviceAccountName": _FARM,
        "terminationGracePeriodSeconds": 3600,  # SIGTERM drains: what runs may end
        "securityContext": owner,
        "containers": [
            {
                "name": "farm",
                "image": config.image,
                "command": [*command, f"--set=cluster.host={_FARM}", f"--set=cluster.port={_PORT}"],
                "env": [{"name": "HOME", "value": "/tmp"}],
                "ports": [{"name": "scheduler", "containerPort": _PORT}],
                "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
                "securityContext": _container_security(""),
                "volumeMounts": [
                    {"name": "runs", "mountPath": config.mount},
                    {"name": "configuration", "mountPath": TICKET_FOLDER, "readOnly": True},
                    {"name": "scratch", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": config.claim}},
            {"name": "configuration", "configMap": {"name": _FARM}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }
