"""A local double of the part of Kubernetes that the farm uses: an API server for pods and secrets, and a kubelet that
runs a pod's command as a process of this machine. Real kubectl talks to it; it is no proof of a real cluster.

What a real server would refuse for its form is refused here too, where ``kubernetes-validate`` (which carries the
published schemas) is installed. Pods whose image starts with ``missing/`` can't be pulled, pods with a node selector
find no node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from farm.cluster.kubernetes_pods import TICKET_FOLDER

NAMESPACE = "farms"
_STEP_S = 0.05


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code,
        }  # fmt: skip


class Cluster:
    """``folder`` has a file per mounted secret and container log. All state is behind one lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.objects: dict[str, dict[str, dict[str, Any]]] = {"pods": {}, "secrets": {}}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kill_at: dict[str, float] = {}
        self.version = 0
        self.ended = threading.Event()
        self.refuse: str = ""  # a message: then every new pod is refused, as by a quota

    # -- the API ---------------------------------------------------------------------------------------

    def create(self, what: str, record: dict[str, Any], *, dry: bool) -> dict[str, Any]:
        _check_schema(record)
        name = record["metadata"]["name"]
        with self.lock:
            if what == "pods" and self.refuse:
                raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {self.refuse}')
            if name in self.objects[what]:
                raise Refused(409, "AlreadyExists", f'{what} "{name}" already exists')
            made = {**record, "metadata": {**record["metadata"], "namespace": NAMESPACE, "uid": os.urandom(8).hex()}}
            self._touch(made)
            if what == "pods":
                made["status"] = {"phase": "Pending"}
            if not dry:
                self.objects[what][name] = made
            return made

    def select(self, what: str, selector: str) -> list[dict[str, Any]]:
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        with self.lock:
            return [
                item for item in self.objects[what].values() if wanted.items() <= item["metadata"]["labels"].items()
            ]

    def delete(self, what: str, name: str, conditions: Mapping[str, str]) -> dict[str, Any]:
        with self.lock:
            item = self.objects[what].get(name)
            if item is None:
                raise Refused(404, "NotFound", f'{what} "{name}" not found')
            for key, value in conditions.items():
                if item["metadata"][key] != value:
                    raise Refused(409, "Conflict", f"the {key} in the precondition ({value}) does not match")
            process = self.processes.get(name)
            if what == "pods" and process is not None and process.poll() is None:
                item["metadata"].setdefault("deletionTimestamp", _now())
                self._touch(item)
                if name not in self.kill_at:
                    self.kill_at[name] = time.monotonic() + item["spec"]["terminationGracePeriodSeconds"]
                    process.send_signal(signal.SIGTERM)
            else:
                del self.objects[what][name]
            return item

    # -- the kubelet ----------------------------------------------------------------------------------

    def step(self) -> None:
        with self.lock:
            for name, item in list(self.objects["pods"].items()):
                if item["status"]["phase"] == "Pending":
                    self._begin(name, item)
                elif item["status"]["phase"] == "Running":
                    self._watch(name, item)

    def _begin(self, name: str, item: dict[str, Any]) -> None:
        spec, before = item["spec"], item["status"]
        container = spec["containers"][0]
        if "nodeSelector" in spec:
            said = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
            unmet = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
            item["status"] = {"phase": "Pending", "conditions": [unmet]}
        elif container["image"].startswith("missing/"):
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{container["image"]}"'}
            item["status"] = {
                "phase": "Pending",
                "containerStatuses": [{"name": "worker", "state": {"waiting": waiting}}],
            }
        else:
            secret = next(volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume)
            place = self.folder / secret
            place.mkdir(exist_ok=True)
            for key, text in self.objects["secrets"][secret]["stringData"].items():
                (place / key).write_text(text)
            command = [part.replace(TICKET_FOLDER, str(place)) for part in container["command"]]
            with (self.folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            running = {"name": "worker", "state": {"running": {"startedAt": _now()}}}
            item["status"] = {"phase": "Running", "containerStatuses": [running]}
        if item["status"] != before:
            self._touch(item)

    def _watch(self, name: str, item: dict[str, Any]) -> None:
        process = self.processes[name]
        code = process.poll()
        if code is None:
            if time.monotonic() > self.kill_at.get(name, float("inf")):
                os.killpg(process.pid, signal.SIGKILL)
            return
        if "deletionTimestamp" in item["metadata"]:
            del self.objects["pods"][name]
            return
        code = code if code >= 0 else 128 - code
        tail = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:] if code else ""
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": tail}
        item["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
        }
        self._touch(item)

    def run(self) -> None:
        while not self.ended.wait(_STEP_S):
            self.step()

    def end(self) -> None:
        self.ended.set()
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _touch(self, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check_schema(record: dict[str, Any]) -> None:
    try:
        import kubernetes_validate
    except ImportError:
        return
    try:
        kubernetes_validate.validate(record, "1.33", strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refused(422, "Invalid", f"{'.'.join(map(str, error.path))}: {error.message}") from None


@contextmanager
def kube_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster, and KUBECONFIG for it in ``folder``/kubeconfig. Everything has ended when this does."""
    folder.mkdir()
    cluster = Cluster(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # no connection outlives its request

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            return

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def answer(self) -> None:
            body = json.loads(self.body() or b"{}")
            try:
                code, said = 200, self.handle_request(body)
            except Refused as refused:
                code, said = refused.status["code"], refused.status
            data = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = answer

        def handle_request(self, body: dict[str, Any]) -> dict[str, Any]:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            prefix = f"/api/v1/namespaces/{NAMESPACE}/"
            what, _, name = url.path.removeprefix(prefix).partition("/")
            if not url.path.startswith(prefix) or what not in cluster.objects:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            if self.command == "POST":
                return cluster.create(what, body, dry="dryRun" in query)
            if self.command == "DELETE" and name:
                return cluster.delete(what, name, body.get("preconditions", {}))
            items = cluster.select(what, query.get("labelSelector", ""))
            if self.command == "DELETE":
                for item in items:
                    cluster.delete(what, item["metadata"]["name"], {})
            return {"kind": "List", "apiVersion": "v1", "items": items}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threads = [threading.Thread(target=server.serve_forever), threading.Thread(target=cluster.run)]
    for thread in threads:
        thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    try:
        yield cluster
    finally:
        cluster.end()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()
