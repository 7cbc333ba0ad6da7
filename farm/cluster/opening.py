"""Putting a cluster together, in two steps: :func:`open_cluster` brings up a scheduler and checks hosts, before
anything dear (engines) is started; :meth:`OpenCluster.start` has the workers come.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster, Scheduler, Security

from farm.cluster import Cluster
from farm.cluster.address import own_address
from farm.cluster.certificates import make_credentials
from farm.cluster.crews import Crew, JoinedCrew, LaunchedCrew, LocalCrew, farm_plan
from farm.cluster.dask_cluster import DaskCluster
from farm.cluster.examine import check_engines, check_software, examine, software
from farm.cluster.launcher import Launch, make_launcher
from farm.cluster.on_scheduler import FarmPlugin
from farm.cluster.on_worker import EpisodesPlugin
from farm.cluster.roster import RosterRules
from farm.cluster.settings import apply_settings, security_of
from farm.cluster.ticket import Expected, Ticket
from farm.config import ClusterConfig
from farm.errors import FarmError, UsageError

_CONNECT_S = 15.0
_ASK_S = 60.0
_LOOK_S = 0.2
_CLOSE_S = 20.0
_REMOVE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the workers share with the farm. ``run``: the run folder, at the same path on every host; ``scratch``: a
    folder of this machine for Dask's own files, which the caller removes; ``provider``: of sandboxes, with options."""

    run: Path
    scratch: Path
    provider: str = "fake"
    provider_options: Mapping[str, Any] = field(default_factory=dict)


class OpenCluster:
    """A scheduler without work. End it with :meth:`close`, or with that of the cluster which :meth:`start` returned."""

    def __init__(self, config: ClusterConfig, client: Client, crew: Crew, expected: Expected | None = None) -> None:
        self._config = config
        self._expected = expected  # of workers that somebody else starts
        self.client = client
        self._crew = crew

    async def start(
        self, *, workers: int, runner: str, options: Mapping[str, Any], engines: tuple[str, ...] = ()
    ) -> Cluster:
        """``workers`` workers that can run attempts with ``runner`` ("module:factory", called with ``options``) and
        reach ``engines``. Of a cluster that is slow to give them (a queue), one is enough after ``start_s``; of one
        that somebody else runs, at once.

        Raises ``UsageError`` when a worker refuses its host, ``FarmError`` when none comes."""
        client = self.client
        if self._expected is None:
            await self._gather_workers(workers, want=workers)
        else:
            await self._gather_workers(1, want=None)
            await _check_members(client, self._expected)  # some may have come since
        if engines and self._config.kind != "local":
            await ask_workers(client, "engines", check_engines, engines)
        await self._set_up(EpisodesPlugin(runner, options, self._expected))
        return DaskCluster(client, self._crew)

    async def _set_up(self, plugin: EpisodesPlugin) -> None:
        """On those that are there, and on whoever joins later. One that dies meanwhile fails it for all: once more
        without that one. Raises ``FarmError``."""
        for last in (False, True):
            try:
                await asyncio.wait_for(self.client.register_plugin(plugin), timeout=_ASK_S)
                return
            except (OSError, TimeoutError) as error:
                why = str(error) or f"no answer within {_ASK_S:g} s"
                if last:
                    raise FarmError(f"the workers could not be set up: {why}", kind="no_answer") from None
                _log.warning("a worker could not be set up (%s); once more with those that are there", why)

    async def _gather_workers(self, workers: int, *, want: int | None) -> None:
        give_up_at = time.monotonic() + self._config.start_s
        while True:
            plan = await farm_plan(self.client, want)
            if len(plan.live) >= workers:
                return
            await self._crew.reach(workers, plan)
            if self._crew.refusal:
                raise UsageError(self._crew.refusal)
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(_LOOK_S)
        why = f"; the last that failed: {self._crew.last_failure}" if self._crew.last_failure else ""
        why += f"; {self._crew.waits}" if self._crew.waits else ""
        told = f"{len(plan.live)} of {workers} workers joined within {self._config.start_s:g} s{why}"
        if not plan.live:
            raise FarmError(f"{self.client.scheduler.address}: {told}", kind="no_workers")
        _log.warning("%s; the farm starts with them", told)

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self.client.close(), timeout=_CLOSE_S)
        await self._crew.close()


