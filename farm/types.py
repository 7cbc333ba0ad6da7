"""The nouns of the farm: frozen, slotted, keyword-only records.

Nothing here acts, reads a clock or imports anything but the standard library. Times are seconds: ``*_s`` is a
duration, ``*_at_s`` is wall-clock time since the epoch. Token ids are plain ``int``.

Identity is a digest of content: two equal tasks have the same digest, and an episode's id follows from its task,
group, index and seed, so that a restarted farm names the same work by the same id (Rule 1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any


def content_digest(value: Any) -> str:
    """SHA-256 (first 32 hex digits) of ``value`` as canonical JSON."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:32]


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


# ---------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineFiles:
    """A repository carried by the task itself: path -> text at the base commit."""

    files: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SdistFiles:
    """A repository made from a pinned source distribution with one injected bug.

    The sdist is looked up by ``sha256`` in the local cache; ``remove`` lists path prefixes (the tests) that the agent
    must not see; ``edit`` is (path, old text, new text) of the bug, applied at its only occurrence.
    """

    package: str
    version: str
    sha256: str
    remove: tuple[str, ...]
    edit: tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """The repository is already in the task's image (SWE-bench images: ``/testbed``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFiles:
    """The task is a folder that every worker host can read (``farm.harbor``). ``digest`` is of all that it holds;
    ``repository`` is the folder in it with the repository's files, "" when the image has them."""

    folder: str
    digest: str
    repository: str = ""


Workspace = InlineFiles | SdistFiles | ImageFiles | FolderFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a task's machine must have beyond the episode's limits. ``cpus`` None: as many as the back end gives;
    ``env``: of every command."""

    cpus: float | None = None
    network: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Caps of one episode. Ordered: ``tool_s < agent_s < episode_s`` (checked by ``farm.config``)."""

    max_turns: int = 8
    max_tokens_per_turn: int = 48
    max_context_tokens: int = 512
    tool_s: float = 5.0
    agent_s: float = 60.0
    grade_s: float = 30.0
    episode_s: float = 120.0
    memory_bytes: int = 512 << 20
    disk_bytes: int = 64 << 20
    pids: int = 64
    output_bytes: int = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row in the SWE-bench schema, with the way its repository is made and the strata it belongs to."""

    instance_id: str
    dataset: str  # "micro/benchmark@<digest>", "pypi@<digest>", "swebench-verified@<revision>"
    repo: str
    base_commit: str
    problem_statement: str
    patch: str  # gold patch, unified diff; never shown to the agent
    test_patch: str  # unified diff that adds the grading tests; never shown to the agent
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    eval_script: str
    log_parser: str  # what the task's grader reads its log with: a key of farm.grader.parsers.PARSERS, or swebench's
    workspace: Workspace
    image: str = "host"
    version: str = ""
    workdir: str = "/testbed"
    strata: Mapping[str, str] = field(default_factory=dict)  # e.g. {"kind": "compare", "size": "1"}
    weight: float = 1.0
    eval_type: str = ""  # of SWE-bench rows: "pass_and_fail" or "fail_only"
    own_limits: Mapping[str, float] = field(default_factory=dict)  # field of Limits -> what this task says it is
    machine: Machine = Machine()

    def limits(self, configured: Limits) -> Limits:
        """Of an episode of it."""
        own: dict[str, Any] = dict(self.own_limits)
        return replace(configured, **own) if own else configured

    @property
    def digest(self) -> str:
        content = asdict(self)
        for name, unsaid in _LATER_FIELDS.items():
            if content[name] == unsaid:
                del content[name]
        if isinstance(self.workspace, FolderFiles):  # where it lies is not what it is; it says the image and machine
            del content["workspace"]["folder"], content["image"]
            content.pop("machine", None)  # with the values of secrets
        return content_digest(content)


# Left out where a task does not say them, as before there were such fields: known tasks keep their identity.
_LATER_FIELDS: Mapping[str, Any] = {"eval_type": "", "own_limits": {}, "machine": asdict(Machine())}


# ------------------------------------------------------------------------------------------- episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt index of one task under one seed. ``group_id`` ties the attempts that are scored together."""

    task: Task
    group_id: str
    index: int  # 0 .. group_size-1
    group_size: int
    seed: int
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    purpose: str = "rl"  # "rl" | "eval"

    @property
    def id(self) -> str:
        return _episode_id(self.task.instance_id, self.group_id, self.index, self.seed)


