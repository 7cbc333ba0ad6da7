"""Configuration: TOML -> closed, frozen models -> resolved JSON in the run folder.

Every wrong value becomes one :class:`UsageError` line: where, what was given, what is allowed, what to do (Rule 11).
The defaults are the profile ``micro`` (the embedded default on two cores); task sources that need more room start from
another profile, and whatever the file or ``--set`` says wins over both.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from farm.errors import UsageError
from farm.types import Boundary, Limits, SamplingParams

# Whole-attempt slack beyond the episode's own wall limit: the lease must outlive it (tool < agent < episode < lease).
LEASE_SLACK_S = 30.0
SANDBOX_GRACE_S = 15.0  # how much longer than its attempt a sandbox is asked for


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SshConfig(_Section):
    """For ``cluster.kind = "ssh"``. ``hosts``: as the program ``ssh`` takes them ([USER@]HOST, or a name of its
    configuration); ``options``: more arguments for it, for example ["-p", "2222"]; ``workers_per_host``: at most so
    many on each. What ssh knows of users, keys, agents, jump hosts and host keys holds here too; it may ask nothing."""

    hosts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    workers_per_host: int = Field(default=1, ge=1, le=256)
    connect_s: float = Field(default=15.0, gt=0)

    @field_validator("hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not host or host.startswith("-") or any(c.isspace() for c in host):
                raise ValueError(f"hosts: {host!r} is not a host; write [USER@]HOST, for example worker-1")
        if len(set(hosts)) < len(hosts):
            raise ValueError("hosts: one is named twice; workers_per_host says how many workers a host gets")
        return hosts


class SlurmConfig(_Section):
    """For ``cluster.kind = "slurm"``: one job per worker. ``partition``, ``account``, ``qos``, ``time`` (a limit, as
    Slurm writes it) and ``memory`` (of a worker and all its sandboxes, for example "32G"): "" leaves each to Slurm's
    defaults; ``cpus``: of a worker and all its sandboxes; ``options``: more arguments for sbatch, for example
    ["--constraint=avx2"]; ``setup``: shell lines before the worker starts, for example ["module load python"]."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    cpus: int = Field(default=1, ge=1)
    memory: str = ""
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()

    @field_validator("options")
    @classmethod
    def _options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-"):
                raise ValueError(f"options: {option!r} is no option of sbatch; write --NAME=VALUE")
            name = option.partition("=")[0]
            if name in _OWN_SBATCH_OPTIONS:
                raise ValueError(f"options: {name} is the farm's own; leave it out")
        return options


_OWN_SBATCH_OPTIONS = (
    "--array", "-a", "--job-name", "-J", "--output", "-o", "--error", "-e", "--parsable", "--wrap", "--ntasks", "-n",
    "--nodes", "-N", "--wait", "-W", "--export", "--chdir", "-D", "--test-only",
)  # fmt: skip


class KubernetesConfig(_Section):
    """For ``cluster.kind = "kubernetes"``: one pod per worker, made by kubectl. Not run on a cluster yet.

    ``image`` holds rollout-farm as it is here (``cluster.python``: where, if not at the same path); ``claim``: a
    ReadWriteMany claim, mounted at ``mount``, in which the run folder lies at the same path on this machine.
    ``context`` and ``namespace``: "" for kubectl's own; ``user``: uid and gid that own the run folder; ``cpu``
    and ``memory``: of a worker and its sandboxes; ``patch``: laid over the pod's spec, for example
    {nodeSelector = {pool = "cpu"}}."""

    image: str = ""
    claim: str = "rollout-farm"
    mount: str = "/runs"
    context: str = ""
    namespace: str = ""
    user: int = Field(default=1000, ge=1)
    cpu: str = "2"
    memory: str = "8Gi"
    patch: dict[str, Any] = {}

    @field_validator("mount")
    @classmethod
    def _mount(cls, mount: str) -> str:
        if not mount.startswith("/") or mount == "/":
            raise ValueError(f"mount {mount!r} must be an absolute path below /, for example /runs")
        return mount


