"""farm/cluster/worker.py: what a worker that has just been started waits for, and what it does not."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farm.cluster import worker
from farm.cluster.ticket import Credentials, Expected, Ticket
from farm.errors import UsageError


def ticket(port: int = 1) -> Ticket:
    expected = Expected(software={}, probe="", probe_text="", provider="fake", provider_options={})
    credentials = Credentials(ca="", cert="", key="")
    return Ticket(scheduler=f"tls://127.0.0.1:{port}", slots=1, credentials=credentials, expected=expected)


@contextmanager
def soon(do: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(0.5, do)
    timer.start()
    yield
    timer.join()


def test_a_ticket_that_the_storage_shows_late_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cluster" / "ticket.json"

    def show() -> None:
        place.parent.mkdir()
        hidden = tmp_path / "hidden"
        hidden.write_text(ticket().to_json())
        hidden.rename(place)

    with soon(show):
        assert worker._read_ticket(str(place)) == ticket()
    monkeypatch.setattr(worker, "_PATIENCE_S", 0.0)
    with pytest.raises(UsageError, match=r"can't read .*nowhere .*the same path"):
        worker._read_ticket(str(tmp_path / "nowhere"))


def test_a_scheduler_that_answers_late_is_waited_for_and_a_stranger_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def be_a_stranger() -> None:
        server.listen()
        connection, _ = server.accept()
        with connection, contextlib.suppress(ConnectionError):  # who is not answered in TLS hangs up
            connection.sendall(b"220 no farm here\r\n")
            while connection.recv(4096):
                pass

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # refuses connections until it listens
        port = server.getsockname()[1]
        with soon(be_a_stranger), pytest.raises(UsageError, match="has another certificate than this farm's"):
            worker._check_scheduler(ticket(port))
    monkeypatch.setattr(worker, "_PATIENCE_S", 0.0)
    with pytest.raises(UsageError, match=r"can't reach the farm's scheduler at tls://127\.0\.0\.1:"):
        worker._check_scheduler(ticket(port))
