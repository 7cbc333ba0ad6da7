"""``farm overlap``: what it reads, what it tells, how it ends; on the real lists where they lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from farm.cli import main
from farm.errors import UsageError
from farm.suites.overlap import RepoRef
from farm.suites.overlap_refs import compare, load_refs, patch_paths

DATA = Path(os.environ.get("ROLLOUT_FARM_DATA") or Path(__file__).parents[3] / "shared" / "data")
PATCH = "diff --git a/django/a.py b/django/a.py\n--- a/django/a.py\n+++ b/django/a.py\n@@ -1 +1 @@\n-a\n+b\n"


def needs(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: set ROLLOUT_FARM_DATA to the folder that holds it")
    return path


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"repo": "django/django", "instance_id": "x"}, "django/django"),
        ({"owner": "Django", "repo": "django"}, "Django/django"),
        ({"repo_name": "sympy", "docker_image": "namanjain12/sympy_final:1"}, "sympy"),
        ({"repo": "", "image": "swesmith.x86_64.pallets_1776_flask.bc0"}, "swesmith.x86_64.pallets_1776_flask.bc0"),
        ({"instance_id": "django__django-1"}, "django__django-1"),
    ],
)  # fmt: skip
def test_whatever_names_a_repository_will_do(tmp_path: Path, row: dict[str, str], name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"base_commit": "a" * 40, "patch": PATCH}) + "\n")
    assert load_refs(str(path)) == [RepoRef(name=name, base_commit="a" * 40, paths=("django/a.py",))]


def test_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# training\ndjango/django  # all of it\n\nsympy\n")
    assert [ref.name for ref in load_refs(str(tmp_path / "a.txt"))] == ["django/django", "sympy"]
    (tmp_path / "a.json").write_text(json.dumps({"sets": {"one": ["a/b"], "two": {"c/d": 3}}}))
    assert [ref.name for ref in load_refs(f"{tmp_path / 'a.json'}#sets.one")] == ["a/b"]
    assert [ref.name for ref in load_refs(f"{tmp_path / 'a.json'}#sets.two")] == ["c/d"]
    parquet.write_table(pa.Table.from_pylist([{"repo": "a/b"}]), tmp_path / "a.parquet")
    assert [ref.name for ref in load_refs(f"swebench:{tmp_path / 'a.parquet'}")] == ["a/b"]
    assert len(load_refs("micro:benchmark")) == 100


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "No such file"),
        ("a.txt", "# nothing\n", "holds no repositories"),
        ("a.json", "{", "JSONDecodeError"),
        ("a.json", '"x"', "a list is needed"),
        ("a.json", '["a/b", 3]', "entry 2: a name or an object is needed"),
        ("a.jsonl", '{"title": "x"}\n', "row 1: nothing in it names a repository"),
        ("a.csv", "x", "unknown file type"),
    ],
)
def test_bad_input(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_refs(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UsageError, match="KeyError"):
        load_refs(f"{tmp_path / 'a.json'}#no.such")


def test_same_findings_are_told_once() -> None:
    train = [RepoRef(name="a/b"), RepoRef(name="a/b"), RepoRef(name="me/b"), RepoRef(name="x/y", paths=("lib2/z.py",))]
    found = compare(train, [RepoRef(name="a/b")])
    assert [(f.train, f.reason, f.tasks) for f in found.findings] == [("a/b", "same", 2), ("me/b", "fork", 1)]
    assert (found.train_tasks, found.train_repos, found.bench_repos) == (4, 3, 1)


def test_patch_paths_hold_new_and_deleted_files() -> None:
    patch = "--- /dev/null\n+++ b/new.py\n--- a/old.py\n+++ /dev/null\n--- a/x.py\t2024\n+++ b/x.py\t2024\n"
    assert patch_paths(patch) == ("new.py", "old.py", "x.py")


def test_the_command_ends_with_1_on_an_overlap(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("kennethreitz/requests\npallets/jinja\n")
    (tmp_path / "bench.txt").write_text("psf/requests\npallets/flask\n")
    (tmp_path / "other.txt").write_text("pallets/flask\n")
    arguments = ["overlap", str(tmp_path / "train.txt")]
    found = CliRunner().invoke(main, [*arguments, str(tmp_path / "bench.txt")])
    assert found.exit_code == 1
    assert "kennethreitz/requests" in found.output
    assert "alias" in found.output
    assert "jinja" not in found.output
    clean = CliRunner().invoke(main, [*arguments, str(tmp_path / "other.txt")])
    assert (clean.exit_code, clean.output.count("none in both")) == (0, 1)
    wrong = CliRunner().invoke(main, [*arguments, str(tmp_path / "none.txt")])
    assert wrong.exit_code == 2


def test_real_lists() -> None:
    bench = load_refs(f"swebench:{needs('SWE-bench_Verified_test.parquet')}")
    smith = compare(load_refs(str(needs("swesmith_0.0.9_profiles.json"))), bench)
    assert {f.bench for f in smith.findings} == {"pallets/flask", "sympy/sympy"}
    lists = str(needs("train_bench_repos.json"))
    gym = compare(load_refs(f"{lists}#r2e_gym.bare_repo_names"), bench)
    assert [(f.train, f.bench, f.reason) for f in gym.findings] == [("sympy", "sympy/sympy", "bare name")]
    for key in ("swebench_train_split_repos_35.repos", "swe_gym.repos_seen_in_stored_files", "swebench_dev_repos"):
        assert compare(load_refs(f"{lists}#{key}"), bench).findings == ()
    dev = compare(load_refs(f"swebench:{needs('SWE-bench_dev.parquet')}"), bench)
    assert dev.findings == ()
    lite = compare(load_refs(f"{lists}#swebench_lite_test_repos"), bench)
    assert len({f.bench for f in lite.findings}) == 12


@pytest.mark.parametrize(
    "sibling",
    ["pallets/jinja", "django/channels", "django/daphne", "django-money/django-money", "pytest-dev/iniconfig"],
)
def test_siblings_are_no_overlap_with_the_real_benchmark(sibling: str) -> None:
    bench = load_refs(f"swebench:{needs('SWE-bench_Verified_test.parquet')}")
    assert compare([RepoRef(name=sibling)], bench).findings == ()
