"""Workers as pods of Kubernetes: one pod per worker, through the installed ``kubectl``.

Not run on a cluster; see :mod:`farm.cluster.kubernetes_pods`. kubectl rather than a client library: it has the
operator's contexts, tokens and sign-in plugins, a farm in a pod uses the service account by the same program, and the
requests that a launcher needs are few (list, make, remove). They are sent as they are (``--raw``), nothing is looked up
before.

dask-kubernetes is not used: its operator closes workers by its own choice, and is one more thing to install with rights
over the whole cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from farm.cluster.commands import Answer, last_line, run_command
from farm.cluster.kubernetes_pods import (
    FARM_LABEL,
    START_LABEL,
    TICKET_FILE,
    TICKET_FOLDER,
    WORKER_LABEL,
    inside,
    pod,
    state_of,
    ticket_secret,
)
from farm.cluster.launcher import Launch, Phase, WorkerState, worker_command
from farm.errors import FarmError, UsageError

_COMMAND_S = 30.0
_LOOK_S = 2.0
_END_S = 20.0  # beyond what a pod gets to end

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pod:
    """As last seen; ``version`` changes with whatever happens to it."""

    uid: str
    version: str
    state: WorkerState


class KubernetesLauncher:
    """Implements :class:`farm.cluster.launcher.WorkerLauncher`."""

    def __init__(self, launch: Launch, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._launch = launch
        self._config = launch.config.kubernetes
        self._clock = clock
        self._start = secrets.token_hex(2)  # pods of a farm before may still be ending under its names
        self._secret = f"{launch.label}-{self._start}"
        self._namespace = self._config.namespace
        self._pods: dict[str, _Pod] = {}
        self._withdrawn: set[str] = set()
        self._forgotten: set[str] = set()  # uids of pods that are told to end and may still be listed
        self._looked_at_s: float | None = None

    async def prepare(self) -> None:
        config = self._config
        run = self._launch.logs.parent
        if shutil.which("kubectl") is None:
            raise UsageError(
                "cluster.kind 'kubernetes': kubectl is not on PATH; install it, with a configuration that "
                "reaches the cluster"
            )
        if not inside(run, config.mount):
            raise UsageError(
                f"cluster.kubernetes.mount {config.mount!r}: the run folder {run} is not in it; mount the claim's "
                "storage there on this machine too, and put the run folder into it"
            )
        if not self._namespace:
            found = await self._run("config", "view", "--minify", "--output=jsonpath={..namespace}")
            self._namespace = found.out.strip() or "default"
        left = await self._run("delete", "--raw", self._uri("pods", f"{FARM_LABEL}={self._launch.label}"))
        if left.code:
            raise UsageError(
                f"cluster.kind 'kubernetes': {_line(left.error)}; does `kubectl get pods -n {self._namespace}` work "
                "here, and may its user list, create and delete pods and secrets?"
            )
        await self._run("delete", "--raw", self._uri("secrets", f"{FARM_LABEL}={self._launch.label}"))
        secret = ticket_secret(name=self._secret, labels=self._labels, ticket=self._launch.ticket.to_json())
        self._must(await self._make("secrets", secret), "the secret with the farm's ticket")
        self._must(await self._make("pods", self._pod("check"), "dryRun=All"), "a worker's pod")

    def _must(self, answer: Answer, what: str) -> None:
        if answer.code:
            raise UsageError(
                f"cluster.kubernetes: {what} is refused: {_line(answer.error)}; correct that key of the section"
            )

    async def start(self, name: str) -> None:
        answer = await self._make("pods", self._pod(name))
        if answer.code:
            raise FarmError(f"{name} was refused: {_line(answer.error)}", kind="no_pod")
        made = _listed(json.loads(answer.out))
        self._pods[name] = made
        _log.info("%s is %s", name, made.state.where)

    async def look(self) -> Mapping[str, WorkerState]:
        if self._looked_at_s is None or self._clock() - self._looked_at_s >= _LOOK_S:
            listed = await self._listed()
            self._looked_at_s = self._clock()
            self._forgotten &= {pod.uid for pod in listed.values()}
            found = {name: pod for name, pod in listed.items() if pod.uid not in self._forgotten}
            gone = WorkerState(phase=Phase.ENDED, message="its pod was deleted")
            for name, known in self._pods.items():
                self._pods[name] = found.pop(name, _Pod(uid=known.uid, version="", state=gone))
            self._pods |= found  # made, but the answer was not heard
            for name in list(self._withdrawn & self._pods.keys()):
                state = self._pods[name].state
                if state.phase is Phase.WAITING or state.leaving:
                    continue
                self._withdrawn.discard(name)
                if state is gone:
                    del self._pods[name]  # it did not fail: it was taken back; how one ends that had begun counts
        return {name: known.state for name, known in self._pods.items()}

    async def withdraw(self, name: str) -> None:
        """Only in the very state in which it was seen waiting: once it has begun, its version is another."""
        if (known := self._pods.get(name)) is not None and known.state.phase is Phase.WAITING:
            self._looked_at_s = None
            self._withdrawn.add(name)
            answer = await self._remove(name, {"uid": known.uid, "resourceVersion": known.version})
            if answer.code and not (_refused(answer, "Conflict") or _refused(answer, "NotFound")):
                _log.warning("%s could not be withdrawn: %s", name, _line(answer.error))

    async def stop(self, name: str) -> None:
        if (known := self._pods.get(name)) is not None:
            answer = await self._remove(name, {"uid": known.uid})
            if answer.code and not (_refused(answer, "Conflict") or _refused(answer, "NotFound")):
                raise FarmError(f"{name} could not be ended: {_line(answer.error)}", kind="no_pods")
            del self._pods[name]
            self._forgotten.add(known.uid)

    async def close(self) -> None:
        self._pods.clear()
        mine = f"{FARM_LABEL}={self._launch.label},{START_LABEL}={self._start}"
        if self._namespace and shutil.which("kubectl") is not None:
            await self._run("delete", "--raw", self._uri("pods", mine))
            give_up_at_s = self._clock() + self._launch.config.leave_s + _END_S
            with contextlib.suppress(FarmError):
                while await self._listed():
                    if self._clock() > give_up_at_s:
                        _log.warning("pods of %s are still ending", self._launch.label)
                        break
                    await asyncio.sleep(0.5)
            await self._run("delete", "--raw", self._uri("secrets", mine))

    # -- requests -------------------------------------------------------------------------------------

    @property
    def _labels(self) -> dict[str, str]:
        return {FARM_LABEL: self._launch.label, START_LABEL: self._start}

    def _name(self, worker: str) -> str:
        return f"{self._launch.label}-{self._start}-{worker}"

    def _pod(self, worker: str) -> dict[str, Any]:
        ticket = f"{TICKET_FOLDER}/{TICKET_FILE}"
        return pod(
            self._config,
            name=self._name(worker),
            labels={**self._labels, WORKER_LABEL: worker},
            secret=self._secret,
            command=worker_command(self._launch, ticket=ticket, name=worker),
            leave_s=self._launch.config.leave_s,
            provider=self._launch.ticket.expected.provider,
        )

    def _uri(self, what: str, selector: str = "", name: str = "") -> str:
        uri = f"/api/v1/namespaces/{self._namespace}/{what}"
        if name:
            return f"{uri}/{name}"
        return f"{uri}?labelSelector={quote(selector)}" if selector else uri

    async def _make(self, what: str, record: Mapping[str, Any], query: str = "") -> Answer:
        uri = self._uri(what) + (f"?{query}" if query else "")
        return await self._run("create", "--raw", uri, "--filename=-", given=json.dumps(record))

    async def _remove(self, worker: str, conditions: Mapping[str, str]) -> Answer:
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": conditions}
        uri = self._uri("pods", name=self._name(worker))
        return await self._run("delete", "--raw", uri, "--filename=-", given=json.dumps(options))

    async def _listed(self) -> dict[str, _Pod]:
        """Worker -> its pod, of this start. Raises ``FarmError`` when the server does not tell."""
        mine = f"{FARM_LABEL}={self._launch.label},{START_LABEL}={self._start}"
        answer = await self._run("get", "--raw", self._uri("pods", mine))
        if answer.code:
            raise FarmError(f"kubectl: {_line(answer.error)}", kind="no_pods")
        items = json.loads(answer.out)["items"]
        return {item["metadata"]["labels"][WORKER_LABEL]: _listed(item) for item in items}

    async def _run(self, *arguments: str, given: str = "") -> Answer:
        context = [f"--context={self._config.context}"] if self._config.context else []
        command = ["kubectl", *context, f"--request-timeout={_COMMAND_S:g}s", *arguments]
        return await run_command(*command, given=given, timeout_s=2 * _COMMAND_S)


def _listed(item: Mapping[str, Any]) -> _Pod:
    metadata = item["metadata"]
    return _Pod(uid=metadata["uid"], version=metadata["resourceVersion"], state=state_of(item))


def _line(text: str) -> str:
    return re.sub(r"^error: |^Error from server ", "", last_line(text))


def _refused(answer: Answer, word: str) -> bool:
    """kubectl's own name for the server's answer stands in brackets: (NotFound), (AlreadyExists), (Conflict)."""
    return f"({word})" in answer.error
