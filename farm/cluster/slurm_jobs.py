"""What the farm says to Slurm and what Slurm's answers mean. PURE: texts in, texts and records out.

squeue is asked for named fields with a separator of our own: that has been the same since Slurm 20.02, while what
``--json`` prints differs from release to release and needs a plugin that not every site builds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farm.cluster.launcher import Phase
from farm.config import SlurmConfig

_FIELDS = ("JobID", "State", "Name", "PreemptTime", "Reason")  # the reason last: it is free text
_SEPARATOR = "|"
QUEUE_FORMAT = ",".join(f"{field}:{_SEPARATOR}" for field in _FIELDS)

# What a job needs of the farm's environment for its interpreter to start; everything else comes with the ticket.
_EXPORTED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "USER", "VIRTUAL_ENV")

_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
# State -> exit code as the roster counts it: 0 did its work, 1 failed, None was told to go, or nobody knows ("GONE": no
# longer listed, our own word).
_ENDED = {
    "COMPLETED": 0, "GONE": None,
    "CANCELLED": None, "PREEMPTED": None, "TIMEOUT": None, "DEADLINE": None, "REVOKED": None,
    "FAILED": 1, "NODE_FAIL": 1, "BOOT_FAIL": 1, "OUT_OF_MEMORY": 1,
}  # fmt: skip

# Reasons of a waiting job that no waiting removes -> what to do. A reason is a word, or starts one of a free text.
_HOPELESS = {
    "AccountNotAllowed": "set cluster.slurm.account to one that the partition takes",
    "BadConstraints": "no node has what cluster.slurm.options ask for",
    "BadGRES": "no node has what cluster.slurm.options ask for",
    "InvalidAccount": "correct cluster.slurm.account",
    "InvalidQOS": "correct cluster.slurm.qos",
    "Job's account": "set cluster.slurm.account to one that the partition takes",
    "JobHeldAdmin": "ask the cluster's administrators",
    "JobHeldUser": "release it with scontrol release",
    "PartitionConfig": "no node of the partition has that many cluster.slurm.cpus or that much memory",
    "PartitionDown": "set cluster.slurm.partition to one that is up",
    "PartitionInactive": "set cluster.slurm.partition to one that is up",
    "PartitionNodeLimit": "set cluster.slurm.partition to one that takes a job of this size",
    "PartitionTimeLimit": "lower cluster.slurm.time, or set cluster.slurm.partition to one that allows it",
    "QOSNotAllowed": "correct cluster.slurm.qos, or set cluster.slurm.partition to one that takes it",
    "QOSTimeLimit": "lower cluster.slurm.time",
    "launch failed requeued held": "a node could not start it; ask the cluster's administrators",
    "user env retrieval failed requeued held": "a node could not start it; ask the cluster's administrators",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One line of the queue. ``preempted``: Slurm has told that it will be taken away (its grace time runs)."""

    id: int
    state: str
    name: str
    preempted: bool
    reason: str

    @property
    def phase(self) -> Phase:
        """An unknown state (Slurm's next release) counts as running: then nothing is started in its place."""
        if self.state in _WAITING:
            return Phase.WAITING
        return Phase.ENDED if self.state in _ENDED else Phase.RUNNING

    @property
    def code(self) -> int | None:
        return _ENDED.get(self.state)

    @property
    def remedy(self) -> str:
        """Of a waiting job that can't begin as things are: what to do. "" when waiting helps."""
        if self.phase is not Phase.WAITING:
            return ""
        return next((advice for word, advice in _HOPELESS.items() if self.reason.startswith(word)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Of Slurm's configuration: seconds between SIGTERM and SIGKILL, and whether SIGTERM reaches every process of a job
    and not only the worker, sandboxes included (``proctrack/linuxproc``)."""

    kill_wait_s: float
    signals_all: bool


def parse_site(text: str) -> Site:
    """``scontrol show config``; Slurm's own defaults for what it doesn't say."""
    said = dict(re.findall(r"^(\w+)\s*=\s*(\S+)", text, re.MULTILINE))
    wait = re.match(r"\d+", said.get("KillWait", ""))
    return Site(
        kill_wait_s=float(wait[0]) if wait else 30.0,
        signals_all=said.get("ProctrackType", "") == "proctrack/linuxproc",
    )


def parse_queue(text: str) -> list[Job]:
    """Lines of ``squeue --noheader -O QUEUE_FORMAT``; array jobs (not the farm's) and broken lines are left out."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(_SEPARATOR, len(_FIELDS) - 1)]
        if len(parts) == len(_FIELDS) and parts[0].isdigit():
            number, state, name, preempted, reason = parts
            found.append(
                Job(
                    id=int(number),
                    state=state,
                    name=name,
                    preempted=preempted[:1].isdigit() and state == "RUNNING",
                    reason=reason.rstrip(_SEPARATOR).strip(),
                )
            )
    return found


def parse_submitted(text: str) -> int | None:
    """The job id that ``sbatch --parsable`` printed ("ID" or "ID;CLUSTER", after whatever a site's plugin says)."""
    last = text.strip().rpartition("\n")[2].partition(";")[0]
    return int(last) if last.isdigit() else None


def script(command: Sequence[str], setup: Sequence[str], *, path: str) -> str:
    """The job's script. ``exec``: then the worker is what Slurm signals, and its end is the job's.

    ``setup`` runs in a login shell, for that is where sites define ``module`` and the like. Its profile may set PATH
    anew, so ``path``, the farm's own, is put before that again."""
    first = ["#!/bin/bash -l", f"export PATH={shlex.quote(path)}:$PATH"] if setup else ["#!/bin/bash"]
    return "\n".join([*first, "set -e", *setup, f"exec {shlex.join(command)}", ""])


def submission(
    config: SlurmConfig, *, name: str, output: str, folder: str, comment: str, environment: Iterable[str]
) -> list[str]:
    """Arguments of sbatch, whose standard input is the script. ``output``: a path, in which %j is the job's id;
    ``environment``: names of the variables that are set here."""
    named = {"partition": config.partition, "account": config.account, "qos": config.qos, "time": config.time}
    return [
        f"--job-name={name}",
        f"--output={output}",
        "--open-mode=append",
        "--requeue",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={config.cpus}",
        *([f"--mem={config.memory}"] if config.memory else []),
        *(f"--{option}={value}" for option, value in named.items() if value),
        f"--chdir={folder}",
        f"--comment={comment}",
        f"--export={','.join(sorted(set(_EXPORTED) & set(environment)))}",
        *config.options,
    ]
