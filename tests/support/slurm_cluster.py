"""A private one-node Slurm for tests: own configuration, own munge key and socket, own ports, own spool.

    python tests/support/slurm_cluster.py FOLDER COMMAND...

runs COMMAND with SLURM_CONF set to such a cluster, ends it, and fails when a job is left in the queue or a process
runs on. Needs root and ``slurmctld``, ``slurmd`` and ``munged`` that are installed. FOLDER must be short (a socket's
path has 107 characters). Jobs that get :func:`temporary` as their TMPDIR have a state directory of their own, by which
their sandboxes are known.

Partitions: ``low`` (the default) is preempted by ``high`` with REQUEUE after ``GRACE_S``; ``closed`` lets only an
account in that nobody has, so that what is sent there waits for ever; ``down`` takes jobs and starts none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5
GONE_S = GRACE_S + 30  # the controller looks every 30 s for jobs whose time is over
CPUS = 16  # pretended: what runs in the jobs mostly waits

_START_S = 120.0
_STOP_S = 10.0
_TEMPORARY = "tmp"

_CONF = """\
ClusterName=farmtest
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_setup_env_fail
KillWait=30
MinJobAge=300
ReturnToService=2
NodeName=vm NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=16000
PartitionName=low Nodes=vm Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=vm PriorityTier=10 PreemptMode=OFF
PartitionName=closed Nodes=vm PriorityTier=1 PreemptMode=OFF AllowAccounts=nobodys
PartitionName=down Nodes=vm PriorityTier=1 PreemptMode=OFF State=DOWN
"""


class Slurm:
    """``folder`` holds everything of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def conf(self) -> Path:
        return self._folder / "slurm.conf"

    def start(self) -> None:
        """Returns when a job runs."""
        for name in ("state", "spool", _TEMPORARY):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o755)
        text = _CONF.format(
            folder=self._folder, controller_port=_free_port(), daemon_port=_free_port(), cpus=CPUS, grace_s=GRACE_S
        )
        self.conf.write_text(text)
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged", "--foreground", "--force", "--num-threads=2", f"--socket={self._folder}/munge.socket",
            f"--key-file={key}", f"--pid-file={self._folder}/munged.pid", f"--seed-file={self._folder}/munged.seed",
            f"--log-file={self._folder}/munged.log",
        )  # fmt: skip
        self._until("munged", lambda: (self._folder / "munge.socket").exists())
        self._start("slurmctld", "-D", "-f", str(self.conf))
        self._until("slurmctld", lambda: self.run("scontrol", "ping").returncode == 0)
        self._start(shutil.which("slurmd-wlm") or "slurmd", "-D", "-f", str(self.conf), "-N", "vm")
        self._until("slurmd", lambda: "idle" in self.run("sinfo", "-h", "-p", "low", "-o", "%t").stdout)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
            env={**os.environ, "SLURM_CONF": str(self.conf)},
        )

    def queue(self) -> list[str]:
        return self.run("squeue", "--noheader", "--format=%i %j %T %r").stdout.splitlines()

    def stop(self) -> list[str]:
        """Ends the jobs and the daemons, in this order. Returns what did not end of that by itself, and was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if ids := [line.split()[0] for line in self.queue()]:
                self.run("scancel", "--signal=KILL", "--full", *ids)
                self.run("scancel", *ids)
                deadline = time.monotonic() + _STOP_S
                while self.queue() and time.monotonic() < deadline:
                    time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + _STOP_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"process {pid} ({said})" for pid, said in left.items()]

    def processes(self) -> dict[int, str]:
        """All daemons of this cluster and what its jobs run, with their commands: they carry its folder. Launchers of
        sandboxes have no environment, but their state directory is an argument."""
        mark = str(self._folder).encode()
        state = mark + b"/" + _TEMPORARY.encode() + b"/"
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
                try:
                    said = (entry / "cmdline").read_bytes()
                    jobs = b"SLURM_JOB_ID=" in (environment := (entry / "environ").read_bytes())
                except OSError:
                    continue
                arguments = said.split(b"\0")
                daemon = arguments[0].rpartition(b"/")[2].startswith((b"slurm", b"munged"))
                sandbox = any(argument.startswith(state) for argument in arguments)
                if (daemon and mark in said + environment) or (jobs and mark in environment) or sandbox:
                    found[int(entry.name)] = b" ".join(arguments).decode(errors="replace")[:200]
        return found

    def _start(self, *command: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "ROLLOUT_"))}
        with (self._folder / "daemons.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self._processes.append(process)

    def _until(self, what: str, condition) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + _START_S
        while not condition():
            dead = [p for p in self._processes if p.poll() is not None]
            if dead or time.monotonic() > deadline:
                said = "".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
                    for path in sorted(self._folder.glob("*.log"))
                )
                self.stop()
                raise RuntimeError(f"{what} does not start:\n{said}")
            time.sleep(0.1)


def temporary() -> Path:
    """The TMPDIR for jobs of the cluster that SLURM_CONF names."""
    return Path(os.environ["SLURM_CONF"]).parent / _TEMPORARY


def queue() -> list[str]:
    """The jobs of the cluster that SLURM_CONF names, that have not ended: "ID NAME STATE RESTARTS"."""
    command = ["squeue", "--noheader", "--Format=JobID: ,Name: ,State: ,RestartCnt: "]
    return subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=True).stdout.splitlines()


def queue_is_empty(within_s: float = 20.0) -> bool:
    """No job is left, those that are just completing included."""
    give_up_at = time.monotonic() + within_s
    while left := queue():
        if time.monotonic() > give_up_at:
            print("in the queue:", *left, sep="\n  ")
            return False
        time.sleep(0.2)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    folder, *command = sys.argv[1:]
    slurm = Slurm(Path(folder))
    began = time.monotonic()
    slurm.start()
    print(f"Slurm is up after {time.monotonic() - began:.1f} s", flush=True)
    left: list[str] = []
    try:
        code = subprocess.call(command, env={**os.environ, "SLURM_CONF": str(slurm.conf)})
        left = slurm.queue()
    finally:
        left += slurm.stop()
    shutil.rmtree(folder, ignore_errors=True)
    if left:
        print(f"left behind: {', '.join(left)}")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
