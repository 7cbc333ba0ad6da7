"""Everything that can be wrong with the input is found here, before anything starts (Rule 11).

Each check raises ``UsageError`` with one line: what, where, what is allowed, what to do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import shutil
import socket
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.agent import make_agent
from farm.cluster.address import cluster_address
from farm.config import ClusterConfig, EnginePoolConfig, FarmConfig
from farm.engine.fitness import check_server
from farm.engine.launch import share_out_gpus, visible_gpus
from farm.errors import UsageError
from farm.grader import make_grader
from farm.grader.parsers import PARSERS
from farm.protocols import ImageKeeper
from farm.render import RENDERERS, make_renderer
from farm.render.messages import MessageRenderer
from farm.sandbox import PROVIDERS, make_provider
from farm.sandbox.build_context import SCHEME
from farm.sandbox.rootfs import IMAGES
from farm.tasks import load_tasks
from farm.types import Task

# They sample nothing, so a farm that runs only them needs no engine and no policy.
ENGINELESS_AGENTS = frozenset({"oracle", "null"})

# What an empty policy.base stands for.
SHIPPED_POLICY = Path(__file__).parents[1] / "datasets" / "micro" / "base-policy"

_PROBE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Input that has been found good. ``base_policy`` is None when no engine is needed."""

    tasks: tuple[Task, ...]
    base_policy: Path | None


def needs_engine(config: FarmConfig) -> bool:
    return config.agent.name not in ENGINELESS_AGENTS


def prepare(config: FarmConfig) -> Prepared:
    """Check everything and load the tasks."""
    make_agent(config.agent.name, command=config.agent.command)
    base_policy = None
    if needs_engine(config):
        if config.renderer.name not in RENDERERS:
            make_renderer(config.renderer.name, "")  # raises, naming the choices
        base_policy = check_policy(Path(config.policy.base) if config.policy.base else SHIPPED_POLICY)
        renderer = make_renderer(config.renderer.name, str(base_policy))
        if config.agent.name == "external" and not isinstance(renderer, MessageRenderer):
            raise UsageError(
                f"renderer.name {config.renderer.name!r} takes no messages, agent 'external' sends them: use chat"
            )
        _check_engines(config, base_policy)
    check_cluster(config)
    tasks = load_tasks(config.rollout.tasks, limit=config.rollout.limit)
    make_grader(config.grader.name)
    _check_parsers(tasks, config.grader.name)
    _check_images(tasks, config.sandbox.provider)
    _check_machines(tasks, config)
    provider = make_provider(config.sandbox.provider, **config.sandbox_options())
    if not tasks:
        raise UsageError(f"tasks {config.rollout.tasks!r}: no tasks in there; give a source with at least one")
    if isinstance(provider, ImageKeeper):
        asyncio.run(provider.check({task.image for task in tasks}))
    _warn_of_waiting(config)
    return Prepared(tasks=tuple(tasks), base_policy=base_policy)


