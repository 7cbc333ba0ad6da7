"""The derived log: what the report needs of a run, one row per trajectory, small enough to be committed beside it.

Every figure is computed from this, never from the raw log itself, so a report made again from the derived log alone
comes out the same. Left out are token ids, log-probs, texts, patches and test output; kept are lengths, policy spans,
outcomes, ends, use of resources and times, rounded to a millisecond. The events of a trajectory's timeline are kept
one by one where it ran in the middle step of the training (which the report draws); elsewhere they are summed per kind
into one event each, all from the trajectory's start.

    derived/trajectories.parquet   the rows; its metadata holds the digests of the raw shards they came from
    derived/policies.json          the published policies, without weights
    derived/processes.json         the ids of the processes that held the run as its farm and as its trainer
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from farm.durable import REAL_DISK, temporary_name, write_json
from farm.errors import UsageError
from farm.policy_log import PolicyLog
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Boundary,
    Cursor,
    Dropped,
    EndReason,
    Event,
    Evidence,
    Failed,
    FailedAttempt,
    Graded,
    Outcome,
    PolicyVersion,
    SamplingParams,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
    content_digest,
)

FOLDER, ROWS, POLICIES, PROCESSES = "derived", "trajectories.parquet", "policies.json", "processes.json"
SCHEMA_VERSION = 1
NOT_KEPT = "(not kept)"  # in place of a text that was there

_LOCKS = {"farm": "farm.lock", "trainer": "trainer/trainer.lock"}  # each holds the id of the process that took it

_VERSION_KEY, _SHARDS_KEY = b"rollout_farm.derived_version", b"rollout_farm.shards"

_int, _text, _flag = pa.int32(), pa.string(), pa.bool_()
_SPANS = pa.list_(pa.struct({"step": _int, "start": _int, "end": _int}))
_TURNS = pa.list_(
    pa.struct(
        {
            "segment": _int,
            "context_tokens": _int,
            "output_tokens": _int,
            "spans": _SPANS,
            "finish_reason": _text,
            "exit_code": _int,
            "cached_tokens": _int,
            "retractions": _int,
        }
    )
)
# start_ms: since the trajectory's start.
_EVENTS = pa.list_(pa.struct({"name": _text, "start_ms": pa.int64(), "duration_ms": _int}))
_PRIOR = pa.list_(
    pa.struct(
        {
            "attempt": _int,
            "boundary": _text,
            "kind": _text,
            "worker": _text,
            "start_ms": pa.int64(),
            "duration_ms": _int,
        }
    )
)
_SCHEMA = {
    "episode_id": _text,  # null where it follows from the other columns, as it does for all that the farm made
    "group_id": _text,
    "group_size": _int,
    "index": _int,
    "instance_id": _text,
    "task_digest": _text,
    "dataset": _text,
    "repo": _text,
    "strata": _text,  # JSON
    "weight": pa.float64(),
    "seed": pa.int64(),
    "purpose": _text,
    "sampling": _text,  # JSON
    "attempt": _int,
    "worker": _text,
    "engine_url": _text,
    "outcome": _text,
    "reward": pa.float64(),
    "resolved": _flag,
    "patch_applied": _flag,
    "exit_code": _int,
    "failure_boundary": _text,
    "failure_kind": _text,
    "failure_retryable": _flag,
    "drop_reason": _text,
    "end_reason": _text,
    "patched": _flag,
    "turns": _TURNS,
    "timeline": _EVENTS,
    "prompt_tokens": pa.int64(),
    "output_tokens": pa.int64(),
    "cached_tokens": pa.int64(),
    "sandbox_cpu_ms": pa.int64(),
    "worker_cpu_ms": pa.int64(),
    "prior": _PRIOR,
    "started_at_ms": pa.int64(),
    "duration_ms": pa.int64(),
}
_RISING = (
    "started_at_ms",
    "duration_ms",
    "seed",
    "timeline.list.element.start_ms",
    "timeline.list.element.duration_ms",
)


# ------------------------------------------------------------------------------------------- of a run


def trajectories(run: Path) -> list[Trajectory]:
    """Every sealed trajectory of a run in log order, with token ids, log-probs and texts left blank."""
    path = _ensure(run)
    return list(_read(path, path.stat().st_mtime_ns))


def shard_digests(run: Path) -> tuple[str, ...]:
    """The digests of the raw shards behind :func:`trajectories`."""
    return _digests(_ensure(run))


def policies(run: Path) -> list[PolicyVersion]:
    """The published policies, by step."""
    _ensure(run)
    rows = json.loads((run / FOLDER / POLICIES).read_text())["versions"]
    return [PolicyVersion(**row | {"path": str(run / row["path"])}) for row in rows]


def processes(run: Path) -> dict[str, int]:
    """``farm`` and ``trainer`` -> the id of the (last) process that was it; without those that there were none of."""
    place = _ensure(run).with_name(PROCESSES)
    found: dict[str, int] = json.loads(place.read_text()) if place.exists() else {}
    return found


def _ensure(run: Path) -> Path:
    """The run's derived log, made anew when the raw log has other shards than it was made from."""
    rows = run / FOLDER / ROWS
    raw = run / "trajectories"
    if not (raw / "log.json").exists():
        if not rows.exists():
            raise UsageError(f"{run}: holds neither a trajectory log nor a derived one; give the folder of a run")
        return rows
    log = DirectoryLog(raw, create=False)
    digests = tuple(shard.digest for shard in log.shards())
    stale = not rows.exists() or _digests(rows) != digests
    if stale:
        rows.parent.mkdir(exist_ok=True)
        write(rows, (t for _, t in log.read(Cursor())), shards=digests, whole=middle_step(run))
        has_policies = (run / "policies" / "log.json").exists()
        published = PolicyLog(run / "policies", create=False).history() if has_policies else ()
        write_json(rows.with_name(POLICIES), {"versions": [asdict(v) | {"path": _below(run, v)} for v in published]})
    if stale or not rows.with_name(PROCESSES).exists():
        locks = {name: run / lock for name, lock in _LOCKS.items()}
        held = {name: int(lock.read_text()) for name, lock in locks.items() if lock.exists()}
        write_json(rows.with_name(PROCESSES), held)
    return rows


