"""One way for each kind of cluster to have one for tests: kind -> context manager that gives a configuration.

``ROLLOUT_FARM_CLUSTERS`` names the kinds that this machine is set up for (ci/clusters.sh); without it, those that need
nothing but Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makers import make_task

from farm.cluster import Cluster
from farm.cluster.opening import Site, open_cluster
from farm.config import ClusterConfig
from farm.types import Attempt, Episode

PLAIN = ("local", "join")

RUNNER = '''
"""A runner for tests: the task's problem statement says what to do."""
import asyncio, os, time


class Runner:
    def __init__(self, *, worker, folder):
        self.worker, self.folder = worker, folder

    async def run(self, attempt):
        words = attempt.episode.task.problem_statement.split()
        open(os.path.join(self.folder, f"started-{attempt.episode.index}-{attempt.number}-{os.getpid()}"), "w").close()
        if words[0] == "sleep":
            await asyncio.sleep(float(words[1]))
        if words[0] == "block":
            time.sleep(float(words[1]))
        while words[0] == "wait" and not os.path.exists(os.path.join(self.folder, words[1])):
            await asyncio.sleep(0.05)
        if words[0] == "raise":
            raise RuntimeError("a defect")
        return {"index": attempt.episode.index, "pid": os.getpid(), "worker": self.worker}

    def distrust(self):
        pass

    async def close(self):
        open(os.path.join(self.folder, f"closed-{os.getpid()}"), "w").close()
'''


async def start_cluster(
    config: ClusterConfig,
    *,
    workers: int,
    runner: str,
    options: Mapping[str, Any],
    scratch: Path,
    run: Path | None = None,
) -> Cluster:
    """Both steps of :mod:`farm.cluster.opening` at once; ``run`` is the folder that all hosts share (default:
    ``scratch``)."""
    opened = await open_cluster(config, Site(run=run or scratch, scratch=scratch))
    try:
        return await opened.start(workers=workers, runner=runner, options=options)
    except BaseException:
        await opened.close()
        raise


def kinds() -> tuple[str, ...]:
    named = os.environ.get("ROLLOUT_FARM_CLUSTERS", "")
    return tuple(kind for kind in named.split(",") if kind in KINDS) if named else PLAIN


def interpreter(folder: Path) -> str:
    """A python that also finds the modules in ``folder``, for workers that get no environment from here."""
    path = folder / "python-of-workers"
    paths = ":".join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    path.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@contextmanager
def local(folder: Path, *, workers: int, slots: int) -> Iterator[ClusterConfig]:  # noqa: ARG001
    yield ClusterConfig(slots=slots)


@contextmanager
def join(folder: Path, *, workers: int, slots: int) -> Iterator[ClusterConfig]:
    """A scheduler and workers that somebody else runs."""
    environment = {**os.environ, "PYTHONPATH": ":".join([str(folder), os.environ.get("PYTHONPATH", "")])}
    with ExitStack() as stack:

        def process(*arguments: str) -> None:
            popen = subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(popen.wait)
            stack.callback(popen.kill)

        address_file = folder / "scheduler.json"
        process(
            "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show",
            "--scheduler-file", str(address_file),
        )  # fmt: skip
        give_up_at = time.monotonic() + 60
        while not address_file.exists() or not address_file.read_text().strip():
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        for number in range(workers):
            process(
                "worker", "--scheduler-file", str(address_file), "--nthreads", str(slots), "--no-nanny",
                "--no-dashboard", "--memory-limit", "0", "--local-directory", str(folder), "--name", f"other-{number}",
            )  # fmt: skip
        yield ClusterConfig(address=json.loads(address_file.read_text())["address"], slots=slots)


@contextmanager
def ssh(folder: Path, *, workers: int, slots: int) -> Iterator[ClusterConfig]:
    from ssh_hosts import SshHosts

    with SshHosts(folder / "ssh", "worker-a", "worker-b") as hosts:
        yield ClusterConfig.model_validate(
            {
                "kind": "ssh",
                "slots": slots,
                "workers": workers,
                "python": interpreter(folder),
                "ssh": {"hosts": hosts.names, "options": hosts.options, "workers_per_host": 2},
            }
        )


@contextmanager
def slurm(folder: Path, *, workers: int, slots: int) -> Iterator[ClusterConfig]:
    """Jobs of the Slurm that ``slurm_cluster.py`` has started; none is left when this ends."""
    from slurm_cluster import queue_is_empty, temporary

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary()))
        yield ClusterConfig.model_validate(
            {
                "kind": "slurm",
                "host": "127.0.0.1",
                "slots": slots,
                "workers": f"{workers}:8",
                "python": interpreter(folder),
                "environment": ["TMPDIR"],
            }
        )
    assert queue_is_empty(), "jobs were left in the queue"


@contextmanager
def kubernetes(folder: Path, *, workers: int, slots: int) -> Iterator[ClusterConfig]:
    """Real kubectl, and behind it a double that runs pods as processes: no proof of a real cluster."""
    from kube_server import kube_cluster

    with kube_cluster(folder / "kube") as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.folder / "kubeconfig"))
        yield ClusterConfig.model_validate(
            {
                "kind": "kubernetes",
                "host": "127.0.0.1",
                "slots": slots,
                "workers": f"{workers}:8",
                "python": interpreter(folder),
                "kubernetes": {"image": "registry.example/rollout-farm:1", "mount": str(folder)},
            }
        )
        assert not cluster.objects["pods"], "pods were left"
        assert not cluster.objects["secrets"], "a secret was left"


Maker = Callable[..., AbstractContextManager[ClusterConfig]]
KINDS: Mapping[str, Maker] = {"local": local, "join": join, "ssh": ssh, "slurm": slurm, "kubernetes": kubernetes}
ELASTIC: frozenset[str] = frozenset(KINDS) - {"join"}  # of the others, somebody else starts the workers


def make_attempt(index: int, what: str, number: int = 1) -> Attempt:
    """Of :data:`RUNNER`; ``what`` it does."""
    task = replace(make_task("t"), problem_statement=what)
    episode = Episode(task=task, group_id="g", index=index, group_size=64, seed=index)
    return Attempt(episode=episode, number=number, engine_url="", min_version=0, queued_at_s=0.0)