def _warn_of_waiting(config: FarmConfig) -> None:
    """More episodes at once than an account has places are no error, but they gain nothing and lose time."""
    most, places = config.cluster.span[1] * config.cluster.slots, config.e2b.concurrent
    if config.sandbox.provider == "e2b" and most > places:
        _log.warning(
            "cluster.workers x cluster.slots = %d episodes at once, and e2b.concurrent = %d sandboxes: the others wait "
            "for a place, on their own time (limits.episode_s); as many as there are places: --set cluster.slots=%d",
            most,
            places,
            max(1, places // config.cluster.span[1]),
        )


def _check_parsers(tasks: Sequence[Task], grader: str) -> None:
    """The grader ``tests`` has parsers of its own; SWE-bench's are known to SWE-bench alone."""
    unknown = sorted({task.log_parser for task in tasks} - PARSERS.keys()) if grader == "tests" else []
    if unknown:
        raise UsageError(
            f"grader.name 'tests' has no log parser {', '.join(unknown)[:200]}; it knows {', '.join(sorted(PARSERS))}. "
            "Rows of SWE-bench are for the grader 'swebench'"
        )


def _check_images(tasks: Sequence[Task], provider: str) -> None:
    """Bubblewrap makes its images from this machine; others are pulled, which takes another provider."""
    unknown = sorted({task.image for task in tasks} - set(IMAGES)) if provider == "bubblewrap" else []
    if unknown:
        others = sorted(PROVIDERS.keys() - {provider, "fake"})
        raise UsageError(
            f"sandbox.provider 'bubblewrap' has no image {unknown[0]!r}; it has {', '.join(IMAGES)}. Tasks with images "
            f"of their own need another provider: --set sandbox.provider={'|'.join(others) or 'docker'}"
        )


def _check_machines(tasks: Sequence[Task], config: FarmConfig) -> None:
    """What tasks say of their own machine and limits can be given to them here."""
    provider = config.sandbox.provider
    network = {"docker": bool(config.docker.network), "e2b": config.e2b.internet, "harbor": True, "fake": True}.get(
        provider, False
    )
    for task in tasks:
        for name, value in task.own_limits.items():
            if value > getattr(config.limits, name):
                raise UsageError(
                    f"task {task.instance_id}: asks for {name} = {value:g}, limits.{name} is "
                    f"{getattr(config.limits, name):g}; allow it: --set limits.{name}={value:g} (time limits stay "
                    "ordered: agent_s < episode_s)"
                )
        if task.machine.network and not network:
            raise UsageError(
                f"task {task.instance_id}: its machine has a network (environment.network_mode 'public' is Harbor's "
                f"default), sandboxes here have none: {_NETWORK.get(provider, _NETWORK[''])}; or, where it needs none, "
                'write network_mode = "no-network" in its task.toml'
            )
        if not task.workdir and provider != "docker":
            raise UsageError(
                f"task {task.instance_id}: only its image says where commands run: set environment.workdir"
            )
        if task.image.startswith(SCHEME) and provider == "e2b":
            raise UsageError(
                f"task {task.instance_id}: its Dockerfile is built by Docker only: push the image, name it in "
                "environment.docker_image, or use --set sandbox.provider=docker"
            )


_NETWORK = {
    "": "give another provider: --set sandbox.provider=docker",
    "docker": "name one of the daemon's: --set docker.network=bridge",
    "e2b": "--set e2b.internet=true",
}


def check_policy(folder: Path) -> Path:
    """``folder`` is a complete Hugging Face model folder; returns it absolute."""
    advice = "give a Hugging Face model folder (config.json, tokenizer.json, *.safetensors) to --policy or policy.base"
    if not folder.is_dir():
        raise UsageError(f"policy {folder}: no such folder; {advice}")
    for name in ("config.json", "tokenizer.json"):
        _read_object(folder / name, advice)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UsageError(f"policy {folder}: holds no *.safetensors; {advice}")
    for file in weights:
        _check_safetensors(file, advice)
    return folder.absolute()


def _read_object(path: Path, advice: str) -> None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"policy {path.parent}: has no {path.name}; {advice}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"policy {path}: unreadable ({error}); {advice}") from None
    if not isinstance(value, dict):
        raise UsageError(f"policy {path}: must be a JSON object, is a {type(value).__name__}; {advice}")


def _check_safetensors(path: Path, advice: str) -> None:
    """The header must parse and its tensors must fit the file exactly, or the file was cut short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
        if size != 8 + length + end:
            raise ValueError(f"{size} bytes, its header says {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"policy {path}: not a whole safetensors file ({error}); {advice}") from None


def _check_engines(config: FarmConfig, policy: Path) -> None:
    pools = config.engine.named_pools.values()
    for pool in pools:
        if not pool.urls:
            _check_engine_host(pool.host)
        for url in pool.urls:
            check_engine(url, where="engine.urls", config=config, pool=pool, policy=policy)
        if pool.kind == "launch" and shutil.which(pool.command[0]) is None:
            raise UsageError(
                f"engine.command: {pool.command[0]!r} is not a program here; install SGLang (pip install sglang) and "
                "name its python in engine.command, or use other engines"
            )
    share_out_gpus(visible_gpus(), [p.gpus_per_engine for p in pools if p.kind == "launch" for _ in range(p.count)])


def check_engine(url: str, *, where: str, config: FarmConfig, pool: EnginePoolConfig, policy: Path) -> None:
    """What answers at ``url`` is an SGLang server that is fit for ``pool`` and for the model in the folder ``policy``.
    ``where`` the address was given."""
    check_server(
        url,
        where=where,
        policy=policy,
        prompt_tokens=min(config.limits.max_context_tokens, pool.context_length) - 1,
        sampling=config.rollout.sampling,
    )


def _check_engine_host(host: str) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:
        raise UsageError(
            f"engine.host {host!r}: engines can't listen there ({error.strerror}); give an address of this machine"
        ) from None


def check_cluster(config: FarmConfig) -> None:
    """What can be told of the cluster from here: the address and port of its scheduler, and the way to the engines."""
    if needs_engine(config):
        _check_engines_are_reached(config)
    _check_port(config.cluster)
    _check_scheduler(config.cluster.address)


def _check_engines_are_reached(config: FarmConfig) -> None:
    """Workers on other hosts can't call an engine on this machine's loopback."""
    here = cluster_address(config.cluster)
    if ipaddress.ip_address(here).is_loopback:
        return
    for pool in config.engine.named_pools.values():
        urls = pool.urls or (f"http://{pool.host}",)
        for url in urls:
            if _is_loopback(urllib.parse.urlsplit(url).hostname or ""):
                key = "engine.urls" if pool.urls else "engine.host"
                raise UsageError(
                    f"{key}: {url} can't be reached by workers on other hosts (cluster.kind {config.cluster.kind!r}); "
                    f"give an address of the engines' machine that they reach, for example {here}, and keep it closed "
                    "to others: engines have no password"
                )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(cluster: ClusterConfig) -> None:
    if not cluster.port or cluster.kind == "join":
        return
    host = cluster_address(cluster)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, cluster.port))
        except OSError as error:
            raise UsageError(
                f"cluster.port {cluster.port}: can't be used on {host} ({error.strerror}); choose a free one, or 0 for "
                "any"
            ) from None


def _check_scheduler(address: str) -> None:
    if not address:
        return
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S):
            return
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cluster.address {address!r}: nobody answers there ({error}); start a scheduler with 'dask scheduler', or "
            "leave address empty for a local cluster"
        ) from None
