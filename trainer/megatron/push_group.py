"""Rank 0's end of a process group that holds the trainer and the engines it pushes weights to.

It is a group of its own, beside that of the trainer's ranks: engines come and go, and one that is lost must not take
the training with it. Its keys lie in the store as torch's own ``init_process_group`` lays them out, and SGLang those of
a named group: by name, then by device.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from farm.errors import FarmError

Backend = Literal["gloo", "nccl"]

_DEVICES: dict[Backend, str] = {"gloo": "cpu", "nccl": "cuda"}


class PushError(FarmError):
    """The weights did not get there; the engines load them from disk."""

    default_kind = "push"


def own_address(urls: Sequence[str]) -> str:
    """This machine's address as the engines at ``urls`` reach it: that of the route to the first which is not here.

    Nothing is sent. Raises :class:`PushError` for a host that has no address."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        try:
            family, _, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                found.append(str(probe.getsockname()[0]))
        except OSError as error:
            raise PushError(f"{url}: no way to it from here ({error})") from None
    return next((address for address in found if not address.startswith("127.") and address != "::1"), found[0])


class PushGroup:
    """``size`` counts the trainer, which is rank 0. Nothing here waits longer than the time-outs it is given."""

    def __init__(self, name: str, size: int, *, address: str, backend: Backend, timeout_s: float) -> None:
        self._name = name
        self._size = size
        self._address = address
        self._backend: Backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        # On all interfaces: by which one an engine comes is its own affair.
        self._store = TCPStore("0.0.0.0", 0, size, is_master=True, timeout=self._timeout, wait_for_workers=False)

    def invitation(self, rank: int) -> dict[str, Any]:
        """What the engine that becomes ``rank`` (and, with tensor parallelism, the ranks after it) is asked to join."""
        return {
            "master_address": self._address,
            "master_port": self._store.port,
            "rank_offset": rank,
            "world_size": self._size,
            "group_name": self._name,
            "backend": self._backend,
        }

    def join(self) -> None:
        """Blocks until all are there."""
        named = PrefixStore(f"{self._name}/", PrefixStore(self._name, self._store))
        store = PrefixStore(f"{_DEVICES[self._backend]}/", named)
        if self._backend == "gloo":
            # By the given address, for what the environment says of interfaces is meant for the trainer's own ranks.
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
            options._timeout = self._timeout
            self._group = ProcessGroupGloo(store, 0, self._size, options)
            return
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = self._timeout
        self._group = ProcessGroupNCCL(store, 0, self._size, nccl)

    def send(self, tensors: Sequence[Tensor], *, timeout_s: float) -> None:
        """Broadcast each of ``tensors``, in order. On GPUs it may return while they are on their way: that they have
        come is what the engines answer."""
        timeout = timedelta(seconds=timeout_s)
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timeout
        device = _DEVICES[self._backend]
        sent = [(t if t.device.type == device else t.to(device)).contiguous() for t in tensors]
        for work in [self._group.broadcast([tensor], options) for tensor in sent]:
            work.wait(timeout)

    def close(self) -> None:
        """Let the engines that still wait for something go. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
