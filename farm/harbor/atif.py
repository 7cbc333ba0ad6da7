"""Landed episodes as ATIF trajectories (Agent Trajectory Interchange Format, 1.8), tokens and log-probs included.

Of each episode two files are written. ``trajectory.json`` has a step for every turn: what was written (decoded for
people), the command as a tool call, what it printed as its observation, and as ``metrics`` the ids that the engine saw,
the ids that it sampled and their log-probs. ``rollout_details.json`` has the same numbers in the shape that Harbor's
trainers read: one entry per segment, in it one list per turn, always of equal length. Ids are those of the log; nothing
is tokenised here.

An infrastructure failure is exported as one: ``extra.rollout_farm.outcome`` says where it broke, and there is no
reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farm.errors import FarmError, UsageError
from farm.policy_log import PolicyLog
from farm.render import make_renderer
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, EndReason, Failed, Graded, Outcome, Trajectory, Turn, version_name

MANIFEST = "episodes.jsonl"
Decode = Callable[[Sequence[int]], str]

# ------------------------------------------------------------------------------------------------ the format


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolCall(_Part):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class ObservationResult(_Part):
    source_call_id: str | None = None
    content: str
    extra: dict[str, Any] | None = None


class Observation(_Part):
    results: list[ObservationResult]


class Metrics(_Part):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float]
    extra: dict[str, Any] | None = None


class Step(_Part):
    step_id: int = Field(ge=1)
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    message: str
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _of_the_agent(self) -> Self:
        own = (self.model_name, self.tool_calls, self.metrics, self.llm_call_count)
        if self.source != "agent" and any(value is not None for value in own):
            raise ValueError(f"step {self.step_id}: only steps of the agent have a model, tool calls or metrics")
        calls = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation else ():
            if result.source_call_id is not None and result.source_call_id not in calls:
                raise ValueError(f"step {self.step_id}: {result.source_call_id!r} is no tool call of it")
        return self


class AgentInfo(_Part):
    name: str
    version: str
    model_name: str | None = None


class FinalMetrics(_Part):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_cached_tokens: int
    total_steps: int
    extra: dict[str, Any] | None = None


class AtifTrajectory(_Part):
    """The part of ATIF 1.8 that the farm writes; what it lacks here is optional there."""

    schema_version: Literal["ATIF-v1.8"] = "ATIF-v1.8"
    session_id: str
    trajectory_id: str
    agent: AgentInfo
    steps: list[Step] = Field(min_length=1)
    notes: str | None = None
    final_metrics: FinalMetrics
    extra: dict[str, Any]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if [step.step_id for step in self.steps] != list(range(1, len(self.steps) + 1)):
            raise ValueError("steps must be numbered from 1 without gaps")
        return self


class RolloutDetail(_Part):
    """One segment: its prompts are each a prefix of the next, with what was sampled in between. Every list has an entry
    per turn."""

    prompt_token_ids: list[list[int]]
    completion_token_ids: list[list[int]]
    logprobs: list[list[float]]
    extra: dict[str, list[Any]]


# ------------------------------------------------------------------------------------------ from the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    written: int
    graded: int
    failed: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """Whose trajectories these are; ``model``: the policy that the run began with."""

    agent: str
    model: str


def export_run(run_path: Path, out: Path, *, limit: int | None = None) -> Exported:
    """Write the sealed episodes of a run below ``out``, a folder each, and ``episodes.jsonl`` that lists them. Raises
    UsageError when there are none, or ``out`` has some already."""
    run = RunFolder.open(run_path)
    config = run.config()
    who = Who(agent=config["agent"]["name"], model=config["policy"]["base"] or "shipped")
    decode = _decoder(run, config["renderer"]["name"])
    if (out / MANIFEST).exists():
        raise UsageError(f"{out / MANIFEST}: exists already; give another --out, or remove it")
    lines: list[dict[str, Any]] = []
    for _, trajectory in DirectoryLog(run.trajectories, create=False).read(Cursor()):
        if limit is not None and len(lines) == limit:
            break
        folder = out / f"{trajectory.instance_id}__{trajectory.index}__{trajectory.episode_id[:8]}".replace("/", "__")
        lines.append(_write(trajectory, folder, who, decode))
    if not lines:
        raise UsageError(f"{run_path}: no episode is sealed yet; try again when the farm has run for a while")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (out / MANIFEST).write_text(text, encoding="utf-8")
    kinds = [line["outcome"] for line in lines]
    return Exported(
        written=len(lines),
        graded=kinds.count("graded"),
        failed=kinds.count("failed"),
        dropped=kinds.count("dropped"),
    )


def _write(trajectory: Trajectory, folder: Path, who: Who, decode: Decode | None) -> dict[str, Any]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = to_atif(trajectory, who, decode).model_dump_json(exclude_none=True)
        (folder / "trajectory.json").write_text(f"{text}\n", encoding="utf-8")
        details = {"rollout_details": [detail.model_dump() for detail in rollout_details(trajectory)]}
        (folder / "rollout_details.json").write_text(f"{json.dumps(details)}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: can't be written ({error})") from error
    outcome = _outcome(trajectory.outcome)
    return {
        "episode_id": trajectory.episode_id,
        "instance_id": trajectory.instance_id,
        "group_id": trajectory.group_id,
        "folder": folder.name,
        "outcome": outcome["kind"],
        "reward": outcome.get("reward"),
        "end_reason": trajectory.end_reason.value,
    }


def to_atif(trajectory: Trajectory, who: Who, decode: Decode | None) -> AtifTrajectory:
    """``decode`` makes text of ids, for people; None where the run's tokenizer is not at hand."""
    steps = list(_steps(trajectory, decode))
    usage = trajectory.usage
    return AtifTrajectory(
        session_id=trajectory.episode_id,
        trajectory_id=trajectory.episode_id,
        agent=AgentInfo(name=f"rollout-farm-{who.agent}", version=version("rollout-farm"), model_name=who.model),
        steps=steps,
        notes=None if decode else "The run's tokenizer was not at hand: messages are what the log has as text.",
        final_metrics=FinalMetrics(
            total_prompt_tokens=usage.prompt_tokens,
            total_completion_tokens=usage.output_tokens,
            total_cached_tokens=usage.cached_tokens,
            total_steps=len(steps),
            extra={"sandbox_cpu_s": usage.sandbox_cpu_s, "worker_cpu_s": usage.worker_cpu_s},
        ),
        extra={"rollout_farm": _facts(trajectory)},
    )


