"""The sealed log is open: DuckDB, Polars and pandas read it without this project."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farm.log_bench import synthetic
from farm.trajectory_log import DirectoryLog
from farm.types import Boundary, Dropped, Failed, Outcome, Trajectory


@pytest.fixture(scope="module")
def episodes() -> list[Trajectory]:
    """Two shards of eight: rewards 0 and 1 in turn, but for one failed and one dropped in each."""
    made = [synthetic(n, turns=3, context=8, output=4) for n in range(16)]
    others: list[Outcome] = [
        Failed(boundary=Boundary.ENGINE, kind="timeout", message="no answer"),
        Dropped(reason="withdrawn"),
    ]
    for place, outcome in zip((3, 4, 11, 12), others * 2, strict=True):
        made[place] = replace(made[place], outcome=outcome)
    return made


@pytest.fixture(scope="module")
def glob(tmp_path_factory: pytest.TempPathFactory, episodes: list[Trajectory]) -> str:
    folder = tmp_path_factory.mktemp("log")
    with DirectoryLog(folder) as log:
        for start in (0, 8):
            log.append_many(episodes[start : start + 8])
            log.seal()
    return str(folder / "shard-*.parquet")


def test_duckdb_averages_over_graded_rows_only(glob: str) -> None:
    with duckdb.connect() as db:
        query = f"SELECT avg(reward), count(reward), count(*) FROM '{glob}'"
        assert db.sql(query).fetchall() == [(0.5, 12, 16)]
        kinds = db.sql(f"SELECT outcome_kind, count(*) FROM '{glob}' GROUP BY ALL ORDER BY ALL").fetchall()
        assert kinds == [("dropped", 2), ("failed", 2), ("graded", 12)]
        failed = db.sql(f"SELECT DISTINCT failure_boundary, failure_kind FROM '{glob}' WHERE outcome_kind = 'failed'")
        assert failed.fetchall() == [("engine", "timeout")]


def test_duckdb_opens_turns_spans_maps_and_timelines(glob: str, episodes: list[Trajectory]) -> None:
    with duckdb.connect() as db:
        tokens = db.sql(
            f"SELECT sum(len(turn.output_ids)), min(turn.spans[1].step) "
            f"FROM (SELECT unnest(turns) AS turn FROM '{glob}')"
        )
        assert tokens.fetchall() == [(sum(t.output_tokens for t in episodes), 0)]
        strata = db.sql(f"SELECT strata['kind'], sampling.temperature, count(*) FROM '{glob}' GROUP BY ALL")
        assert strata.fetchall() == [("arith", 1.0, 16)]
        passed = db.sql(
            f"SELECT evidence.statuses['test_0'], count(*) FROM '{glob}' GROUP BY ALL ORDER BY 2"
        ).fetchall()
        assert passed == [(None, 4), ("PASSED", 12)]
        generating = db.sql(
            f"SELECT count(*) FROM (SELECT unnest(timeline, recursive := true) FROM '{glob}') WHERE name = 'generate'"
        )
        assert generating.fetchall() == [(48,)]


def test_polars_reads_the_same(glob: str, episodes: list[Trajectory]) -> None:
    frame = polars.read_parquet(glob)
    assert frame["reward"].mean() == 0.5
    assert frame["episode_id"].to_list() == [t.episode_id for t in episodes]
    ids = frame["turns"][0][0]["output_ids"]
    assert tuple(ids) == episodes[0].turns[0].output_ids
    lazy = polars.scan_parquet(glob).filter(polars.col("outcome_kind") == "graded")
    assert lazy.select("total_tokens").sum().collect().item() == 12 * 36


def test_pandas_reads_the_same(glob: str, episodes: list[Trajectory]) -> None:
    folder = Path(glob).parent
    frame = pandas.concat([pandas.read_parquet(path) for path in sorted(folder.glob("shard-*.parquet"))])
    assert frame["reward"].mean() == 0.5
    assert list(frame["turn_count"]) == [3] * 16
    logprobs = frame["turns"].iloc[0][0]["output_logprobs"]
    assert tuple(float(v) for v in logprobs) == episodes[0].turns[0].output_logprobs


def test_the_files_say_what_they_are(glob: str) -> None:
    for path in sorted(Path(glob).parent.glob("shard-*.parquet")):
        file = pq.ParquetFile(path)
        assert file.schema_arrow.metadata[b"rollout_farm.schema_version"] == b"1"
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"
        sidecar = json.loads(path.with_suffix(".json").read_text())
        assert sidecar["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert sidecar["rows"] == 8


def test_an_open_file_is_an_arrow_stream(tmp_path: Path, episodes: list[Trajectory]) -> None:
    DirectoryLog(tmp_path / "log").append(episodes[0])
    path = tmp_path / "log" / "open" / f"{episodes[0].episode_id}.arrow"
    with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
        table = reader.read_all()
    assert table.column("instance_id").to_pylist() == ["synthetic-0"]