async def open_cluster(config: ClusterConfig, site: Site) -> OpenCluster:
    """The scheduler of ``config``: an own one, with its hosts checked, or the one at ``config.address``.

    Raises ``UsageError`` for whatever is wrong with hosts or address; nothing is left running then."""
    apply_settings()
    match config.kind:
        case "local":
            opened = await _open_local(config, site)
        case "join":
            opened = await _open_joined(config, site)
        case _:
            opened = await _open_launched(config, site)
    try:
        await _plan_for(opened, config)
    except BaseException:
        await opened.close()
        raise
    return opened


async def _plan_for(opened: OpenCluster, config: ClusterConfig) -> None:
    try:
        await opened.client.register_plugin(FarmPlugin())
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"cluster.address {config.address!r}: the scheduler has no rollout-farm like this one ({error}); install "
            "it there as it is here"
        ) from None


# ------------------------------------------------------------------------------------------------ local


async def _open_local(config: ClusterConfig, site: Site) -> OpenCluster:
    local = await LocalCluster(
        n_workers=0,
        threads_per_worker=config.slots,
        processes=True,
        host="127.0.0.1",
        scheduler_port=config.port,
        dashboard_address="127.0.0.1:0",
        memory_limit=0,
        local_directory=str(site.scratch),
        asynchronous=True,
        silence_logs=logging.ERROR,
    )
    try:
        client = await Client(local, asynchronous=True, set_as_default=True)
    except BaseException:
        await local.close()
        raise
    return OpenCluster(config, client, LocalCrew(local))


# ------------------------------------------------------------------------------------------------ joined


async def _open_joined(config: ClusterConfig, site: Site) -> OpenCluster:
    security = None
    if config.address.startswith("tls://"):
        security = Security(
            tls_ca_file=config.tls_ca,
            tls_client_cert=config.tls_cert,
            tls_client_key=config.tls_key,
            require_encryption=True,
        )
    try:
        client = await Client(
            config.address, asynchronous=True, set_as_default=True, security=security, timeout=_CONNECT_S
        )
    except (OSError, TimeoutError) as error:
        raise UsageError(
            f"cluster.address {config.address!r}: no scheduler answers ({type(error).__name__}: {error}); start one "
            "there with 'dask scheduler', with certificates of the same authority, or leave address out"
        ) from None
    folder = site.run / "cluster"
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(client.close)
        await _make_folder(folder, ends)
        expected = _expected(site, *_write_probe(folder))
        await _check_members(client, expected)
        crew = JoinedCrew(client, ends.pop_all())
    return OpenCluster(config, client, crew, expected)


async def _check_members(client: Client, expected: Expected) -> None:
    """Scheduler and workers that are there have the same software, and the workers see the run folder."""
    try:
        found = await asyncio.wait_for(client.get_versions(), timeout=_ASK_S)
    except TimeoutError:
        raise FarmError(f"the workers did not answer within {_ASK_S:g} s (versions)", kind="no_answer") from None
    for where, said in {"the scheduler": found["scheduler"], **found["workers"]}.items():
        there = {name: str(said["packages"][name]) for name in expected.software if name in said["packages"]}
        there["python"] = said["host"]["python"]
        check_software({name: expected.software[name] for name in there}, there, where=where)
    await ask_workers(client, "farm", examine, expected)


async def _make_folder(folder: Path, ends: contextlib.AsyncExitStack) -> None:
    """Anew, in place of what a farm that was killed left, and only until ``ends``."""
    if not await _remove_folder(folder):
        raise UsageError(
            f"{folder}: a farm before left it, and it can't be removed; end what still uses it (workers of that farm "
            "end by themselves within a minute), or remove it"
        )
    ends.push_async_callback(_clear_away, folder)
    folder.mkdir(mode=0o700, parents=True)


async def _clear_away(folder: Path) -> None:
    if not await _remove_folder(folder):
        _log.warning("%s could not be removed; what is in it is worth nothing any more", folder)


