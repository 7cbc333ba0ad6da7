"""Task sources: rows of the SWE-bench schema become tasks, and bad input gets one clear line."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from farm.errors import UsageError
from farm.tasks import load_tasks
from farm.types import ImageFiles

DATA = Path(os.environ.get("ROLLOUT_FARM_DATA") or Path(__file__).parents[3] / "shared" / "data")
ROW: dict[str, Any] = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "base_commit": "a" * 40,
    "patch": "diff",
    "test_patch": "diff",
    "problem_statement": "It breaks.",
    "version": "1.0",
    "FAIL_TO_PASS": ["t::a"],
    "PASS_TO_PASS": '["t::b", "t::c"]',
    "eval_script": "#!/bin/bash\n",
    "log_parser": "parse_log_pytest",
    "image": "o/r:latest",
    "difficulty": "<15 min fix",
    "hints_text": "ignored",
}


def jsonl(at: Path, *rows: object) -> Path:
    path = at / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_row_becomes_a_task(tmp_path: Path) -> None:
    path = jsonl(tmp_path, ROW)
    (task,) = load_tasks(f"swebench:{path}")
    assert (task.instance_id, task.image, task.log_parser) == ("o__r-1", "o/r:latest", "parse_log_pytest")
    assert task.fail_to_pass == ("t::a",)
    assert task.pass_to_pass == ("t::b", "t::c")
    assert task.workspace == ImageFiles()
    assert task.strata == {"repo": "o/r", "difficulty": "<15 min fix"}
    assert task.dataset.startswith("swebench/rows@")


def test_parquet_and_jsonl_give_the_same_tasks(tmp_path: Path) -> None:
    rows = [ROW | {"instance_id": f"o__r-{n}", "PASS_TO_PASS": '["x"]'} for n in range(3)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = load_tasks(f"swebench:{jsonl(tmp_path, *rows)}")
    table = load_tasks(f"swebench:{tmp_path / 'rows.parquet'}")
    assert [t.instance_id for t in table] == [t.instance_id for t in lines]
    assert [t.pass_to_pass for t in table] == [t.pass_to_pass for t in lines]


def test_limit_and_dataset_name_follow_the_content(tmp_path: Path) -> None:
    first = load_tasks(f"swebench:{jsonl(tmp_path, ROW, ROW, ROW)}", limit=2)
    other = load_tasks(f"swebench:{jsonl(tmp_path, ROW)}")
    assert len(first) == 2
    assert first[0].dataset != other[0].dataset


@pytest.mark.parametrize("spec", ["nope", "nope:x", "", "Micro:rl"])
def test_unknown_suite_lists_the_choices(spec: str) -> None:
    with pytest.raises(UsageError, match=r"micro:SPLIT, pypi\[:PACKAGE\], swebench:PATH"):
        load_tasks(spec)


def test_limit_below_one() -> None:
    with pytest.raises(UsageError, match="--limit 0"):
        load_tasks("swebench:x.jsonl", limit=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.parquet", None, "No such file"),
        ("rows.csv", b"a,b", "allowed are .parquet and .jsonl"),
        ("bad.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("bad.jsonl", b"{}\n{", "line 2: not JSON"),
        ("list.jsonl", b"[]", "line 1: a JSON object is needed"),
        ("empty.jsonl", b"", "holds no rows"),
        ("short.jsonl", b'{"repo": "o/r"}', "row 1: missing instance_id, base_commit, patch"),
        ("type.jsonl", json.dumps(ROW | {"image": 3}).encode(), "image must be text"),
        ("ids.jsonl", json.dumps(ROW | {"FAIL_TO_PASS": "t::a"}).encode(), "FAIL_TO_PASS must be a list of test ids"),
        ("ids2.jsonl", json.dumps(ROW | {"PASS_TO_PASS": [1]}).encode(), "PASS_TO_PASS must be a list of test ids"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_tasks(f"swebench:{tmp_path / name}")
    assert "\n" not in str(caught.value)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        load_tasks(f"swebench:{tmp_path}")


def test_real_verified_rows() -> None:
    path = DATA / "SWE-bench_Verified_test.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent: set ROLLOUT_FARM_DATA to the folder that holds it")
    tasks = load_tasks(f"swebench:{path}")
    assert len(tasks) == 500
    assert len({task.instance_id for task in tasks}) == 500
    assert len({task.strata["repo"] for task in tasks}) == 12
    assert all(task.fail_to_pass and task.image.startswith("swebench/sweb.eval.") for task in tasks)
