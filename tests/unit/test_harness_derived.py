"""The derived log: what the report needs comes back as it went in, everything else is blank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.policy_log import PolicyLog
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Boundary,
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
    content_digest,
)
from harness import derived, evidence

T0 = 1_795_977_000.123


def turn(tokens: int) -> Turn:
    return Turn(
        segment=0,
        context_ids=tuple(range(tokens)),
        output_ids=(7, 8, 9),
        output_logprobs=(-0.5, -0.25, -1.0),
        spans=(VersionSpan(step=3, start=0, end=2), VersionSpan(step=4, start=2, end=3)),
        finish_reason="stop",
        action="cat *.py",
        observation="def f(): ...",
        exit_code=0,
        cached_tokens=tokens - 1,
        retractions=0,
    )


def graded(index: int = 0, *, start_s: float = T0) -> Trajectory:
    return Trajectory(
        episode_id=content_digest(["t-1", "g-1", index, 5]),
        group_id="g-1",
        group_size=8,
        index=index,
        instance_id="t-1",
        task_digest="d",
        dataset="micro/rl@1",
        repo="r",
        strata={"kind": "compare"},
        weight=0.5,
        seed=5,
        purpose="rl",
        sampling=SamplingParams(),
        attempt=1,
        worker="w-0",
        engine_url="http://127.0.0.1:1",
        outcome=Graded(
            reward=1.0,
            evidence=Evidence(statuses={"a": "PASSED"}, resolved=True, patch_applied=True, exit_code=0, log_tail="ok"),
        ),
        end_reason=EndReason.SUBMITTED,
        turns=(turn(11), turn(4)),
        patch="diff --git",
        timeline=(
            Event(name="sandbox_start", start_at_s=start_s, end_at_s=start_s + 0.030),
            Event(name="generate", start_at_s=start_s + 0.030, end_at_s=start_s + 0.130),
            Event(name="exec", start_at_s=start_s + 0.130, end_at_s=start_s + 0.150),
            Event(name="generate", start_at_s=start_s + 0.150, end_at_s=start_s + 0.170),
        ),
        usage=Usage(prompt_tokens=15, output_tokens=6, cached_tokens=13, sandbox_cpu_s=0.25, worker_cpu_s=0.5),
        started_at_s=start_s,
        ended_at_s=start_s + 0.2,
    )


def failed() -> Trajectory:
    prior = FailedAttempt(
        attempt=1, boundary=Boundary.SANDBOX_START, kind="start", message="no", worker="w-0", started_at_s=T0 - 2,
        ended_at_s=T0 - 1,
    )  # fmt: skip
    outcome = Failed(boundary=Boundary.ENGINE, kind="timeout", message="late", retryable=True)
    return replace(graded(1), outcome=outcome, end_reason=EndReason.FAILED, patch="", prior=(prior,), turns=())


def written(tmp_path: Path, *rows: Trajectory, whole: tuple[float, float] | None = None) -> list[Trajectory]:
    run = tmp_path / "run"
    (run / derived.FOLDER).mkdir(parents=True, exist_ok=True)
    derived.write(run / derived.FOLDER / derived.ROWS, rows, shards=("a", "b"), whole=whole)
    assert derived.shard_digests(run) == ("a", "b")
    return derived.trajectories(run)


def test_what_the_report_needs_comes_back(tmp_path: Path) -> None:
    dropped = replace(graded(2), outcome=Dropped(reason="stale"), turns=(), episode_id="another")
    first, second, third = written(tmp_path, graded(), failed(), dropped, whole=(T0, T0 + 1))
    kept = graded()
    for name in ("episode_id", "group_id", "instance_id", "strata", "weight", "usage", "end_reason", "seed"):
        assert getattr(first, name) == getattr(kept, name)
    assert (first.total_tokens, first.output_tokens, first.oldest_step) == (21, 6, 3)
    assert first.turns[0].spans == kept.turns[0].spans
    assert isinstance(first.outcome, Graded)
    assert first.outcome.evidence.resolved
    assert [(e.name, round(e.end_at_s - e.start_at_s, 3)) for e in first.timeline] == [
        ("sandbox_start", 0.03), ("generate", 0.1), ("exec", 0.02), ("generate", 0.02),
    ]  # fmt: skip
    assert abs(first.started_at_s - T0) < 1e-3
    assert set(first.turns[0].context_ids) == {0}
    assert first.patch == derived.NOT_KEPT
    assert isinstance(second.outcome, Failed)
    assert (second.outcome.boundary, second.outcome.kind, second.patch) == (Boundary.ENGINE, "timeout", "")
    assert abs(second.prior[0].started_at_s - (T0 - 2)) < 2e-3
    assert (third.outcome, third.episode_id) == (Dropped(reason="stale"), "another")


def test_outside_the_window_a_timeline_is_summed_per_kind(tmp_path: Path) -> None:
    (row,) = written(tmp_path, graded())
    assert [(e.name, round(e.end_at_s - e.start_at_s, 3)) for e in row.timeline] == [
        ("sandbox_start", 0.03), ("generate", 0.12), ("exec", 0.02),
    ]  # fmt: skip


def test_same_rows_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        derived.write(tmp_path / name / "x", [graded(), failed()])
    assert (tmp_path / "a/x").read_bytes() == (tmp_path / "b/x").read_bytes()


def raw_run(tmp_path: Path) -> Path:
    run = tmp_path / "stage" / "run"
    for folder in (run, run / "trainer", run / "logs"):
        folder.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "config.json").write_text(json.dumps({"base": f"{evidence.ROOT}/datasets"}))
    (run / "logs" / "farm.log").write_text("much")
    line = {"ended_at_s": T0 + 1, "wait_s": 0.5, "train_s": 0.25, "checkpoint_s": 0.125, "publish_s": 0.125}
    (run / "trainer" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with DirectoryLog(run / "trajectories") as log:
        log.append_many([graded(i) for i in range(3)])
        log.seal()
    PolicyLog(run / "policies").publish(
        0, lambda f: (f / "w.safetensors").write_bytes(b"w") and None, consumed_groups=2
    )
    return run


def test_a_run_read_through_its_derived_log_and_from_what_is_kept_of_it(tmp_path: Path) -> None:
    run = raw_run(tmp_path)
    rows, policies, digests = derived.trajectories(run), derived.policies(run), derived.shard_digests(run)
    assert sorted(t.index for t in rows) == [0, 1, 2]
    assert len(rows[0].timeline) == 4  # it ran in the middle step
    assert Path(policies[0].path).is_dir()
    assert policies[0].consumed_groups == 2
    assert len(digests) == 1
    (run.parent / "done.json").write_text("{}")
    evidence.keep([run.parent], tmp_path / "kept")
    copy = tmp_path / "kept" / "stage" / "run"
    files = sorted(str(f.relative_to(copy)) for f in copy.rglob("*") if f.is_file())
    assert files == [
        "config.json", "derived/policies.json", "derived/processes.json", "derived/trajectories.parquet", "run.json",
        "trainer/metrics.jsonl",
    ]  # fmt: skip
    assert json.loads((copy / "config.json").read_text()) == {"base": "datasets"}
    assert derived.trajectories(copy) == rows
    assert derived.shard_digests(copy) == digests
    assert [p.digest for p in derived.policies(copy)] == [policies[0].digest]


def test_more_shards_make_a_new_derived_log(tmp_path: Path) -> None:
    run = raw_run(tmp_path)
    assert len(derived.trajectories(run)) == 3
    with DirectoryLog(run / "trajectories") as log:
        log.append(graded(3))
        log.seal()
    assert len(derived.trajectories(run)) == 4


def test_another_version_and_no_log_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a trajectory log nor a derived one"):
        derived.trajectories(tmp_path)
    run = raw_run(tmp_path)
    shard = next((run / "trajectories").glob("*.parquet"))
    with pytest.raises(UsageError, match="is not a derived log of version 1"):
        derived._open(shard)
