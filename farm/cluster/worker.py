"""The process of a launched worker: ``python -m farm.cluster.worker --ticket FILE|- --name NAME``.

It examines its host, joins, works, and ends by itself: when the farm closes it, when the connection to the scheduler is
lost (its farm is dead or cut off; Dask does not reconnect), or when standard input ends (ticket "-", so with the ssh
that started it). Told by SIGTERM to go (a preempted job, a deleted pod), it takes nothing new, gives what runs
``leave_s`` seconds, and ends. Exit code 0; 2 and one line when the host or the ticket is not fit.

In all of these what still runs is cancelled and its sandboxes are closed first; a thread sees to it that the process is
gone ``_END_S`` seconds later even if that hangs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from farm.cluster.examine import examine
from farm.cluster.launcher import REFUSED
from farm.cluster.ticket import Ticket
from farm.errors import FarmError, UsageError
from farm.sandbox import make_provider
from farm.sandbox.state import state_directory

if TYPE_CHECKING:
    from distributed import Worker

_END_S = 45.0
_TICKET_BYTES = 1 << 20
_CONNECT_S = 10.0
_PATIENCE_S = 15.0  # NFS may show a new file some seconds late, and a busy farm may let a connection wait
_JOIN_S = 60.0
_SWEEP_S = 60.0
_LOOK_S = 0.2

T = TypeVar("T")


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m farm.cluster.worker", description="Started by a farm.")
    parser.add_argument("--ticket", required=True)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--name")
    task.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    try:
        ticket = _read_ticket(arguments.ticket)
        os.environ.update(ticket.environment)
        examine(ticket.expected)
        _check_scheduler(ticket)
    except UsageError as error:
        print(f"farm: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return REFUSED
    if arguments.check:
        return 0
    asyncio.run(_work(ticket, arguments.name, tied=arguments.ticket == "-"))
    return 0


def _read_ticket(place: str) -> Ticket:
    if place == "-":
        return Ticket.from_json(sys.stdin.buffer.readline(_TICKET_BYTES).decode("utf-8", errors="replace"))

    def read() -> str:
        os.listdir(Path(place).parent)  # noqa: PTH208 - makes NFS look again
        return Path(place).read_text(encoding="utf-8")

    try:
        return Ticket.from_json(_patiently(read))
    except OSError as error:
        raise UsageError(
            f"{socket.gethostname()}: can't read {place} ({error.strerror}); the run folder must be on storage "
            "that all hosts mount under the same path, for the same user"
        ) from None


def _check_scheduler(ticket: Ticket) -> None:
    """A TLS connection with the farm's certificates stands: nothing in between, nobody else."""
    host, _, port = ticket.scheduler.removeprefix("tls://").rpartition(":")
    context = ssl.create_default_context(cadata=ticket.credentials.ca)
    context.check_hostname = False  # the authority is the farm's own and vouches for one certificate

    def connect() -> None:
        try:
            with (
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as plain,
                context.wrap_socket(plain),
            ):
                return
        except ssl.SSLError as error:
            raise UsageError(
                f"{socket.gethostname()}: {ticket.scheduler} has another certificate than this farm's "
                f"({error.reason}); correct cluster.host"
            ) from None

    try:
        _patiently(connect)
    except OSError as error:
        raise UsageError(
            f"{socket.gethostname()}: can't reach the farm's scheduler at {ticket.scheduler} ({error}); set "
            "cluster.host to an address of the farm's machine that this host reaches, cluster.port to one that the "
            "firewall lets pass"
        ) from None


def _patiently(attempt: Callable[[], T]) -> T:
    """What ``attempt`` returns, once it raises no ``OSError``. Raises the last one after ``_PATIENCE_S``."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > give_up_at:
                raise
        time.sleep(_LOOK_S)


async def _work(ticket: Ticket, name: str, *, tied: bool) -> None:
    from distributed import Worker

    from farm.cluster.on_worker import PLUGIN
    from farm.cluster.settings import apply_settings, security_of

    apply_settings()
    worker = Worker(
        ticket.scheduler,
        nthreads=ticket.slots,
        name=name,
        security=security_of(ticket.credentials),
        memory_limit=0,
        local_directory=str(state_directory() / "dask"),  # what a killed one leaves there, the next one removes
        dashboard=False,
        dashboard_address="127.0.0.1:0",  # Dask opens an HTTP port in any case
        death_timeout=_JOIN_S,
    )
    loop = asyncio.get_running_loop()
    told = asyncio.Event()  # to end at once
    asked = asyncio.Event()  # to leave

    def on_signal(*_: object) -> None:
        # No asyncio handler: what runs must be distrusted before anything else happens in this process.
        if not ticket.leave_s and (plugin := worker.plugins.get(PLUGIN)) is not None:
            plugin.distrust()
        loop.call_soon_threadsafe(asked.set)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    if tied:
        _in_background(_wait_for_end_of_input, lambda: loop.call_soon_threadsafe(told.set))
    async with worker:
        _in_background(_end_if_hung, worker, told)
        sweeper = asyncio.create_task(_sweep(ticket))
        finished = asyncio.create_task(worker.finished())
        orders = [asyncio.create_task(event.wait()) for event in (told, asked)]
        await asyncio.wait({finished, *orders}, return_when=asyncio.FIRST_COMPLETED)
        if asked.is_set() and not told.is_set():
            await _leave(worker, {finished, orders[0]}, ticket.leave_s)
        told.set()
        sweeper.cancel()
        await worker.close(reason="it was told to end")


async def _leave(worker: Worker, ends: set[asyncio.Task[Any]], leave_s: float) -> None:
    """Take nothing new, and wait for what runs: at most ``leave_s``, or until one of ``ends`` is done. Then give up
    what is left, in time for the driver to hear of it."""
    from distributed.core import Status

    from farm.cluster.on_worker import PLUGIN

    worker.status = Status.paused  # the scheduler is told
    give_up_at = time.monotonic() + leave_s
    plugin = worker.plugins.get(PLUGIN)
    if plugin is None:  # it has not been given any work yet
        return
    while plugin.running and time.monotonic() < give_up_at:
        done, _ = await asyncio.wait(ends, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
    await plugin.give_up(worker)


async def _sweep(ticket: Ticket) -> None:
    """What workers of this host that were killed left behind (Rule 7)."""
    provider = make_provider(ticket.expected.provider, **ticket.expected.provider_options)
    while True:
        await asyncio.sleep(_SWEEP_S)
        with contextlib.suppress(FarmError, OSError):  # the next one tries again
            await provider.sweep(now_s=time.time())


def _in_background(function: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _wait_for_end_of_input(tell: Callable[[], object]) -> None:
    # Not by sys.stdin, whose lock would be held when the process ends otherwise, and abort it.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    tell()


def _end_if_hung(worker: Worker, told: asyncio.Event) -> None:
    """Whatever hangs in this process: once it should end, it is gone within ``_END_S``."""
    while not told.is_set() and worker.status.name in {"init", "running", "paused", "closing_gracefully"}:
        time.sleep(_LOOK_S)
    time.sleep(_END_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
