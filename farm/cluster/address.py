"""Where workers on other hosts reach this machine."""

from __future__ import annotations

import socket
import subprocess

from farm.config import ClusterConfig
from farm.errors import UsageError

_SOMEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737): the way there is the default route
_SSH_S = 10.0


def cluster_address(config: ClusterConfig) -> str:
    """Where the scheduler of ``config`` is, as an IP address. On loopback, all workers are on this machine."""
    match config.kind:
        case "local":
            return "127.0.0.1"
        case "join":
            return _resolve(config.address.partition("://")[2].rpartition(":")[0].strip("[]"), "cluster.address")
        case _:
            return own_address(config)


def own_address(config: ClusterConfig) -> str:
    """``cluster.host`` as an address, or else the one that this machine has on the way to the first ssh host, or on its
    default route. Raises ``UsageError`` when there is none."""
    if config.host:
        return _resolve(config.host)
    towards = _ssh_host(config) if config.kind == "ssh" else _SOMEWHERE
    try:
        family, _, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        raise UsageError(
            "cluster.host: this machine's address, as workers reach it, can't be found out; set it, for example "
            'host = "10.0.0.1"'
        ) from None


def _resolve(host: str, key: str = "cluster.host") -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"{key} {host!r}: no such address ({error.strerror}); give the machine's name or address as workers "
            "reach it"
        ) from None


def _ssh_host(config: ClusterConfig) -> str:
    """What ssh's configuration makes of the first host's name."""
    name = config.ssh.hosts[0]
    try:
        told = subprocess.run(
            ["ssh", "-G", *config.ssh.options, name], capture_output=True, text=True, timeout=_SSH_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return name.rpartition("@")[2]  # what is wrong with ssh is told by its launcher
    return next((line.split()[1] for line in told.splitlines() if line.startswith("hostname ")), name)