def rollout_details(trajectory: Trajectory) -> list[RolloutDetail]:
    """One per segment, in order."""
    segments: dict[int, list[tuple[list[int], Turn]]] = {}
    for prompt, turn in prompts(trajectory.turns):
        segments.setdefault(turn.segment, []).append((prompt, turn))
    return [
        RolloutDetail(
            prompt_token_ids=[prompt for prompt, _ in turns],
            completion_token_ids=[list(turn.output_ids) for _, turn in turns],
            logprobs=[list(turn.output_logprobs) for _, turn in turns],
            extra={
                "policy_spans": [_spans(turn) for _, turn in turns],
                "finish_reason": [turn.finish_reason for _, turn in turns],
            },
        )
        for turns in segments.values()
    ]


def prompts(turns: Sequence[Turn]) -> Iterator[tuple[list[int], Turn]]:
    """Each turn with the whole prompt that the engine saw: everything of its segment before what it sampled."""
    seen: list[int] = []
    segment: int | None = None
    for turn in turns:
        if turn.segment != segment:
            seen, segment = [], turn.segment
        seen = [*seen, *turn.context_ids]
        yield seen, turn
        seen = [*seen, *turn.output_ids]


def _steps(trajectory: Trajectory, decode: Decode | None) -> Iterator[Step]:
    turns = trajectory.turns
    starts = [event.start_at_s for event in trajectory.timeline if event.name == "generate"]
    if not turns:
        yield Step(step_id=1, source="system", message=_nothing(trajectory), timestamp=_clock(trajectory.started_at_s))
        return
    first = decode(turns[0].context_ids) if decode else f"({len(turns[0].context_ids)} tokens)"
    yield Step(step_id=1, source="user", message=first, timestamp=_clock(trajectory.started_at_s))
    for number, (prompt, turn) in enumerate(prompts(turns)):
        last = number == len(turns) - 1
        name, call = f"call_{number + 1}", None
        if turn.exit_code is not None:
            call = ToolCall(tool_call_id=name, function_name="bash", arguments={"command": turn.action})
        elif last and trajectory.end_reason is EndReason.SUBMITTED:
            call = ToolCall(tool_call_id=name, function_name="submit", arguments={})
        result = ObservationResult(source_call_id=name, content=turn.observation, extra={"exit_code": turn.exit_code})
        steps_of = sorted({span.step for span in turn.spans})
        yield Step(
            step_id=number + 2,
            timestamp=_clock(starts[number]) if len(starts) == len(turns) else None,
            source="agent",
            model_name=version_name(steps_of[-1]) if steps_of else None,
            message=decode(turn.output_ids) if decode else turn.action,
            tool_calls=None if call is None else [call],
            observation=None if turn.exit_code is None else Observation(results=[result]),
            metrics=Metrics(
                prompt_tokens=len(prompt),
                completion_tokens=len(turn.output_ids),
                cached_tokens=turn.cached_tokens,
                prompt_token_ids=prompt,
                completion_token_ids=list(turn.output_ids),
                logprobs=list(turn.output_logprobs),
                extra={"policy_spans": _spans(turn), "retractions": turn.retractions},
            ),
            llm_call_count=1,
            extra={"segment": turn.segment, "finish_reason": turn.finish_reason},
        )


