"""Task sources: rows of the SWE-bench schema become tasks, and bad input gets one clear line."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    "eval_script": "#!/bin/bash\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n",
    "log_parser": "parse_log_pytest",
    "image": "o/r:latest",
    "difficulty": "<15 min fix",
    "hints_text": "ignored",
}


GRADING = ("eval_script", "log_parser", "image")


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
    assert task.eval_type == "pass_and_fail"
    assert task.digest != load_tasks(f"swebench:{jsonl(tmp_path, ROW | {'eval_type': 'fail_only'})}")[0].digest


def test_parquet_and_jsonl_give_the_same_tasks(tmp_path: Path) -> None:
    rows = [ROW | {"instance_id": f"o__r-{n}", "PASS_TO_PASS": '["x"]'} for n in range(3)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = load_tasks(f"swebench:{jsonl(tmp_path, *rows)}")
    table = load_tasks(f"swebench:{tmp_path / 'rows.parquet'}")
    assert [t.instance_id for t in table] == [t.instance_id for t in lines]
    assert [t.pass_to_pass for t in table] == [t.pass_to_pass for t in lines]


def test_limit_and_dataset_name_follow_the_content(tmp_path: Path) -> None:
    rows = [ROW | {"instance_id": f"o__r-{n}"} for n in range(3)]
    first = load_tasks(f"swebench:{jsonl(tmp_path, *rows)}", limit=2)
    other = load_tasks(f"swebench:{jsonl(tmp_path, ROW)}")
    assert len(first) == 2
    assert first[0].dataset != other[0].dataset


@pytest.mark.parametrize("spec", ["nope", "nope:x", "", "Micro:rl"])
def test_unknown_suite_lists_the_choices(spec: str) -> None:
    with pytest.raises(UsageError, match=r"micro:SPLIT, pypi\[:PACKAGE\], .*swebench:ROWS, subset:FILE"):
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
        ("old.jsonl", json.dumps({k: v for k, v in ROW.items() if k not in GRADING}).encode(), "SWE-bench 4 or before"),
        ("blank.jsonl", json.dumps(ROW | {"image": " "}).encode(), "image must not be empty"),
        ("type2.jsonl", json.dumps(ROW | {"eval_type": "x"}).encode(), "allowed are pass_and_fail, fail_only"),
        ("mute.jsonl", json.dumps(ROW | {"eval_script": "pytest"}).encode(), "never writes '>>>>> Start Test Output'"),
        ("twice.jsonl", (json.dumps(ROW) + "\n").encode() * 2, "row 2: instance_id 'o__r-1' is there twice"),
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


SHA = "c" * 40
HUB_FILE = "data/test-00000-of-00001.parquet"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that speaks as much of the Hugging Face Hub as is asked of it."""
    parquet.write_table(pa.Table.from_pylist([ROW | {"PASS_TO_PASS": '["x"]'}]), tmp_path / "test.parquet")
    data = (tmp_path / "test.parquet").read_bytes()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            content, code = b"", 404
            if path.startswith("/api/datasets/owner/rows"):
                files = [{"rfilename": name} for name in ("README.md", HUB_FILE)]
                content, code = json.dumps({"id": "owner/rows", "sha": SHA, "siblings": files}).encode(), 200
            elif path == f"/datasets/owner/rows/resolve/{SHA}/{HUB_FILE}":
                content, code = data, 200
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    try:
        yield url
    finally:
        from huggingface_hub import close_session

        close_session()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.usefixtures("hub")
def test_rows_of_the_hub() -> None:
    (task,) = load_tasks("swebench:owner/rows")
    assert task.instance_id == "o__r-1"
    assert task.dataset == f"owner/rows:test@{SHA[:12]}"


@pytest.mark.usefixtures("hub")
def test_a_split_that_the_hub_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"no Parquet file of split 'dev'; files: .*README"):
        load_tasks("swebench:owner/rows:dev")


@pytest.mark.usefixtures("hub")
def test_a_set_that_the_hub_does_not_have() -> None:
    with pytest.raises(UsageError, match="Hugging Face Hub does not give it") as caught:
        load_tasks("swebench:owner/other@main:test")
    assert "\n" not in str(caught.value)
