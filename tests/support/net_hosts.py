"""Hosts on a network of their own: one network namespace each, on a bridge to this machine. Files are shared, which
stands for the storage that a farm's hosts share. Needs root and iproute2."""

from __future__ import annotations

import os
import subprocess

NET = "10.213.77"


class NetHosts:
    """Use as a context manager; ``address`` is this machine's on that network."""

    address = f"{NET}.1"

    def __init__(self, *names: str) -> None:
        self.names = names
        self.addresses = {name: f"{NET}.{10 + number}" for number, name in enumerate(names)}
        tag = f"{os.getpid() % 100_000:x}"  # a device's name has at most 15 characters
        self._bridge = f"rfb{tag}"
        self._spaces = {name: f"rf{tag}-{number}" for number, name in enumerate(names)}

    def __enter__(self) -> NetHosts:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in self.names:
                self._add(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, name: str) -> None:
        space, link = self._spaces[name], self._link(name)
        _ip("netns", "add", space)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _ip("link", "del", self._link(name), check=False)
            _ip("netns", "del", self._spaces[name], check=False)
        _ip("link", "del", self._bridge, check=False)

    def inside(self, name: str) -> list[str]:
        """The beginning of a command that runs on the host."""
        return ["ip", "netns", "exec", self._spaces[name]]

    def cut(self, name: str) -> None:
        """No packet passes between the host and the others."""
        _ip("link", "set", self._link(name), "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self._link(name), "up")

    def _link(self, name: str) -> str:
        return f"{self._spaces[name]}v"


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
