"""A trajectory comes back from the log as it went in, whatever is in it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farm.trajectory_codec import decode, encode
from farm.trajectory_log import DirectoryLog
from farm.trajectory_open import TornFileError, pack, unpack
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
    SamplingParams,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)

TEXT = st.text(max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
REAL = st.floats(allow_nan=False)
TOKENS = st.lists(INT32, max_size=6).map(tuple)
LOGPROBS = st.lists(st.floats(width=32, allow_nan=False), max_size=6).map(tuple)
NAMES = st.dictionaries(TEXT, TEXT, max_size=4)

SPANS = st.builds(VersionSpan, step=INT64, start=INT32, end=INT32)
TURNS = st.builds(
    Turn,
    segment=INT32,
    context_ids=TOKENS,
    output_ids=TOKENS,
    output_logprobs=LOGPROBS,
    spans=st.lists(SPANS, max_size=3).map(tuple),
    finish_reason=TEXT,
    action=TEXT,
    observation=TEXT,
    exit_code=st.none() | INT64,
    cached_tokens=INT64,
    retractions=INT64,
)
OUTCOMES = st.one_of(
    st.builds(
        Graded,
        reward=REAL,
        evidence=st.builds(
            Evidence,
            statuses=NAMES,
            resolved=st.booleans(),
            patch_applied=st.booleans(),
            exit_code=INT64,
            log_tail=TEXT,
        ),
    ),
    st.builds(Failed, boundary=st.sampled_from(Boundary), kind=TEXT, message=TEXT, retryable=st.booleans()),
    st.builds(Dropped, reason=TEXT),
)
PRIOR = st.builds(
    FailedAttempt,
    attempt=INT64,
    boundary=st.sampled_from(Boundary),
    kind=TEXT,
    message=TEXT,
    worker=TEXT,
    started_at_s=REAL,
    ended_at_s=REAL,
)
TRAJECTORIES = st.builds(
    Trajectory,
    episode_id=st.from_regex(r"[0-9a-f]{1,32}", fullmatch=True),
    group_id=TEXT,
    group_size=INT64,
    index=INT64,
    instance_id=TEXT,
    task_digest=TEXT,
    dataset=TEXT,
    repo=TEXT,
    strata=NAMES,
    weight=REAL,
    seed=INT64,
    purpose=TEXT,
    sampling=st.builds(SamplingParams, temperature=REAL, top_p=REAL, top_k=INT64, seed=st.none() | INT64),
    attempt=INT64,
    worker=TEXT,
    engine_url=TEXT,
    outcome=OUTCOMES,
    end_reason=st.sampled_from(EndReason),
    turns=st.lists(TURNS, max_size=3).map(tuple),
    patch=TEXT,
    timeline=st.lists(st.builds(Event, name=TEXT, start_at_s=REAL, end_at_s=REAL), max_size=3).map(tuple),
    usage=st.builds(
        Usage, prompt_tokens=INT64, output_tokens=INT64, cached_tokens=INT64, sandbox_cpu_s=REAL, worker_cpu_s=REAL
    ),
    prior=st.lists(PRIOR, max_size=2).map(tuple),
    started_at_s=REAL,
    ended_at_s=REAL,
)
ROWS = st.lists(TRAJECTORIES, min_size=1, max_size=4, unique_by=lambda t: t.episode_id)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(rows=ROWS, data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=_SLOW)
def test_rows_and_slices_of_a_batch_come_back(rows: Sequence[Trajectory], data: st.DataObject) -> None:
    batch = encode(rows)
    batch.validate(full=True)
    assert decode(batch) == rows
    start = data.draw(st.integers(0, len(rows)))
    length = data.draw(st.integers(0, len(rows) - start))
    assert decode(batch.slice(start, length)) == rows[start : start + length]


@given(rows=ROWS)
@settings(max_examples=8, deadline=None, suppress_health_check=_SLOW)
def test_rows_come_back_from_a_sealed_log_in_order(rows: Sequence[Trajectory]) -> None:
    with tempfile.TemporaryDirectory() as folder, DirectoryLog(folder) as log:
        assert log.append_many(rows) == [True] * len(rows)
        assert log.seal() is not None
        assert [t for _, t in log.read(Cursor())] == sorted(rows, key=lambda t: (t.ended_at_s, t.episode_id))
        assert [log.find(t.episode_id) for t in rows] == rows


@given(trajectory=TRAJECTORIES, data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=_SLOW)
def test_an_open_file_is_whole_or_known_to_be_torn(trajectory: Trajectory, data: st.DataObject) -> None:
    whole = b"".join(pack(encode([trajectory])))
    assert decode(unpack(whole)) == [trajectory]
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    for torn in (cut, flipped):
        with pytest.raises(TornFileError):
            unpack(torn)