CLUSTER_KINDS = ("local", "ssh", "slurm", "kubernetes")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ClusterConfig(_Section):
    """Where attempts run. ``kind``: "local" (processes of this machine), "ssh", "slurm" or "kubernetes" (workers that
    the farm starts elsewhere; the farm's process has the scheduler), or "join": the scheduler at ``address``, which
    somebody else runs; with an ``address`` that is the default.

    ``workers`` is "N" or "MIN:MAX"; ``slots``: episodes at once per worker; ``port``: of the farm's scheduler (0: any
    free one). For workers elsewhere, ``host``: this machine's name or address as they reach it ("": found out);
    ``python``: the interpreter on their hosts that has rollout-farm ("": the same path as here); ``environment``: names
    of variables that they get from the farm's environment; ``start_s``: how long the first ones may take to come, and
    ``join_s`` how long each may take once it runs; ``leave_s``: what episodes get to end when their worker is preempted
    (SIGTERM; less than the grace that Slurm or Kubernetes gives). ``tls_*`` are for joining a tls:// address."""

    kind: Literal["local", "ssh", "slurm", "kubernetes", "join"] = "local"
    workers: str = "2"
    slots: int = Field(default=16, ge=1, le=10_000)
    address: str = ""
    host: str = ""
    port: int = Field(default=0, ge=0, le=65_535)
    python: str = ""
    environment: tuple[str, ...] = ()
    start_s: float = Field(default=180.0, gt=0)
    join_s: float = Field(default=120.0, gt=0)
    leave_s: float = Field(default=0.0, ge=0)
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    settle_s: float = Field(default=30.0, ge=0)
    ssh: SshConfig = SshConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    @field_validator("workers", mode="before")
    @classmethod
    def _workers(cls, value: object) -> str:
        text = str(value)
        parse_workers(text)
        return text

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, given: Any) -> Any:
        """An address alone says what kind it is."""
        if isinstance(given, Mapping) and given.get("address") and "kind" not in given:
            return {**given, "kind": "join"}
        return given

    @model_validator(mode="after")
    def _place(self) -> Self:
        if (self.kind == "join") != bool(self.address):
            raise ValueError(
                'kind "join" needs address, for example tls://10.0.0.1:8786'
                if self.kind == "join"
                else f'address {self.address!r} is for kind "join"; leave it out for {self.kind!r}'
            )
        if self.kind == "ssh":
            self._check_ssh()
        if self.kind == "kubernetes" and not self.kubernetes.image:
            raise ValueError('kind "kubernetes" needs kubernetes.image, an image that holds rollout-farm as it is here')
        if self.address:
            self._check_address()
        return self

    def _check_ssh(self) -> None:
        if not self.ssh.hosts:
            raise ValueError('kind "ssh" needs ssh.hosts, for example hosts = ["worker-1", "worker-2"]')
        room = len(self.ssh.hosts) * self.ssh.workers_per_host
        if self.span[1] > room:
            raise ValueError(
                f"workers {self.workers!r}: the {len(self.ssh.hosts)} ssh.hosts hold at most {room} "
                "(ssh.workers_per_host); want fewer, or name more hosts"
            )

    def _check_address(self) -> None:
        scheme, _, rest = self.address.partition("://")
        if scheme not in {"tcp", "tls"} or not rest:
            raise ValueError(f"address {self.address!r} must be tcp://HOST:PORT or tls://HOST:PORT")
        if scheme == "tcp" and rest.rsplit(":", 1)[0].strip("[]") not in _LOOPBACK:
            raise ValueError(
                f"address {self.address!r} is open to the network without TLS, and whoever reaches a scheduler runs "
                "code; use tls://HOST:PORT with tls_ca, tls_cert and tls_key"
            )
        if scheme == "tls" and not (self.tls_ca and self.tls_cert and self.tls_key):
            raise ValueError("a tls:// address needs tls_ca, tls_cert and tls_key (PEM files)")
        for name in ("tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ValueError(f"{name} {path!r} is not a file")

    @property
    def span(self) -> tuple[int, int]:
        return parse_workers(self.workers)


def cluster_overrides(text: str | None) -> dict[str, Any]:
    """What ``--cluster KIND`` or ``--cluster ADDRESS`` says. Raises ``UsageError`` for anything else."""
    if text is None:
        return {}
    if "://" in text:
        return {"kind": "join", "address": text}
    if text not in CLUSTER_KINDS:
        raise UsageError(
            f"--cluster {text!r}: unknown; give one of {', '.join(CLUSTER_KINDS)}, or the address of a scheduler "
            "(tls://HOST:PORT, or tcp://127.0.0.1:PORT)"
        )
    return {"kind": text, "address": ""}


def parse_workers(text: str) -> tuple[int, int]:
    """ "N" or "MIN:MAX" -> (minimum, maximum); raises ``ValueError`` with what is allowed."""
    low, colon, high = text.partition(":")
    if not low.strip().isdigit() or (colon and not high.strip().isdigit()):
        raise ValueError(f"workers {text!r} must be N or MIN:MAX, for example 2 or 1:4")
    minimum, maximum = int(low), int(high) if colon else int(low)
    if minimum < 1:
        raise ValueError(f"workers {text!r}: at least one worker is needed, for example 2 or 1:4")
    if maximum < minimum:
        raise ValueError(f"workers {text!r}: MIN must not be greater than MAX")
    if maximum > 10_000:
        raise ValueError(f"workers {text!r}: at most 10000")
    return minimum, maximum


class SandboxConfig(_Section):
    """``provider``: bubblewrap, docker, e2b, harbor or fake. ``start_delay_s`` is added to every start, to measure what
    a slower back end would cost."""

    provider: str = "bubblewrap"
    start_delay_s: float = Field(default=0.0, ge=0)


class DockerConfig(_Section):
    """For ``sandbox.provider = "docker"``. ``host``: where the daemon listens ("": DOCKER_HOST, or the usual socket);
    ``user``: whom commands run as ("": the image's own); ``network``: of the daemon, for tasks that ask for one ("":
    those are refused, the others have none in any case); ``pulls_per_minute``: per registry, of all workers on a host;
    ``image_budget_bytes``: of the images that the farm pulled (not set: as many as leave 15 % of the daemon's disk
    free, where that is this machine's; 0: no limit)."""

    host: str = ""
    runtime: str = ""
    cpus: float = Field(default=1.0, gt=0)
    user: str = ""
    network: str = ""
    pulls_per_minute: float = Field(default=60.0, gt=0)
    image_budget_bytes: int | None = Field(default=None, ge=0)


class E2BConfig(_Section):
    """For ``sandbox.provider = "e2b"``; the key is in the environment (E2B_API_KEY). ``creates_per_s`` and
    ``concurrent`` are the account's limits (Hobby 1 and 20, Pro 5 and 100), kept by all workers that share ``ledger``
    ("": the run folder). ``templates``: image -> template; ``vcpus`` and ``memory_mb``: of the templates that ``farm
    images`` builds."""

    creates_per_s: float = Field(default=1.0, gt=0)
    concurrent: int = Field(default=20, ge=1)
    ledger: str = ""
    templates: dict[str, str] = {}
    user: str = "root"
    internet: bool = False
    domain: str = ""
    vcpus: int = Field(default=2, ge=1)
    memory_mb: int = Field(default=1024, ge=128)


class HarborConfig(_Section):
    """For ``sandbox.provider = "harbor"`` (Python 3.12). ``environment``: one of Harbor's types, or MODULE:CLASS;
    ``network``: every sandbox has one, for environments that can't do without; ``kwargs``: its own."""

    environment: str = "docker"
    network: bool = False
    kwargs: dict[str, Any] = {}


# A real SGLang server on this machine's GPUs. How much KV it has it decides by the memory it finds; the pool asks it.
SGLANG_COMMAND = (
    "python", "-m", "sglang.launch_server", "--model-path", "{model}", "--weight-version", "{version}",
    "--host", "{host}", "--port", "{port}", "--context-length", "{context_length}",
    "--max-running-requests", "{max_running_requests}", "--enable-metrics", "--skip-server-warmup",
)  # fmt: skip
DEFAULT_POOL = "default"


class EnginePoolConfig(_Section):
    """Engines that are had in one way. ``kind`` "embedded" starts ``count`` CPU servers here; "launch" starts ``count``
    servers by ``command``, each on ``gpus_per_engine`` GPUs of its own (0: on the CPU); "sglang" uses the servers at
    ``urls``, which somebody else runs.

    ``host``: the address of this machine that engines started here listen on; workers elsewhere need one that they
    reach, and engines have no password, so it must be closed to others. ``max_total_tokens`` is the KV budget of one
    engine, in tokens, for those that are told it."""

    kind: Literal["embedded", "launch", "sglang"] = "embedded"
    host: str = "127.0.0.1"
    count: int = Field(default=1, ge=1, le=64)
    urls: tuple[str, ...] = ()
    command: tuple[str, ...] = SGLANG_COMMAND
    gpus_per_engine: int = Field(default=1, ge=0, le=64)
    max_total_tokens: int = Field(default=32_768, ge=64)
    context_length: int = Field(default=512, ge=32)
    max_running_requests: int = Field(default=64, ge=1)
    start_timeout_s: float | None = Field(default=None, gt=0, description="default: 60, for launched servers 900")

    @property
    def start_s(self) -> float:
        """How long an engine may take to come up."""
        if self.start_timeout_s is not None:
            return self.start_timeout_s
        return 900.0 if self.kind == "launch" else 60.0

    @model_validator(mode="after")
    def _urls(self) -> Self:
        if self.kind == "sglang" and not self.urls:
            raise ValueError('kind "sglang" needs urls, for example urls = ["http://127.0.0.1:30000"]')
        if self.kind != "sglang" and self.urls:
            raise ValueError(f'urls is only for kind "sglang"; {self.kind} engines get their own ports')
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} must start with http:// or https://")
        if self.max_total_tokens < self.context_length:
            raise ValueError(
                f"max_total_tokens {self.max_total_tokens} must hold at least one context_length "
                f"({self.context_length}), or no episode is ever admitted"
            )
        return self

    @field_validator("host")
    @classmethod
    def _one_address(cls, host: str) -> str:
        if host in {"", "0.0.0.0", "::", "*"}:
            raise ValueError(f"host {host!r}: must be one address, which engines listen on and workers call")
        return host

    @field_validator("command")
    @classmethod
    def _placeholders(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        allowed = ("model", "version", "host", "port", "context_length", "max_total_tokens", "max_running_requests")
        try:
            used = {name for part in command for _, name, _, _ in Formatter().parse(part) if name is not None}
        except ValueError as error:
            raise ValueError(f"command: {error}; write a brace that is meant as such twice") from None
        if used - set(allowed) or "port" not in used:
            raise ValueError(
                f"command: holds the placeholders {sorted(used)}; allowed: {', '.join(allowed)}, and {{port}} must be "
                "among them"
            )
        return command


# What named pools have of [engine] where they don't say it themselves.
_SHARED_BY_POOLS = (
    "host", "command", "gpus_per_engine", "max_total_tokens", "context_length", "max_running_requests",
    "start_timeout_s",
)  # fmt: skip


class EngineConfig(EnginePoolConfig):
    """One pool, or several named ones in ``[engine.pools.NAME]``. Then ``kind``, ``count`` and ``urls`` are said there,
    and what else stands here is their default.

    ``overcommit``: admission lets episodes reserve this many times an engine's KV budget, since few use their whole
    context cap at once. ``weights``: how new policies get into the engines; "disk": each loads the published folder;
    "push": ``trainer train`` sends them over a process group, and an engine that has none within ``push_wait_s``
    seconds loads the folder. A circuit breaker takes an engine out, see :mod:`farm.circuit`."""

    overcommit: float = Field(default=1.0, gt=0, le=100)
    weights: Literal["disk", "push"] = "disk"
    push_wait_s: float = Field(default=60.0, gt=0)
    pools: dict[str, EnginePoolConfig] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_pools(cls, given: Any) -> Any:
        pools = given.get("pools") if isinstance(given, Mapping) else None
        if not isinstance(pools, Mapping):
            return given
        shared = {key: given[key] for key in _SHARED_BY_POOLS if key in given}
        return {**given, "pools": {name: {**shared, **pool} for name, pool in pools.items() if _is_table(name, pool)}}

    @model_validator(mode="after")
    def _one_or_many(self) -> Self:
        if self.pools and (self.kind, self.count, self.urls) != ("embedded", 1, ()):
            raise ValueError(
                "kind, count and urls (--engines, --launch-engines) are for a single pool, and there are named ones "
                f"({', '.join(self.pools)}); say them in [engine.pools.NAME]"
            )
        return self

    @property
    def named_pools(self) -> Mapping[str, EnginePoolConfig]:
        """By name; a single one is called "default"."""
        return self.pools or {DEFAULT_POOL: self}


def _is_table(name: object, pool: object) -> bool:
    if not isinstance(pool, Mapping):
        raise ValueError(f"pools.{name} must be a table, given {pool!r}; write [engine.pools.{name}] and keys below it")
    return True


class AgentConfig(_Section):
    """``command``: of the agent "external", what starts the scaffold (see docs/extend.md)."""

    name: str = "bash"
    command: tuple[str, ...] = ()


class RendererConfig(_Section):
    name: str = "micro"


class GraderConfig(_Section):
    name: str = "tests"


class PolicyConfig(_Section):
    """``base``: Hugging Face model folder published as step 0 when the policy log is empty; "" = the shipped one."""

    base: str = ""


class RolloutConfig(_Section):
    """``mode`` "sync" waits for a whole step's groups before it starts the next (max_staleness is then 0).

    ``groups_per_step`` 0: nobody consumes, so no staleness bound. ``min_attempts``: how many graded attempts of a group
    the trainer needs before it may train on the group (default: three quarters of it)."""

    tasks: str = "micro:rl"
    limit: int | None = Field(default=None, ge=1, description="use only the first N tasks")
    purpose: Literal["rl", "eval"] = "rl"
    group_size: int = Field(default=8, ge=1, le=1024)
    groups_per_step: int = Field(default=16, ge=0)
    max_staleness: int = Field(default=1, ge=0)
    min_attempts: int = Field(default=6, ge=1)
    mode: Literal["async", "sync"] = "async"
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _enough(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "min_attempts" not in given:
            size = given.get("group_size", 8)
            if isinstance(size, int):
                return {**given, "min_attempts": max(1, math.ceil(0.75 * size))}
        return given

    @model_validator(mode="after")
    def _sizes(self) -> RolloutConfig:
        if self.min_attempts > self.group_size:
            raise ValueError(f"min_attempts {self.min_attempts} must not exceed group_size {self.group_size}")
        return self

    @property
    def staleness(self) -> int:
        return 0 if self.mode == "sync" else self.max_staleness

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


class LimitsConfig(_Section):
    """:class:`farm.types.Limits`, and the lease. Ordered: tool_s < agent_s < episode_s < lease_s."""

    max_turns: int = Field(default=8, ge=1)
    max_tokens_per_turn: int = Field(default=48, ge=1)
    max_context_tokens: int = Field(default=512, ge=16)
    tool_s: float = Field(default=5.0, gt=0)
    agent_s: float = Field(default=60.0, gt=0)
    grade_s: float = Field(default=30.0, gt=0)
    episode_s: float = Field(default=120.0, gt=0)
    lease_s: float | None = Field(default=None, gt=0, description="default: episode_s + 30")
    memory_bytes: int = Field(default=512 << 20, ge=1 << 20)
    disk_bytes: int = Field(default=64 << 20, ge=1 << 20)
    pids: int = Field(default=64, ge=4)
    output_bytes: int = Field(default=16_384, ge=256)

    @model_validator(mode="after")
    def _order(self) -> LimitsConfig:
        if not self.tool_s < self.agent_s < self.episode_s < self.lease:
            raise ValueError(
                f"time limits must be ordered tool_s < agent_s < episode_s < lease_s, given "
                f"{self.tool_s:g}, {self.agent_s:g}, {self.episode_s:g}, {self.lease:g}"
            )
        if self.grade_s >= self.episode_s:
            raise ValueError(f"grade_s {self.grade_s:g} must be less than episode_s {self.episode_s:g}")
        return self

    @property
    def lease(self) -> float:
        return self.episode_s + LEASE_SLACK_S if self.lease_s is None else self.lease_s

    @property
    def limits(self) -> Limits:
        return Limits(**self.model_dump(exclude={"lease_s"}))


class RetryConfig(_Section):
    """How many failures at each boundary an episode survives; ``lost``: attempts that went with their worker."""

    sandbox_start: int = Field(default=5, ge=0)
    sandbox_lost: int = Field(default=3, ge=0)
    engine: int = Field(default=5, ge=0)
    grader: int = Field(default=2, ge=0)
    agent: int = Field(default=0, ge=0)
    farm: int = Field(default=2, ge=0)
    lost: int = Field(default=10, ge=0)
    delay_s: float = Field(default=0.5, ge=0)

    @property
    def budgets(self) -> dict[Boundary, int]:
        return {boundary: getattr(self, boundary.value) for boundary in Boundary}


class LogConfig(_Section):
    """A shard is sealed when it has this many rows or bytes, or when its oldest row is this old."""

    seal_rows: int = Field(default=256, ge=1)
    seal_bytes: int = Field(default=64 << 20, ge=1)
    seal_age_s: float = Field(default=2.0, gt=0)


class InjectConfig(_Section):
    """Planned infrastructure failures (a share ``rate`` of all attempts), to measure what the farm does with them."""

    rate: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0)


class FarmConfig(_Section):
    cluster: ClusterConfig = ClusterConfig()
    sandbox: SandboxConfig = SandboxConfig()
    docker: DockerConfig = DockerConfig()
    e2b: E2BConfig = E2BConfig()
    harbor: HarborConfig = HarborConfig()
    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    renderer: RendererConfig = RendererConfig()
    grader: GraderConfig = GraderConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    limits: LimitsConfig = LimitsConfig()
    retry: RetryConfig = RetryConfig()
    log: LogConfig = LogConfig()
    inject: InjectConfig = InjectConfig()

    def sandbox_options(self, run: Path | None = None) -> dict[str, Any]:
        """What ``make_provider`` needs for the configured provider; ``run`` is the run folder."""
        if self.sandbox.provider == "docker":
            return self.docker.model_dump()
        if self.sandbox.provider == "e2b":
            options = self.e2b.model_dump()
            ledger = options["ledger"] or ("" if run is None else str(run / "e2b"))
            return {**options, "ledger": ledger, "life_s": self.limits.episode_s + SANDBOX_GRACE_S}
        return self.harbor.model_dump() if self.sandbox.provider == "harbor" else {}

    @model_validator(mode="after")
    def _context(self) -> FarmConfig:
        longest = max(pool.context_length for pool in self.engine.named_pools.values())
        if self.limits.max_context_tokens > longest:
            raise ValueError(
                f"limits.max_context_tokens {self.limits.max_context_tokens} must not exceed engine.context_length "
                f"{longest}"
            )
        return self


_REAL_CODE: Mapping[str, Mapping[str, Any]] = {
    "cluster": {"slots": 2},
    "limits": {
        "tool_s": 60.0,
        "agent_s": 300.0,
        "grade_s": 120.0,
        "episode_s": 600.0,
        "memory_bytes": 1 << 30,
        "disk_bytes": 256 << 20,
        "pids": 256,
    },
}
_SWEBENCH: Mapping[str, Mapping[str, Any]] = {
    "cluster": {"slots": 4},
    "sandbox": {"provider": "docker"},  # its images
    "renderer": {"name": "chat"},
    "grader": {"name": "swebench"},
    # SGLang refuses prompts within six tokens of its context: long episodes would end as failures, not by their cap.
    "engine": {"context_length": 32_768 + 8, "max_total_tokens": 1_500_000},
    "limits": {
        "max_turns": 100,
        "max_tokens_per_turn": 2_048,
        "max_context_tokens": 32_768,
        "tool_s": 300.0,
        "agent_s": 3_600.0,
        "grade_s": 1_800.0,
        "episode_s": 5_700.0,
        "memory_bytes": 4 << 30,
        "disk_bytes": 4 << 30,
        "pids": 1_024,
    },
}

_HARBOR: Mapping[str, Mapping[str, Any]] = {
    **_SWEBENCH,
    "grader": {"name": "harbor"},
    "limits": {**_SWEBENCH["limits"], "disk_bytes": 16 << 30, "memory_bytes": 8 << 30},  # the most a task may ask for
}

# Task source (the part of the spec before ":") -> what differs from the micro profile.
PROFILES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "micro": {},
    "pypi": _REAL_CODE,
    "made": _REAL_CODE,
    "swebench": _SWEBENCH,
    "subset": _SWEBENCH,
    "harbor": _HARBOR,
}