def _below(run: Path, version: PolicyVersion) -> str:
    path = Path(version.path)
    return str(path.relative_to(run.absolute())) if path.is_relative_to(run.absolute()) else str(path)


def middle_step(run: Path) -> tuple[float, float] | None:
    """When the step in the middle of a training began and ended (seconds since the epoch); None without a training."""
    metrics = run / "trainer" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if line] if metrics.exists() else []
    if not lines:
        return None
    line = lines[len(lines) // 2]
    return line["ended_at_s"] - sum(line[f"{part}_s"] for part in ("wait", "train", "checkpoint", "publish")), line[
        "ended_at_s"
    ]


# --------------------------------------------------------------------------------------------- a file


def write(
    path: Path,
    rows: Iterable[Trajectory],
    *,
    shards: tuple[str, ...] = (),
    whole: tuple[float, float] | None = None,
) -> None:
    """Put the derived rows in place. ``whole``: the window in which timelines are kept event by event."""
    metadata = {_VERSION_KEY: str(SCHEMA_VERSION).encode(), _SHARDS_KEY: json.dumps(shards).encode()}
    schema = pa.schema(_SCHEMA, metadata=metadata)
    table = pa.Table.from_pylist([_row(trajectory, whole) for trajectory in rows], schema=schema)
    temporary = path.with_name("." + temporary_name(path.name))
    leaves = [name for name in _leaves(table) if name not in _RISING]
    REAL_DISK.write(
        temporary,
        lambda file: pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=19,
            use_dictionary=leaves,
            column_encoding=dict.fromkeys(_RISING, "DELTA_BINARY_PACKED"),
        ),
    )
    REAL_DISK.rename(temporary, path)


def _leaves(table: pa.Table) -> list[str]:
    """The paths of the columns as Parquet names them."""
    empty = pa.BufferOutputStream()
    pq.write_table(table.slice(0, 0), empty)
    schema = pq.ParquetFile(pa.BufferReader(empty.getvalue())).schema
    return [schema.column(i).path for i in range(len(schema))]


