"""Trajectory records to Arrow columns and back, without loss.

Both ways are columnar and pack the token arrays with ``struct`` (about 10 ns a value): the generic Arrow conversions of
nested Python objects cost four times as much, which a worker would pay per episode and the trainer per step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import pyarrow as pa

from farm import trajectory_schema as columns
from farm.errors import FarmError
from farm.types import (
    Boundary,
    Dropped,
    EndReason,
    Event,
    Evidence,
    Failed,
    FailedAttempt,
    Graded,
    Outcome,
    SamplingParams,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)


def encode(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """One batch of ``SCHEMA`` with a row per trajectory.

    Raises :class:`FarmError` (kind ``unstorable``) when a value does not fit its column, e.g. a token id over 31 bits.
    """
    try:
        return pa.RecordBatch.from_arrays(_arrays(trajectories), schema=columns.SCHEMA)
    except (struct.error, OverflowError, TypeError, AttributeError, pa.ArrowException) as error:
        ids = ", ".join(t.episode_id for t in trajectories[:3])
        raise FarmError(f"trajectory of episode {ids} can't be stored: {error}", kind="unstorable") from error


def decode(batch: pa.RecordBatch) -> list[Trajectory]:
    """The trajectories of a batch of ``SCHEMA``, in order."""
    get = {name: batch.column(name) for name in batch.schema.names}
    plain = {name: _values(column) for name, column in get.items() if not pa.types.is_nested(column.type)}
    nested = {
        "strata": _maps(get["strata"]),
        "sampling": _structs(get["sampling"], _sampling),
        "outcome": _outcomes(get["evidence"], plain),
        "turns": _turns(get["turns"]),
        "timeline": _records(get["timeline"], _event),
        "usage": _structs(get["usage"], _usage),
        "prior": _records(get["prior"], _failed_attempt),
    }
    plain["end_reason"] = [_END_REASONS[value] for value in plain["end_reason"]]
    names = Trajectory.__slots__
    rows = zip(*(nested[name] if name in nested else plain[name] for name in names), strict=True)
    return [Trajectory(**dict(zip(names, row, strict=True))) for row in rows]


# ------------------------------------------------------------------------------------------ to columns


def _arrays(rows: Sequence[Trajectory]) -> list[pa.Array]:
    plain = _converted([_plain_row(t) for t in rows], _ROW_WITHOUT_TURNS)
    plain["turns"] = _turn_column([t.turns for t in rows])
    return [plain[name] for name in columns.SCHEMA.names]


def _converted(rows: list[dict[str, Any]], kind: pa.DataType) -> dict[str, pa.Array]:
    """Arrow's own conversion: one call for many small columns beats one call for each."""
    try:
        made = pa.array(rows, kind)
    except UnicodeEncodeError:
        made = pa.array([_clean(row) for row in rows], kind)
    return dict(zip((field.name for field in kind), made.flatten(), strict=True))


