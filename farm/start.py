"""Putting a farm together and taking it apart again: folder, lock, leftovers, policy, engines, cluster.

Whatever was started is ended in the reverse order, also when a later part does not start (Rule 7).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from farm.config import EngineConfig, FarmConfig, to_json
from farm.dispatch import EndlessPlan, FinitePlan, Plan, PlanSpec
from farm.durable import FolderLock
from farm.engine_orders import read_orders
from farm.errors import UsageError
from farm.farm_state import ProcessId, end_processes, read_status, write_status
from farm.fleet import Fleet, start_fleet
from farm.policy_log import PolicyLog
from farm.preflight import Prepared
from farm.run_folder import RunFolder
from farm.sandbox import make_provider
from farm.service import Engines, Farm, FarmParts
from farm.trajectory_log import DirectoryLog
from farm.types import PolicyVersion
from farm.worker import WorkerOptions

RUNNER = "farm.worker:make_worker"

_PUBLISH_TRIES = 20
_PUBLISH_DELAY_S = 0.25

_log = logging.getLogger(__name__)


# Keys of [engine] that say where engines are; the others say what they must be.
_WHERE_ENGINES_ARE = ("kind", "host", "count", "urls", "command", "gpus_per_engine", "start_timeout_s", "pools")


def open_run(path: Path, config: FarmConfig) -> RunFolder:
    """The run folder for ``config``. Where it runs (section cluster, which engines) may change between starts; what
    runs may not. The folder goes on to say what the first start said."""
    resolved = to_json(config)
    del resolved["cluster"]
    if (path / "config.json").exists():
        before = RunFolder.open(path).config().get("engine", {})
        unsaid = json.loads(EngineConfig().model_dump_json())
        for key, value in list(resolved["engine"].items()):
            if key in _WHERE_ENGINES_ARE and key in before:
                resolved["engine"][key] = before[key]
            elif key not in before and (key in _WHERE_ENGINES_ARE or value == unsaid[key]):
                del resolved["engine"][key]  # the version that laid it out did not know it
    return RunFolder.create(path, resolved)


def make_plan(config: FarmConfig, prepared: Prepared) -> Plan:
    spec = PlanSpec(
        group_size=config.rollout.group_size,
        seed=config.rollout.seed,
        purpose=config.rollout.purpose,
        sampling=config.rollout.sampling,
        limits=config.limits.limits,
    )
    if config.rollout.purpose == "eval":
        return FinitePlan(prepared.tasks, spec)
    return EndlessPlan(prepared.tasks, spec)


def clean_up_after(run: RunFolder) -> None:
    """End what a farm that was killed left running. The lock is held, so that farm is dead."""
    status = read_status(run)
    if status is None:
        return
    engines = [ProcessId.from_json(engine["process"]) for engine in status["engines"] if engine.get("process")]
    if count := end_processes(engines):
        _log.warning("ended %d engine processes that the farm before left behind", count)


def publish_base(policies: PolicyLog, base: Path) -> PolicyVersion:
    """The newest version; ``base`` becomes step 0 when there is none. A trainer may be publishing the same at once."""

    def copy(target: Path) -> None:
        for file in sorted(base.iterdir()):
            if file.is_file() and file.name != "policy.json":
                shutil.copyfile(file, target / file.name)

    for tries_left in reversed(range(_PUBLISH_TRIES)):
        latest = policies.latest()
        if latest is not None:
            return latest
        try:
            return policies.publish(0, copy, consumed_groups=0)
        except UsageError:  # somebody else holds the publisher's lock
            if not tries_left:
                raise
            time.sleep(_PUBLISH_DELAY_S)
    raise AssertionError("unreachable")


@contextlib.asynccontextmanager
async def running_farm(
    run: RunFolder, config: FarmConfig, prepared: Prepared, *, progress: Callable[[str], None]
) -> AsyncIterator[Farm]:
    """A farm that is up and ready for :meth:`Farm.run`. ``progress`` is told what is being started."""
    from farm.cluster.opening import Site, open_cluster  # imports Dask

    async with contextlib.AsyncExitStack() as stack:
        lock = FolderLock(run.path / "farm.lock", "farm")
        lock.acquire()
        stack.callback(lock.release)
        await asyncio.to_thread(clean_up_after, run)
        _announce(run)
        log = DirectoryLog(run.trajectories)
        stack.callback(log.close)
        await asyncio.to_thread(log.seal)
        stack.push_async_callback(asyncio.to_thread, log.seal)  # what landed while the cluster was closing
        provider_options = config.sandbox_options(run.path)
        provider = make_provider(config.sandbox.provider, **provider_options)
        await provider.sweep(now_s=time.time())
        scratch = run.path / ".scratch"
        shutil.rmtree(scratch, ignore_errors=True)  # of a farm that was killed
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        site = Site(run=run.path, scratch=scratch, provider=config.sandbox.provider, provider_options=provider_options)
        opened = await open_cluster(config.cluster, site)  # hosts are checked before engines are started
        stack.push_async_callback(opened.close)
        policies: PolicyLog | None = None
        fleet: Engines | None = None
        model_path = ""
        if prepared.base_policy is not None:
            policies = PolicyLog(run.policies)
            version = await asyncio.to_thread(publish_base, policies, prepared.base_policy)
            model_path = str(prepared.base_policy)
            if config.cluster.kind != "local" and (first := policies.get(0)) is not None:
                model_path = first.path  # in the run folder, which all hosts have; it is never pruned
            progress(f"starting engines on policy {version.name}")
            fleet = await _start_fleet(stack, run, config, version)
        minimum, _ = config.cluster.span
        progress(f"starting {minimum} workers of {config.cluster.slots} slots")
        options = WorkerOptions(
            log_path=str(run.trajectories),
            provider=config.sandbox.provider,
            provider_options=provider_options,
            start_delay_s=config.sandbox.start_delay_s,
            agent=config.agent.name,
            agent_command=config.agent.command,
            renderer=config.renderer.name,
            grader=config.grader.name,
            model_path=model_path,
            fault_rate=config.inject.rate,
            fault_seed=config.inject.seed,
            graded_path=str(run.graded) if config.rollout.purpose == "eval" else "",  # training would fill a disk
        )
        cluster = await opened.start(
            workers=minimum,
            runner=RUNNER,
            options={"options": options},
            engines=() if fleet is None else tuple(engine["url"] for engine in fleet.status()),
        )
        stack.push_async_callback(cluster.close)
        yield Farm(
            FarmParts(
                run=run,
                config=config,
                plan=make_plan(config, prepared),
                cluster=cluster,
                log=log,
                policies=policies,
                fleet=fleet,
                provider=provider,
            )
        )


async def _start_fleet(
    stack: contextlib.AsyncExitStack, run: RunFolder, config: FarmConfig, version: PolicyVersion
) -> Fleet:

    fleet = await start_fleet(config.engine, version=version, logs=run.logs, orders=partial(read_orders, run))
    stack.push_async_callback(fleet.close)
    return fleet


def _announce(run: RunFolder) -> None:
    """So that ``farm down`` finds the process from the first moment on."""
    me = ProcessId.of(os.getpid())
    if me is not None:
        write_status(run, {"state": "starting", "process": me.to_json(), "engines": []})


async def run_farm(
    run: RunFolder,
    config: FarmConfig,
    prepared: Prepared,
    *,
    progress: Callable[[str], None],
    watch: Callable[[Farm], Coroutine[Any, Any, None]] | None = None,
) -> Farm:
    """Start, run to the end, take apart. The first SIGINT or SIGTERM drains, the second stops at once; while the farm
    is still starting the first one ends it. ``watch`` runs beside the farm and is cancelled when it ends."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    farm: Farm | None = None

    def on_signal() -> None:
        if farm is None:
            assert main is not None
            main.cancel()
        elif farm.draining:
            farm.stop()
        else:
            farm.drain()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        async with running_farm(run, config, prepared, progress=progress) as farm:
            watcher = asyncio.create_task(watch(farm)) if watch else None
            try:
                await farm.run()
            finally:
                if watcher is not None:
                    watcher.cancel()
                    await asyncio.wait({watcher})
            return farm
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