@lru_cache(maxsize=8)
def _table(path: Path, modified_ns: int) -> pa.Table:
    del modified_ns  # only part of what the cache goes by
    table = pq.read_table(path, use_threads=False)
    found = (table.schema.metadata or {}).get(_VERSION_KEY)
    if found != str(SCHEMA_VERSION).encode():
        raise UsageError(
            f"{path}: is not a derived log of version {SCHEMA_VERSION}; use the rollout-farm that wrote it"
        )
    return table


def _open(path: Path) -> pa.Table:
    return _table(path, path.stat().st_mtime_ns)


def _digests(path: Path) -> tuple[str, ...]:
    return tuple(json.loads(_open(path).schema.metadata[_SHARDS_KEY]))


@lru_cache(maxsize=2)
def _read(path: Path, modified_ns: int) -> tuple[Trajectory, ...]:
    return tuple(map(_trajectory, _table(path, modified_ns).to_pylist()))


# ------------------------------------------------------------------------------------------ one record


def _row(t: Trajectory, whole: tuple[float, float] | None) -> dict[str, Any]:
    start_ms = _ms(t.started_at_s)
    in_whole = whole is not None and t.ended_at_s > whole[0] and t.started_at_s < whole[1]
    return {
        "episode_id": None if t.episode_id == _episode_id(t.instance_id, t.group_id, t.index, t.seed) else t.episode_id,
        "group_id": t.group_id,
        "group_size": t.group_size,
        "index": t.index,
        "instance_id": t.instance_id,
        "task_digest": t.task_digest,
        "dataset": t.dataset,
        "repo": t.repo,
        "strata": json.dumps(dict(t.strata), sort_keys=True),
        "weight": t.weight,
        "seed": t.seed,
        "purpose": t.purpose,
        # The seed of a sample differs for every episode and follows from the episode's own.
        "sampling": json.dumps(
            {"temperature": t.sampling.temperature, "top_p": t.sampling.top_p, "top_k": t.sampling.top_k}
        ),
        "attempt": t.attempt,
        "worker": t.worker,
        "engine_url": t.engine_url,
        **_outcome_columns(t.outcome),
        "end_reason": t.end_reason.value,
        "patched": bool(t.patch),
        "turns": [_turn_columns(turn) for turn in t.turns],
        "timeline": [
            {"name": name, "start_ms": begin_ms - start_ms, "duration_ms": duration_ms}
            for name, begin_ms, duration_ms in (_events(t.timeline) if in_whole else _sums(t.timeline, start_ms))
        ],
        "prompt_tokens": t.usage.prompt_tokens,
        "output_tokens": t.usage.output_tokens,
        "cached_tokens": t.usage.cached_tokens,
        "sandbox_cpu_ms": _ms(t.usage.sandbox_cpu_s),
        "worker_cpu_ms": _ms(t.usage.worker_cpu_s),
        "prior": [
            {
                "attempt": p.attempt,
                "boundary": p.boundary.value,
                "kind": p.kind,
                "worker": p.worker,
                "start_ms": _ms(p.started_at_s) - start_ms,
                "duration_ms": _ms(p.ended_at_s) - _ms(p.started_at_s),
            }
            for p in t.prior
        ],
        "started_at_ms": start_ms,
        "duration_ms": _ms(t.ended_at_s) - start_ms,
    }


