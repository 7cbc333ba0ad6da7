"""A private Docker engine for tests: own data, own socket, no bridge, nothing of the host's network touched.

    python tests/support/docker_engine.py FOLDER COMMAND...

runs COMMAND with DOCKER_HOST set to such an engine, ends it, and fails when something of it is left. Needs root and a
``dockerd`` that is installed. FOLDER must be short (a socket's path has 107 characters) and on a disk that overlay2
works on (not tmpfs in a container).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_START_S = 30.0
_STOP_S = 20.0


class Engine:
    """``folder`` holds everything of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"unix://{self._folder}/docker.sock"

    def start(self) -> None:
        """Returns when it answers. Starts a killed one anew, on the same data."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in ("docker.pid", "run/containerd/containerd.pid"):  # a zombie's pid would count as alive
            (self._folder / left).unlink(missing_ok=True)
        crun = shutil.which("crun")
        runtimes = f"--add-runtime crun={crun} --default-runtime crun" if crun else ""
        # crun can't do with cgroups in "hybrid mode", so an empty cgroup2 is hidden from the daemon.
        script = (
            "[ -e /sys/fs/cgroup/memory ] && umount /sys/fs/cgroup/unified 2>/dev/null; "
            f'exec dockerd --data-root "$0/data" --exec-root "$0/run" -H "unix://$0/docker.sock" '
            '--pidfile "$0/docker.pid" --bridge=none --iptables=false --ip6tables=false --ip-forward=false '
            f"--ip-masq=false {runtimes}"
        )
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "-m", "--propagation", "private", "sh", "-c", script, str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "ROLLOUT_"))},
            )
        until = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                said = (self._folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"dockerd does not start:\n{said}")
            time.sleep(0.05)

    def kill(self) -> None:
        """As a crash would: containers and their shims are not told."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(_STOP_S)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        for pid in self.processes():  # what a killed daemon left: containerd and shims
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """All that run for this engine."""
        mark = str(self._folder).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if mark in command and (b"dockerd" in command or b"containerd" in command):
                    found.append(int(entry.name))
        return found

    def containers(self) -> list[str]:
        import docker

        client = docker.APIClient(base_url=self.host, timeout=20)
        try:
            return [row["Names"][0] for row in client.containers(all=True)]
        finally:
            client.close()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(2)
            try:
                probe.connect(f"{self._folder}/docker.sock")
                probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in probe.recv(100)
            except OSError:
                return False


def main() -> int:
    folder, *command = sys.argv[1:]
    engine = Engine(Path(folder))
    began = time.monotonic()
    engine.start()
    print(f"dockerd answers after {time.monotonic() - began:.1f} s")
    left: list[str] = []
    try:
        code = subprocess.call(command, env={**os.environ, "DOCKER_HOST": engine.host})
        left = engine.containers()
    finally:
        engine.stop()
    time.sleep(0.2)
    left += [f"process {pid}" for pid in engine.processes()]
    shutil.rmtree(engine._folder, ignore_errors=True)
    if left:
        print(f"left behind: {', '.join(left)}")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
