"""Hosts that ssh reaches, all of them this machine: one sshd for each, on a port of its own, with throw-away keys.

Needs root, and Debian's openssh-server and openssh-client."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
from net_hosts import NetHosts

SSHD = "/usr/sbin/sshd"
_START_S = 20.0

_SSHD_CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
LogLevel ERROR
MaxStartups 100:30:200
"""
_SSH_CONFIG = """
Host {name}
  HostName {address}
  Port {port}
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


class SshHosts:
    """Use as a context manager. ``options``: for ``cluster.ssh.options``, so that ssh knows the hosts by name. ``net``:
    the hosts' own networks, by default they are all on loopback."""

    def __init__(self, folder: Path, *names: str, net: NetHosts | None = None) -> None:
        self.folder = folder
        self.names = names
        self._net = net
        self._addresses = dict.fromkeys(names, "127.0.0.1") if net is None else net.addresses
        self.ports: dict[str, int] = {}
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def options(self) -> tuple[str, ...]:
        return ("-F", str(self.folder / "ssh_config"))

    def __enter__(self) -> SshHosts:
        assert shutil.which("ssh"), "install openssh-client"
        assert Path(SSHD).exists(), "install openssh-server"
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own condition
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("host_key", "user_key"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        lines, known = [], []
        for name in self.names:
            self.ports[name] = port = 22 if self._net else _free_port()
            address = self._addresses[name]
            values = {"name": name, "address": address, "port": port, "folder": self.folder}
            (self.folder / f"{name}.conf").write_text(_SSHD_CONFIG.format(**values))
            lines.append(_SSH_CONFIG.format(**values))
            known.append(f"{address if port == 22 else f'[{address}]:{port}'} {key}\n")
        (self.folder / "ssh_config").write_text("".join(lines))
        (self.folder / "known_hosts").write_text("".join(known))
        for name in self.names:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill(name)

    def start(self, name: str) -> None:
        config = str(self.folder / f"{name}.conf")
        inside = self._net.inside(name) if self._net else []
        self._servers[name] = subprocess.Popen([*inside, SSHD, "-D", "-f", config], start_new_session=True)
        give_up_at = time.monotonic() + _START_S
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex((self._addresses[name], self.ports[name])):
                    return
            assert time.monotonic() < give_up_at, f"sshd of {name} does not listen"
            time.sleep(0.05)

    def processes(self, name: str) -> list[psutil.Process]:
        """All that runs on the host, its server first."""
        server = self._servers.get(name)
        if server is None or not psutil.pid_exists(server.pid):
            return []
        me = psutil.Process(server.pid)
        return [me, *me.children(recursive=True)]

    def workers(self, name: str) -> list[psutil.Process]:
        """The processes of a farm's workers on the host."""
        return [process for process in self.processes(name) if "farm.cluster.worker" in _command(process)]

    def kill(self, name: str) -> None:
        """The host dies: its server and everything that runs below it, at once."""
        for process in self.processes(name):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if (server := self._servers.pop(name, None)) is not None:
            server.wait()

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