def _outcome_columns(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Graded(reward=reward, evidence=evidence):
            return {
                "outcome": "graded",
                "reward": reward,
                "resolved": evidence.resolved,
                "patch_applied": evidence.patch_applied,
                "exit_code": evidence.exit_code,
            }
        case Failed():
            return {
                "outcome": "failed",
                "failure_boundary": outcome.boundary.value,
                "failure_kind": outcome.kind,
                "failure_retryable": outcome.retryable,
            }
        case Dropped(reason=reason):
            return {"outcome": "dropped", "drop_reason": reason}


def _turn_columns(turn: Turn) -> dict[str, Any]:
    return {
        "segment": turn.segment,
        "context_tokens": len(turn.context_ids),
        "output_tokens": len(turn.output_ids),
        "spans": [{"step": s.step, "start": s.start, "end": s.end} for s in turn.spans],
        "finish_reason": turn.finish_reason,
        "exit_code": turn.exit_code,
        "cached_tokens": turn.cached_tokens,
        "retractions": turn.retractions,
    }


def _events(timeline: Iterable[Event]) -> list[tuple[str, int, int]]:
    return [(e.name, _ms(e.start_at_s), _ms(e.end_at_s) - _ms(e.start_at_s)) for e in timeline]


def _sums(timeline: Iterable[Event], start_ms: int) -> list[tuple[str, int, int]]:
    """One event per kind, as long as all of it together."""
    sums_ms: dict[str, int] = {}
    for name, _, duration_ms in _events(timeline):
        sums_ms[name] = sums_ms.get(name, 0) + duration_ms
    return [(name, start_ms, sum_ms) for name, sum_ms in sums_ms.items()]


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    start_ms = row["started_at_ms"]
    return Trajectory(
        episode_id=row["episode_id"] or _episode_id(row["instance_id"], row["group_id"], row["index"], row["seed"]),
        **{name: row[name] for name in _AS_THEY_ARE},
        strata=json.loads(row["strata"]),
        sampling=SamplingParams(**json.loads(row["sampling"])),
        outcome=_outcome(row),
        end_reason=EndReason(row["end_reason"]),
        turns=tuple(map(_turn, row["turns"])),
        patch=NOT_KEPT if row["patched"] else "",
        timeline=tuple(
            Event(
                name=e["name"],
                start_at_s=_s(start_ms + e["start_ms"]),
                end_at_s=_s(start_ms + e["start_ms"] + e["duration_ms"]),
            )
            for e in row["timeline"]
        ),
        usage=Usage(
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
            cached_tokens=row["cached_tokens"],
            sandbox_cpu_s=_s(row["sandbox_cpu_ms"]),
            worker_cpu_s=_s(row["worker_cpu_ms"]),
        ),
        prior=tuple(
            FailedAttempt(
                attempt=p["attempt"],
                boundary=Boundary(p["boundary"]),
                kind=p["kind"],
                message=NOT_KEPT,
                worker=p["worker"],
                started_at_s=_s(start_ms + p["start_ms"]),
                ended_at_s=_s(start_ms + p["start_ms"] + p["duration_ms"]),
            )
            for p in row["prior"]
        ),
        started_at_s=_s(start_ms),
        ended_at_s=_s(start_ms + row["duration_ms"]),
    )


_AS_THEY_ARE = (
    "group_id", "group_size", "index", "instance_id", "task_digest", "dataset", "repo", "weight", "seed", "purpose",
    "attempt", "worker", "engine_url",
)  # fmt: skip


def _outcome(row: Mapping[str, Any]) -> Outcome:
    match row["outcome"]:
        case "graded":
            evidence = Evidence(
                statuses={},
                resolved=row["resolved"],
                patch_applied=row["patch_applied"],
                exit_code=row["exit_code"],
                log_tail=NOT_KEPT,
            )
            return Graded(reward=row["reward"], evidence=evidence)
        case "failed":
            return Failed(
                boundary=Boundary(row["failure_boundary"]),
                kind=row["failure_kind"],
                message=NOT_KEPT,
                retryable=row["failure_retryable"],
            )
    return Dropped(reason=row["drop_reason"])


def _turn(row: Mapping[str, Any]) -> Turn:
    return Turn(
        segment=row["segment"],
        context_ids=(0,) * row["context_tokens"],
        output_ids=(0,) * row["output_tokens"],
        output_logprobs=(0.0,) * row["output_tokens"],
        spans=tuple(VersionSpan(**span) for span in row["spans"]),
        finish_reason=row["finish_reason"],
        action=NOT_KEPT,
        observation=NOT_KEPT,
        exit_code=row["exit_code"],
        cached_tokens=row["cached_tokens"],
        retractions=row["retractions"],
    )


def _episode_id(instance_id: str, group_id: str, index: int, seed: int) -> str:
    return content_digest([instance_id, group_id, index, seed])


def _ms(seconds: float) -> int:
    return round(seconds * 1000.0)


def _s(milliseconds: int) -> float:
    return milliseconds / 1000.0