async def _remove_folder(folder: Path) -> bool:
    """Whether it is gone. Tries for a few seconds: a worker that is just joining may write there, and NFS keeps the
    files that somebody has open."""
    give_up_at = time.monotonic() + _REMOVE_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return True
        if time.monotonic() > give_up_at:
            return False
        await asyncio.sleep(_LOOK_S)


async def ask_workers(client: Client, what: str, function: Any, *arguments: Any) -> None:
    """Run a check on every worker. Raises what the first one that objects says."""
    try:
        answers = await asyncio.wait_for(client.run(_outcome, function, *arguments, on_error="return"), timeout=_ASK_S)
    except TimeoutError:
        raise FarmError(f"the workers did not answer within {_ASK_S:g} s ({what})", kind="no_answer") from None
    for where, answer in answers.items():
        if isinstance(answer, ModuleNotFoundError):
            raise UsageError(f"{where}: rollout-farm is not installed there ({answer}); install it as it is here")
        if isinstance(answer, BaseException):
            raise FarmError(f"{where}: {type(answer).__name__}: {answer}", kind="worker")
        if answer:
            raise UsageError(str(answer))


async def _outcome(function: Any, *arguments: Any) -> str:
    """On a worker: what the check objects to; "" when nothing. In a thread, for it may block."""
    try:
        await asyncio.to_thread(function, *arguments)
    except UsageError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------------------- launched


async def _open_launched(config: ClusterConfig, site: Site) -> OpenCluster:
    credentials = make_credentials()
    security = security_of(credentials)
    folder = site.run / "cluster"
    async with contextlib.AsyncExitStack() as ends:  # the scheduler closes first, then the launcher
        await _make_folder(folder, ends)
        async with contextlib.AsyncExitStack() as serving:
            scheduler = await _start_scheduler(config, security)
            serving.push_async_callback(_close_scheduler, scheduler)
            launch = Launch(
                config=config,
                ticket=Ticket(
                    scheduler=scheduler.address,
                    slots=config.slots,
                    credentials=credentials,
                    expected=_expected(site, *_write_probe(folder)),
                    environment=_environment(config.environment),
                    leave_s=config.leave_s,
                ),
                label=f"farm-{hashlib.sha256(str(site.run).encode()).hexdigest()[:12]}",
                logs=site.run / "logs",
                folder=folder,
            )
            launcher = make_launcher(config.kind, launch)
            ends.push_async_callback(launcher.close)
            ends.push_async_exit(serving.pop_all())
        await launcher.prepare()
        client = await Client(
            scheduler.address, asynchronous=True, set_as_default=True, security=security, timeout=_CONNECT_S
        )
        crew = LaunchedCrew(client, launcher, RosterRules(join_s=config.join_s), ends.pop_all())
    return OpenCluster(config, client, crew)


async def _close_scheduler(scheduler: Scheduler) -> None:
    """It tells its workers, and they end."""
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError, OSError):
        await asyncio.wait_for(scheduler.close(reason="the farm ends"), timeout=_CLOSE_S)


async def _start_scheduler(config: ClusterConfig, security: Security) -> Scheduler:
    host = await asyncio.to_thread(own_address, config)
    scheduler = Scheduler(
        protocol="tls",
        host=host,
        port=config.port,
        security=security,
        dashboard=False,
        dashboard_address="127.0.0.1:0",  # Dask opens an HTTP port in any case
    )
    try:
        return await scheduler
    except OSError as error:
        await scheduler.close()
        raise UsageError(
            f"cluster.host {host!r}: can't listen there on port {config.port} ({error.strerror}); it must be an "
            "address of this machine that the workers reach, and the port free (0: any)"
        ) from None


def _environment(names: tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UsageError(f"cluster.environment: {missing[0]} is not set here; set it, or leave it out")
    return {name: os.environ[name] for name in names}


def _write_probe(folder: Path) -> tuple[Path, str]:
    """A file that only this start of the farm can have written."""
    text = secrets.token_hex(16)
    probe = folder.absolute() / f"probe-{text[:8]}"
    probe.write_text(text)
    return probe, text


def _expected(site: Site, probe: Path, text: str) -> Expected:
    return Expected(
        software=software(),
        probe=str(probe),
        probe_text=text,
        provider=site.provider,
        provider_options=site.provider_options,
    )