def load_config(
    path: Path | None = None,
    *,
    sets: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> FarmConfig:
    """Profile of the task source, then ``path``, then ``sets`` ("section.key=value"), then ``overrides`` (what the
    command line says by its own options). Raises ``UsageError``."""
    given = {} if path is None else _read_toml(path)
    where = "configuration" if path is None else str(path)
    return parse_config(with_overrides(given, sets, overrides or {}), where=where)


def with_overrides(
    given: Mapping[str, Any], sets: Sequence[str], overrides: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """``given`` with ``sets`` and then ``overrides`` laid over it; None means: not said."""
    merged = copy.deepcopy(dict(given))
    for item in sets:
        _apply_set(merged, item)
    for section, values in overrides.items():
        for key, value in values.items():
            if value is not None:
                _section_of(merged, section, "configuration")[key] = value
    return merged


def parse_config(given: Mapping[str, Any], *, where: str = "configuration") -> FarmConfig:
    """Models from nested tables laid over the profile of ``rollout.tasks``. Raises ``UsageError``."""
    rollout = given.get("rollout")
    spec = rollout.get("tasks") if isinstance(rollout, Mapping) else None
    source = spec.partition(":")[0] if isinstance(spec, str) else "micro"
    merged: dict[str, Any] = {name: dict(values) for name, values in PROFILES.get(source, {}).items()}
    for section, values in given.items():
        if isinstance(values, Mapping) and isinstance(merged.get(section, {}), dict):
            merged.setdefault(section, {}).update(values)
        else:
            merged[section] = values
    try:
        return FarmConfig.model_validate(merged)
    except ValidationError as error:
        raise UsageError(_explain(error, where)) from None


def to_json(config: FarmConfig) -> dict[str, Any]:
    """The resolved configuration as plain JSON data; ``parse_config`` reads it back unchanged."""
    data: dict[str, Any] = json.loads(config.model_dump_json())
    return data


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such configuration file; give an existing TOML file to --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't read the configuration file ({error}); give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML ({error}); correct that line") from None


def _apply_set(given: dict[str, Any], item: str) -> None:
    name, equals, text = item.partition("=")
    *tables, key = name.strip().split(".")
    if not equals or not tables or not all((*tables, key)):
        raise UsageError(f"--set {item!r}: must be section.key=value, for example rollout.group_size=4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string, so that --set sandbox.provider=fake needs no quotes
    table = given
    for section in tables:
        table = _section_of(table, section, "--set")
    table[key] = value


def _section_of(given: dict[str, Any], section: str, where: str) -> dict[str, Any]:
    table = given.setdefault(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"{where}: {section} must be a table, given {table!r}; write [{section}] and keys below it")
    return table


def _explain(error: ValidationError, where: str) -> str:
    """The first problem, as one line."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    name = ".".join(location) or "configuration"
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"{where}: {name}: unknown key; {_allowed(location)}"
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    if kind == "value_error":
        return f"{where}: {name}: {message}"
    return f"{where}: {name}: given {first['input']!r}, but {message}; correct the value"


def _allowed(location: Sequence[str]) -> str:
    model: type[BaseModel] = FarmConfig
    for part in location[:-1]:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return "remove it"
        model = annotation
    names = sorted(model.model_fields)
    near = difflib.get_close_matches(location[-1], names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"