def _clean(value: Any) -> Any:
    """Text that is not Unicode (lone surrogates) gets ``?`` for what can't be written, rather than lose the episode."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clean(item) for item in value)
    return value


def _plain_row(t: Trajectory) -> dict[str, Any]:
    row = {name: getattr(t, name) for name in _SAME}
    outcome = t.outcome
    row["outcome_kind"] = _KINDS[type(outcome)]
    if isinstance(outcome, Graded):
        row["reward"] = float(outcome.reward)
        row["evidence"] = {name: getattr(outcome.evidence, name) for name in _EVIDENCE}
        row["evidence"]["statuses"] = list(outcome.evidence.statuses.items())
    elif isinstance(outcome, Failed):
        row["failure_boundary"] = outcome.boundary
        row["failure_kind"] = outcome.kind
        row["failure_message"] = outcome.message
        row["failure_retryable"] = outcome.retryable
    else:
        row["drop_reason"] = outcome.reason
    row["strata"] = list(t.strata.items())
    row["sampling"] = {name: getattr(t.sampling, name) for name in _SAMPLING}
    row["usage"] = {name: getattr(t.usage, name) for name in _USAGE}
    row["timeline"] = [{"name": e.name, "start_at_s": e.start_at_s, "end_at_s": e.end_at_s} for e in t.timeline]
    row["prior"] = [{name: getattr(p, name) for name in _PRIOR} for p in t.prior]
    row["turn_count"] = len(t.turns)
    return row


def _turn_column(rows: Sequence[Sequence[Turn]]) -> pa.Array:
    turns = list(chain.from_iterable(rows))
    made = _converted([_plain_turn(turn) for turn in turns], _TURN_WITHOUT_TOKENS)
    made["context_ids"] = _packed([t.context_ids for t in turns], "i", columns.TOKENS)
    made["output_ids"] = _packed([t.output_ids for t in turns], "i", columns.TOKENS)
    made["output_logprobs"] = _packed([t.output_logprobs for t in turns], "f", columns.LOGPROBS)
    children = [made[field.name] for field in columns.TURN]
    values = pa.Array.from_buffers(columns.TURN, len(turns), [None], children=children)
    return _lists(rows, columns.TURNS, values)


def _plain_turn(turn: Turn) -> dict[str, Any]:
    row = {name: getattr(turn, name) for name in _TURN}
    row["spans"] = [{"step": s.step, "start": s.start, "end": s.end} for s in turn.spans]
    return row


def _packed(rows: Sequence[Sequence[Any]], code: str, kind: pa.DataType) -> pa.Array:
    # Not ``struct.pack(format, *row)``: to put the format before the values Python copies them, twice.
    data = b"".join([struct.Struct(f"{len(row)}{code}").pack(*row) for row in rows])
    return _lists(rows, kind, pa.Array.from_buffers(kind.value_type, len(data) // 4, [None, pa.py_buffer(data)]))


def _lists(rows: Sequence[Sequence[Any]], kind: pa.DataType, values: pa.Array) -> pa.Array:
    offsets = list(accumulate(map(len, rows), initial=0))
    data = pa.py_buffer(struct.pack(f"{len(offsets)}i", *offsets))
    return pa.Array.from_buffers(kind, len(rows), [None, data], children=[values])


def _without(fields: Iterable[pa.Field], *names: str) -> pa.DataType:
    return pa.struct([field for field in fields if field.name not in names])


_ROW_WITHOUT_TURNS = _without(columns.SCHEMA, "turns")
_TURN_WITHOUT_TOKENS = _without(columns.TURN, "context_ids", "output_ids", "output_logprobs")
_SAME = [f.name for f in columns.SCHEMA if f.name in dir(Trajectory) and not pa.types.is_nested(f.type)]
_EVIDENCE = [f.name for f in columns.EVIDENCE if f.name != "statuses"]
_SAMPLING = [f.name for f in columns.SAMPLING]
_USAGE = [f.name for f in columns.USAGE]
_PRIOR = [f.name for f in columns.PRIOR.value_type]
_TURN = [f.name for f in _TURN_WITHOUT_TOKENS if f.name != "spans"]


# ---------------------------------------------------------------------------------------- from columns


def _values(array: pa.Array) -> list[Any]:
    """Plain Python values, nulls as None. ``to_pylist`` makes a scalar object of each value and is far slower."""
    if array.null_count and not pa.types.is_string(array.type):
        values: list[Any] = array.to_pylist()
    else:
        values = array.to_numpy(zero_copy_only=False).tolist()
    return values


def _bounds(array: pa.Array) -> tuple[list[int], int, int]:
    """Offsets of a list array's rows within its slice of the values, and that slice (start, length)."""
    offsets = _values(array.offsets)
    start = offsets[0]
    return [offset - start for offset in offsets], start, offsets[-1] - start


def _split(array: pa.Array, made: Sequence[Any], offsets: Sequence[int]) -> list[tuple[Any, ...]]:
    return [tuple(made[offsets[i] : offsets[i + 1]]) for i in range(len(array))]


def _numbers(array: pa.Array, code: str) -> list[tuple[Any, ...]]:
    """list<int32> or list<float32> as tuples, each unpacked from its place: copying them out of one is slower."""
    offsets = _values(array.offsets)
    values = array.values
    data = values.buffers()[1] or b""
    return [
        struct.unpack_from(f"{end - start}{code}", data, 4 * (values.offset + start)) if end > start else ()
        for start, end in pairwise(offsets)
    ]


