"""An engine that keeps what a push brings it, and hangs where a test wants it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

from farm.engine.embedded.weight_group import WeightGroupError, WeightGroups
from farm.types import PUSH_GIVEN_UP, PUSH_UNDER_WAY


class PushEngine:
    """``tensors``: what has come since the last begin, ``calls``: the paths asked for, in order. ``on_end`` gets the
    version and the tensors of each push that ends."""

    def __init__(self, *, hang_at: str = "", on_end: Callable[[str, dict[str, Tensor]], None] | None = None) -> None:
        self.url = ""
        self.version = "step-000000"
        self.tensors: dict[str, Tensor] = {}
        self.calls: list[str] = []
        self.released = threading.Event()
        self._hang_at = hang_at
        self._on_end = on_end
        self._groups = WeightGroups()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises WeightGroupError."""
        self.calls.append(path)
        if path == self._hang_at:
            self.released.wait(60)
        match path:
            case "/init_weights_update_group":
                self._groups.join(body)
            case "/destroy_weights_update_group":
                self._groups.leave(body)
            case "/begin_weight_update":
                self.tensors = {}
            case "/update_weights_from_distributed":
                self.tensors |= self._groups.receive(body)
                return {"success": True, "checksum": body["checksum"]}
            case "/update_weight_version":
                self.version = body["new_version"]
                if self._on_end is not None and self.version not in {PUSH_UNDER_WAY, PUSH_GIVEN_UP}:
                    self._on_end(self.version, self.tensors)
        return {"success": True, "weight_version": self.version, "tp_size": 1}


@contextmanager
def push_engine(
    *, hang_at: str = "", on_end: Callable[[str, dict[str, Tensor]], None] | None = None
) -> Iterator[PushEngine]:
    """One that answers for as long as this lasts."""
    engine = PushEngine(hang_at=hang_at, on_end=on_end)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            try:
                status, value = 200, engine.answer(self.path, body)
            except WeightGroupError as error:
                status, value = 400, {"success": False, "message": str(error)}
            raw = json.dumps(value).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
            except ConnectionError:
                return  # who asked has given up

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as the base class names it
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            yield engine
        finally:
            engine.released.set()
            server.shutdown()
            serving.join()