def _nothing(trajectory: Trajectory) -> str:
    outcome = trajectory.outcome
    if isinstance(outcome, Failed):
        return f"Nothing was sampled: {outcome.boundary.value}/{outcome.kind}: {outcome.message}"
    return "Nothing was sampled."


def _spans(turn: Turn) -> list[dict[str, int]]:
    """Which policy step sampled [start, end) of a turn's completion."""
    return [{"step": span.step, "start": span.start, "end": span.end} for span in turn.spans]


def _facts(t: Trajectory) -> dict[str, Any]:
    """What the log knows besides; an outcome without a reward stays without one."""
    names = (
        "episode_id", "group_id", "group_size", "index", "instance_id", "task_digest", "dataset", "repo", "weight",
        "seed", "purpose", "attempt", "patch", "started_at_s", "ended_at_s",
    )  # fmt: skip
    return {
        **{name: getattr(t, name) for name in names},
        "strata": dict(t.strata),
        "sampling": asdict(t.sampling),
        "end_reason": t.end_reason.value,
        "outcome": _outcome(t.outcome),
        "failed_attempts": [{**asdict(tried), "boundary": tried.boundary.value} for tried in t.prior],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Graded):
        evidence = outcome.evidence
        return {
            "kind": "graded",
            "reward": outcome.reward,
            "resolved": evidence.resolved,
            "patch_applied": evidence.patch_applied,
            "tests": dict(evidence.statuses),
        }
    if isinstance(outcome, Failed):
        return {
            "kind": "failed",
            "boundary": outcome.boundary.value,
            "failure": outcome.kind,
            "message": outcome.message,
            "retryable": outcome.retryable,
        }
    return {"kind": "dropped", "reason": outcome.reason}


def _decoder(run: RunFolder, renderer: str) -> Decode | None:
    """The run's own renderer, by the tokenizer of its newest policy; None when nothing was sampled, or it is gone."""
    try:
        latest = PolicyLog(run.policies, create=False).latest()
        return None if latest is None else make_renderer(renderer, latest.path).decode
    except (FarmError, OSError):
        return None


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()
