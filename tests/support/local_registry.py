"""A tiny image registry on loopback (the pull half of the v2 protocol), and small images from this host's own files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_PROGRAMS = (
    "bash",
    "perl",
    "cat",
    "chmod",
    "ls",
    "sleep",
    "setsid",
    "head",
    "tr",
    "id",
    "dd",
    "mkdir",
    "rm",
    "stat",
    "grep",
    "seq",
)
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_CONFIG = "application/vnd.docker.container.image.v1+json"


def host_tar(*, without: tuple[str, ...] = (), extra: Mapping[str, bytes] | None = None) -> bytes:
    """A root with bash, perl and a few tools, and the libraries that they need."""
    files: dict[str, Path] = {}
    for name in _PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        if name in without or found is None:
            continue
        path = Path(found).resolve()
        files[f"usr/bin/{name}"] = path
        listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, timeout=20, check=False).stdout
        for library in re.findall(r"(/\S+\.so\S*)", listed):
            files[library.strip("/")] = Path(library).resolve()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for folder, mode in (("tmp", 0o1777), ("root", 0o700), ("testbed", 0o755), ("usr", 0o755), ("usr/bin", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        entry = tarfile.TarInfo("bin")
        entry.type, entry.linkname = tarfile.SYMTYPE, "usr/bin"
        archive.addfile(entry)
        for name, path in sorted(files.items()):
            _put(archive, name, path.read_bytes(), 0o755)
        for name, content in (extra or {}).items():
            _put(archive, name, content, 0o644)
    return data.getvalue()


def _put(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


class Registry:
    """``add`` an image, then pull ``{registry.address}/NAME:latest``. ``refuse``: how many manifests are answered with
    429 first; ``asked``: the names of the images that were asked for, each as often as it was."""

    def __init__(self) -> None:
        self.address = ""
        self.refuse = 0
        self.asked: list[str] = []
        self._blobs: dict[str, bytes] = {}
        self._manifests: dict[str, bytes] = {}

    def add(self, name: str, tar: bytes) -> None:
        layer = gzip.compress(tar, 1, mtime=0)
        config = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin", "HOME=/root"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(tar)]},
            "history": [{"created_by": name}],
        }
        blob = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "size": len(blob), "digest": _digest(blob)},
            "layers": [{"mediaType": _LAYER, "size": len(layer), "digest": _digest(layer)}],
        }
        self._blobs |= {_digest(blob): blob, _digest(layer): layer}
        self._manifests[name] = json.dumps(manifest).encode()

    @contextmanager
    def running(self) -> Iterator[Registry]:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry._answer(self)

            def do_HEAD(self) -> None:
                registry._answer(self)

            def log_message(self, *given: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/v2/":
            _send(request, 200, b"{}", "application/json")
            return
        match = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/(.+)", request.path)
        if match is None:
            _send(request, 404, b"{}", "application/json")
            return
        name, what, reference = match.groups()
        if what == "blobs":
            self._give(request, self._blobs.get(reference), "application/octet-stream", "BLOB_UNKNOWN")
            return
        self.asked.append(name)
        if self.refuse > 0:
            self.refuse -= 1
            _refuse(request, 429, "TOOMANYREQUESTS", "You have reached your pull rate limit")
            return
        self._give(request, self._manifests.get(name), _MANIFEST, "MANIFEST_UNKNOWN")

    def _give(self, request: BaseHTTPRequestHandler, data: bytes | None, kind: str, error: str) -> None:
        if data is None:
            _refuse(request, 404, error, "manifest unknown")
        else:
            _send(request, 200, data, kind)


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
    body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
    _send(request, status, body, "application/json")


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
    request.send_response(status)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(body)))
    if kind == _MANIFEST:
        request.send_header("Docker-Content-Digest", _digest(body))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body)


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
