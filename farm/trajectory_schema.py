"""The columns of the trajectory log: one row per episode, everything open to SQL.

Version 1. Decisions a reader has to know:

* ``outcome_kind`` is ``graded``, ``failed`` or ``dropped``. ``reward`` and ``evidence`` are null unless it is
  ``graded`` (Rule 3), ``failure_*`` unless ``failed``, ``drop_reason`` unless ``dropped``; so ``avg(reward)`` is over
  graded rows only.
* Log-probs are ``float32``: engines compute and send them in that precision, so a recorded value comes back bit for
  bit. A double that is not a float32 is rounded to the nearest one when it is appended.
* Token ids are ``int32``; steps, seeds and token counts ``int64``; times ``float64`` seconds since the epoch.
* ``turn_count``, ``output_tokens``, ``total_tokens`` and ``oldest_step`` repeat what the turns say, so that no query
  has to unnest them.

The version stands in the schema's metadata (``rollout_farm.schema_version``), so in every Arrow and Parquet file.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from farm.errors import UsageError

SCHEMA_VERSION = 1
VERSION_KEY = b"rollout_farm.schema_version"

_text = pa.string()
_small = pa.int32()
_big = pa.int64()
_real = pa.float64()
_flag = pa.bool_()


def _struct(*, optional: str = "", **fields: pa.DataType) -> pa.DataType:
    """Nothing in it is null but the field named ``optional``: Parquet keeps no levels for what can't be null."""
    return pa.struct([pa.field(name, kind, nullable=name == optional) for name, kind in fields.items()])


def _list(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item, nullable=False))


STRATA = pa.map_(_text, pa.field("value", _text, nullable=False))
SAMPLING = _struct(optional="seed", temperature=_real, top_p=_real, top_k=_big, seed=_big)
EVIDENCE = _struct(statuses=STRATA, resolved=_flag, patch_applied=_flag, exit_code=_big, log_tail=_text)
TOKENS = _list(_small)
LOGPROBS = _list(pa.float32())
SPANS = _list(_struct(step=_big, start=_small, end=_small))
TURN = _struct(
    optional="exit_code",
    segment=_small,
    context_ids=TOKENS,
    output_ids=TOKENS,
    output_logprobs=LOGPROBS,
    spans=SPANS,
    finish_reason=_text,
    action=_text,
    observation=_text,
    exit_code=_big,
    cached_tokens=_big,
    retractions=_big,
)
TURNS = _list(TURN)
TIMELINE = _list(_struct(name=_text, start_at_s=_real, end_at_s=_real))
USAGE = _struct(prompt_tokens=_big, output_tokens=_big, cached_tokens=_big, sandbox_cpu_s=_real, worker_cpu_s=_real)
PRIOR = _list(
    _struct(
        attempt=_big,
        boundary=_text,
        kind=_text,
        message=_text,
        worker=_text,
        started_at_s=_real,
        ended_at_s=_real,
    )
)

_NULLABLE = frozenset(
    {
        "reward",
        "evidence",
        "failure_boundary",
        "failure_kind",
        "failure_message",
        "failure_retryable",
        "drop_reason",
        "oldest_step",
    }
)

_COLUMNS = {
    "episode_id": _text,
    "group_id": _text,
    "group_size": _big,
    "index": _big,
    "instance_id": _text,
    "task_digest": _text,
    "dataset": _text,
    "repo": _text,
    "strata": STRATA,
    "weight": _real,
    "seed": _big,
    "purpose": _text,
    "sampling": SAMPLING,
    "attempt": _big,
    "worker": _text,
    "engine_url": _text,
    "outcome_kind": _text,
    "reward": _real,
    "evidence": EVIDENCE,
    "failure_boundary": _text,
    "failure_kind": _text,
    "failure_message": _text,
    "failure_retryable": _flag,
    "drop_reason": _text,
    "end_reason": _text,
    "turns": TURNS,
    "patch": _text,
    "timeline": TIMELINE,
    "usage": USAGE,
    "prior": PRIOR,
    "started_at_s": _real,
    "ended_at_s": _real,
    "turn_count": _big,
    "output_tokens": _big,
    "total_tokens": _big,
    "oldest_step": _big,
}

SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name in _NULLABLE) for name, kind in _COLUMNS.items()],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


def check_schema(schema: Any, where: str) -> None:
    """Raises :class:`UsageError` unless ``schema`` is this version's, column for column."""
    found = (schema.metadata or {}).get(VERSION_KEY)
    if found is None:
        raise UsageError(f"{where}: is not a trajectory file (no rollout_farm.schema_version in its metadata)")
    if found != str(SCHEMA_VERSION).encode():
        raise UsageError(
            f"{where}: has schema version {found.decode(errors='replace')}, this program reads {SCHEMA_VERSION}; "
            "use the rollout-farm that wrote it"
        )
    if not schema.equals(SCHEMA):
        raise UsageError(f"{where}: says schema version {SCHEMA_VERSION} but its columns differ; it was altered")