def _records(array: pa.Array, make: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """list<struct> as tuples of what ``make`` makes of a struct's values, in the order of its fields."""
    offsets, start, length = _bounds(array)
    return _split(array, _structs(array.values.slice(start, length), make), offsets)


def _structs(array: pa.Array, make: Callable[..., Any]) -> list[Any]:
    return list(map(make, *(_values(array.field(i)) for i in range(array.type.num_fields))))


def _maps(array: pa.Array) -> list[dict[str, str]]:
    offsets, start, length = _bounds(array)
    keys = _values(array.keys.slice(start, length))
    items = _values(array.items.slice(start, length))
    pairs = list(zip(keys, items, strict=True))
    return [dict(pairs[offsets[i] : offsets[i + 1]]) for i in range(len(array))]


def _turns(array: pa.Array) -> list[tuple[Turn, ...]]:
    offsets, start, length = _bounds(array)
    turns = array.values.slice(start, length)
    fields = [_turn_field(field.name, turns.field(i)) for i, field in enumerate(turns.type)]
    return _split(array, list(map(_turn, *fields)), offsets)


def _turn_field(name: str, array: pa.Array) -> list[Any]:
    if name in ("context_ids", "output_ids"):
        return _numbers(array, "i")
    if name == "output_logprobs":
        return _numbers(array, "f")
    if name == "spans":
        return _records(array, _span)
    return _values(array)


def _outcomes(evidence: pa.Array, plain: dict[str, list[Any]]) -> list[Outcome]:
    statuses = _maps(evidence.field(0))
    names = [field.name for field in evidence.type][1:]
    rest = list(zip(*(_values(evidence.field(i + 1)) for i in range(len(names))), strict=True))
    made: list[Outcome] = []
    for i, kind in enumerate(plain["outcome_kind"]):
        if kind == "graded":
            found = Evidence(statuses=statuses[i], **dict(zip(names, rest[i], strict=True)))
            made.append(Graded(reward=plain["reward"][i], evidence=found))
        elif kind == "failed":
            made.append(
                Failed(
                    boundary=Boundary(plain["failure_boundary"][i]),
                    kind=plain["failure_kind"][i],
                    message=plain["failure_message"][i],
                    retryable=plain["failure_retryable"][i],
                )
            )
        else:
            made.append(Dropped(reason=plain["drop_reason"][i]))
    return made


# Records from a struct's values, in the order of the schema. Spelled out, for keyword calls through a dictionary take
# twice as long and there are hundreds of these in one episode.


def _turn(
    segment: int,
    context_ids: tuple[int, ...],
    output_ids: tuple[int, ...],
    output_logprobs: tuple[float, ...],
    spans: tuple[VersionSpan, ...],
    finish_reason: str,
    action: str,
    observation: str,
    exit_code: int | None,
    cached_tokens: int,
    retractions: int,
) -> Turn:
    return Turn(
        segment=segment,
        context_ids=context_ids,
        output_ids=output_ids,
        output_logprobs=output_logprobs,
        spans=spans,
        finish_reason=finish_reason,
        action=action,
        observation=observation,
        exit_code=exit_code,
        cached_tokens=cached_tokens,
        retractions=retractions,
    )


def _span(step: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(step=step, start=start, end=end)


def _event(name: str, start_at_s: float, end_at_s: float) -> Event:
    return Event(name=name, start_at_s=start_at_s, end_at_s=end_at_s)


def _sampling(temperature: float, top_p: float, top_k: int, seed: int | None) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def _usage(prompt: int, output: int, cached: int, sandbox_cpu_s: float, worker_cpu_s: float) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        sandbox_cpu_s=sandbox_cpu_s,
        worker_cpu_s=worker_cpu_s,
    )


def _failed_attempt(
    attempt: int, boundary: str, kind: str, message: str, worker: str, started_at_s: float, ended_at_s: float
) -> FailedAttempt:
    return FailedAttempt(
        attempt=attempt,
        boundary=Boundary(boundary),
        kind=kind,
        message=message,
        worker=worker,
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
    )


_KINDS = {Graded: "graded", Failed: "failed", Dropped: "dropped"}
_END_REASONS = {reason.value: reason for reason in EndReason}