@lru_cache(maxsize=16_384)  # the dispatcher asks for the id of what is in flight again and again
def _episode_id(instance_id: str, group_id: str, index: int, seed: int) -> str:
    return content_digest([instance_id, group_id, index, seed])


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """A try that an infrastructure failure ended; kept with the episode that finally lands."""

    attempt: int
    boundary: Boundary
    kind: str
    message: str
    worker: str
    started_at_s: float
    ended_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A lease on an episode: at most one attempt of an episode lands. ``number`` counts from 1."""

    episode: Episode
    number: int
    engine_url: str
    min_version: int  # the engine must answer with a policy step >= this (Rule 5)
    queued_at_s: float
    prior: tuple[FailedAttempt, ...] = ()


# -------------------------------------------------------------------------------------------- outcome


class Boundary(StrEnum):
    """Where an infrastructure failure crossed into the farm."""

    SANDBOX_START = "sandbox_start"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE = "engine"
    GRADER = "grader"
    AGENT = "agent"  # a defect of the agent's own code (not of the policy)
    FARM = "farm"


class EndReason(StrEnum):
    """Why the agent loop ended. All but FAILED are graded as they stand (Rule 3)."""

    SUBMITTED = "submitted"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # one turn hit max_tokens_per_turn without a stop token
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    MALFORMED = "malformed"  # the policy wrote no readable action
    RESOURCES = "resources"  # it used up its sandbox's memory or disk, and so ended it
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the grade rests on. ``statuses``: test id -> PASSED | FAILED | ERROR | MISSING."""

    statuses: Mapping[str, str]
    resolved: bool
    patch_applied: bool
    exit_code: int
    log_tail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """The only outcome with a reward."""

    reward: float
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An infrastructure failure; it has no reward and can't be given one (Rule 3)."""

    boundary: Boundary
    kind: str
    message: str
    retryable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """An episode that was given up before it produced anything, with the reason (Rule 1)."""

    reason: str


Outcome = Graded | Failed | Dropped


# ----------------------------------------------------------------------------------------- trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a turn came from policy ``step`` (Rule 5)."""

    step: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampling of the policy and what the environment answered.

    ``context_ids`` are the ids appended *since the last sampled token* (the whole prompt in the first turn of a
    segment), so the ids the engine saw are the concatenation of all context and output ids of the segment so far,
    and nothing is ever re-tokenised (Rule 4). ``observation`` is text for people; its ids are the next turn's
    ``context_ids``.
    """

    segment: int
    context_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" | "length" | "abort"
    action: str  # decoded command, for people
    observation: str
    exit_code: int | None
    cached_tokens: int
    retractions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One interval of an episode's timeline: queued, sandbox_start, generate, exec, grade."""

    name: str
    start_at_s: float
    end_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources of one landed attempt. ``sandbox_cpu_s`` covers agent and grading sandboxes."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    sandbox_cpu_s: float = 0.0
    worker_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What lands: one row of the trajectory log, readable without anything else at hand."""

    episode_id: str
    group_id: str
    group_size: int
    index: int
    instance_id: str
    task_digest: str
    dataset: str
    repo: str
    strata: Mapping[str, str]
    weight: float
    seed: int
    purpose: str
    sampling: SamplingParams
    attempt: int
    worker: str
    engine_url: str
    outcome: Outcome
    end_reason: EndReason
    turns: tuple[Turn, ...]
    patch: str  # the agent's diff against the base commit; grading can be re-run from it
    timeline: tuple[Event, ...]
    usage: Usage
    prior: tuple[FailedAttempt, ...] = ()
    started_at_s: float = 0.0
    ended_at_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        return sum(len(t.output_ids) for t in self.turns)

    @property
    def total_tokens(self) -> int:
        """Context plus sampled tokens of all segments."""
        return sum(len(t.context_ids) + len(t.output_ids) for t in self.turns)

    @property
    def oldest_step(self) -> int | None:
        """The oldest policy step any sampled token came from; None when nothing was sampled."""
        return min((s.step for t in self.turns for s in t.spans), default=None)


# ------------------------------------------------------------------------------------- policies, logs


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One published policy. ``path`` is a Hugging Face model folder; ``digest`` covers its weights.

    ``consumed_groups`` is how many groups the trainer has used up when it published; the farm keeps its lead over
    the trainer within the staleness bound by it.
    """

    step: int
    path: str
    digest: str
    published_at_s: float
    consumed_groups: int = 0

    @property
    def name(self) -> str:
        """The version name engines answer with, e.g. ``step-000012``."""
        return version_name(self.step)

    @property
    def pushed_name(self) -> str:
        """The name that a trainer gives to weights which it sent to an engine itself: nothing else then says that they
        are these."""
        return f"{self.name}+{self.digest[:12]}"


# What an engine is called while a trainer changes its weights, and when that has failed: load the published folder. No
# client takes tokens from an engine of such a name, for they are no policy's.
PUSH_UNDER_WAY = "push-under-way"
PUSH_GIVEN_UP = "push-given-up"


def version_name(step: int) -> str:
    return f"step-{step:06d}"


def version_step(name: str) -> int | None:
    """The step of a version name, pushed or not; None when the name is not one of ours (an engine not yet loaded)."""
    head, _, digits = name.partition("+")[0].partition("-")
    return int(digits) if head == "step" and digits.isdigit() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One sealed Parquet file of the trajectory log. Shards are numbered without gaps from 0."""

    number: int
    path: str
    rows: int
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cursor:
    """How far a reader has got: everything before row ``row`` of shard ``shard`` is read."""

    shard: int = 0
    row: int = 0
