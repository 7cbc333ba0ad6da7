"""``farm make-tasks`` on a small git repository, whole: surveyed, broken, qualified, loaded, and graded again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from farm.cli import main
from farm.errors import UsageError
from farm.suites import made, qualify
from farm.suites.make import Survey, choose_targets, make_from
from farm.tasks import load_tasks

CODE = """\
def clamp(x, low, high):
    if x < low:
        return low
    return high if x > high else x


def total(items):
    found = 0
    for item in items:
        found += item
    return found


def never_tested(x):
    return x + 1


class Box:
    def __init__(self, size):
        self.size = size + 0

    @property
    def empty(self):
        return self.size == 0
"""
TESTS = """\
import os
import pytest
from shapes.core import Box, clamp, total

def test_clamp():
    assert [clamp(x, 0, 3) for x in (-1, 0, 2, 3, 9)] == [0, 0, 2, 3, 3]

def test_total():
    assert total([1, 2]) == 3
    assert total([]) == 0

@pytest.mark.parametrize("size", [0, 1])
def test_box(size):
    assert Box(size).empty == (size == 0)

def test_that_already_fails():
    assert total([1]) == 5

def test_that_fails_every_other_time():
    path = "/tmp/counter"
    count = int(open(path).read()) if os.path.exists(path) else 0
    open(path, "w").write(str(count + 1))
    assert count % 2 == 0
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLOUT_FARM_CACHE", str(tmp_path / "cache"))
    at = tmp_path / "shapes-repo"
    for path, text in {"shapes/__init__.py": "", "shapes/core.py": CODE, "tests/test_core.py": TESTS}.items():
        (at / path).parent.mkdir(parents=True, exist_ok=True)
        (at / path).write_text(text)
    names = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")
    env = {"PATH": os.environ["PATH"], "HOME": "/nowhere"} | {f"GIT_{name}": "a" for name in names}
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=at, env=env, check=True, timeout=60)
    return at


def test_a_repository_becomes_qualified_tasks(repository: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "tasks", list[str]()
    result = make_from([str(repository)], out=out, count=3, runs=2, seed=1, say=said.append)
    assert (result.tasks, result.qualified) == (3, 3), said
    (known,) = made.read_sources(out).values()
    assert known.failing == ("tests/test_core.py::test_that_already_fails",)
    assert known.flaky == ("tests/test_core.py::test_that_fails_every_other_time",)
    tasks = load_tasks(f"made:{out}")
    rows = made.read_rows(out)
    functions = {row["mutation"]["function"] for row in rows}
    assert functions <= {"clamp", "total", "__init__", "empty"}
    assert len({(row["path"], row["mutation"]["function"]) for row in rows}) == 3
    for task, row in zip(tasks, rows, strict=True):
        assert task.instance_id == row["instance_id"]
        assert row["cpu_limit_s"] >= 10
        assert f"\nulimit -t {row['cpu_limit_s']}\n" in task.eval_script
        assert not any("_fails" in test for test in (*task.fail_to_pass, *task.pass_to_pass))
        assert task.repo == "shapes-repo"
    results = qualify.read(out / "qualification.jsonl")
    assert all((r.gold_passed, r.empty_failed, r.runs) == (2, 2, 2) for r in results.values())
    before = (out / "tasks.jsonl").read_bytes()
    again = make_from([str(repository)], out=out, count=3, runs=2, seed=1, say=said.append)
    assert (again.qualified, (out / "tasks.jsonl").read_bytes()) == (3, before)
    assert not any("shapes" in p.name and p.suffix == ".py" for p in out.rglob("*")), "code was stored"


def test_the_code_is_found_again_or_missed_in_one_line(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks"
    make_from([str(repository)], out=out, count=1, runs=1, seed=1, say=lambda _: None)
    for archive in (tmp_path / "cache" / "sdists").iterdir():
        archive.unlink()
    with pytest.raises(UsageError, match=rf"python -m farm\.suites\.made fetch {out}"):
        load_tasks(f"made:{out}")
    assert made.fetch(out) == 1
    assert len(load_tasks(f"made:{out}:shapes-repo")) == 1
    with pytest.raises(UsageError, match="unknown package; allowed are shapes-repo"):
        load_tasks(f"made:{out}:other")


def test_a_source_in_the_benchmark_is_refused(repository: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench.txt"
    bench.write_text("someone/shapes-repo\n")
    arguments = ["make-tasks", str(repository), "--out", str(tmp_path / "t"), "--bench", str(bench)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "shapes-repo is someone/shapes-repo (bare name)" in done.stderr
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("content", ["{", '{"pkg": {}}', "[]"])
def test_folders_that_can_not_be_read(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="no tasks in"):
        load_tasks(f"made:{tmp_path}")
    (tmp_path / "sources.json").write_text(content)
    with pytest.raises(UsageError, match="can't be read"):
        load_tasks(f"made:{tmp_path}")


def test_targets_of_long_files_are_the_quickest_callers_and_a_few_others() -> None:
    stable = {f"t/test_a.py::test_{n}[{p}]": 0.1 * (40 - n) for n in range(40) for p in "xy"}
    calls = {test: frozenset({("m.py", 3)} if int(test.split("_")[2].split("[")[0]) < 20 else ()) for test in stable}
    stable["t/test_b.py::test_short"] = 0.1
    calls["t/test_b.py::test_short"] = frozenset({("m.py", 3)})
    survey = Survey(stable=stable, calls=calls, failing=(), flaky=(), slow=())
    targets = choose_targets(survey, ("m.py", 3))
    assert targets[-1] == "t/test_b.py"
    assert len(targets) == len(set(targets)) == 6 + 2 + 1
    assert all("[" not in target for target in targets)
