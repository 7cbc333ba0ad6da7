"""Tasks from source distributions, on one made here: nothing is fetched."""

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.suites import pypi, sdist
from farm.suites.operators import mutations
from farm.suites.patch import unified
from farm.suites.pypi import Source, compact, spread, task_of
from farm.suites.repo import make_repo, workspace_files
from farm.types import Task

CODE = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n\n\ndef h(s):\n    return s + '\u2028\x0c'\n"
FILES = {
    "pkg/core.py": CODE.encode(),
    "pkg/__init__.py": b"",
    "PKG-INFO": b"Name: pkg\n",
    "tests/__init__.py": b"",
    "tests/conftest.py": b"# no newline at the end",
    "tests/test_core.py": b"from tests.test_util import check\n\n\ndef test_f(): ...\n\n\ndef test_g(): ...\n",
    "tests/test_other.py": b"def test_o(): pass\n",
    "tests/test_util.py": b"def check(): ...\n",  # no test, but what a test imports
    "tests/test_unused.py": b"ROWS = 1\n",
    "tests/data.bin": b"\0\1",
}


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for name, data in files.items():
            member = tarfile.TarInfo(f"pkg-1.0/{name}")
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("pkg-1.0/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    return buffer.getvalue()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("ROLLOUT_FARM_CACHE", str(tmp_path / "cache"))
    data = archive(FILES)
    sha256 = hashlib.sha256(data).hexdigest()
    sdist.cache_dir().mkdir(parents=True)
    sdist.archive_path(sha256).write_bytes(data)
    return Source(
        package="pkg",
        version="1.0",
        sha256=sha256,
        repo="o/pkg",
        remove=("tests/",),
        tasks=1,
        modules={"pkg/core.py": ()},
    )


def make_task(source: Source) -> Task:
    mutation = next(m for m in mutations(CODE) if m.function == "g" and m.kind == "arith")
    commit, _ = make_repo(sdist.work_tree(pypi.workspace(source, "pkg/core.py", mutation)))
    facts = {name: getattr(mutation, name) for name in ("line", "column", "kind", "old", "new", "function")}
    row = {
        "instance_id": "pkg__core-1",
        "package": "pkg",
        "path": "pkg/core.py",
        "mutation": facts,
        "base_commit": commit,
        "targets": ["tests/test_core.py"],
        "fail_to_pass": {"tests/test_core.py": ["test_g"]},
        "pass_to_pass": {"tests/test_core.py": ["test_f"]},
        "problem_statement": "g is wrong",
    }
    return task_of(source, row, "pypi@0")


def git_apply(at: Path, diff: str) -> None:
    done = subprocess.run(["git", "apply", "-"], cwd=at, input=diff.encode(), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_agent_gets_the_bug_and_not_the_tests(source: Source) -> None:
    files = workspace_files(make_task(source))
    paths = {path.removeprefix("/testbed/") for path in files if "/.git/" not in path}
    assert paths == {"pkg/core.py", "pkg/__init__.py", "PKG-INFO"}
    assert files["/testbed/pkg/core.py"].decode() == CODE.replace(
        "def g(x):\n    return x + 1", "def g(x):\n    return x - 1"
    )


def test_patches_apply_and_restore_the_release(source: Source, tmp_path: Path) -> None:
    task, tree = make_task(source), tmp_path / "tree"
    for path, data in workspace_files(task).items():
        target = tree / Path(path).relative_to("/testbed")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    git_apply(tree, task.test_patch)
    git_apply(tree, task.patch)
    for name, data in FILES.items():
        if name not in ("tests/test_other.py", "tests/test_unused.py", "tests/data.bin"):
            assert (tree / name).read_bytes() == data
    assert not (tree / "tests/test_other.py").exists()
    assert not (tree / "tests/test_unused.py").exists()


def test_grading_facts(source: Source) -> None:
    task = make_task(source)
    assert task.fail_to_pass == ("tests/test_core.py::test_g",)
    assert task.pass_to_pass == ("tests/test_core.py::test_f",)
    assert (task.image, task.log_parser) == ("host-pytest", "pytest")
    assert task.eval_script.splitlines()[-3:] == ["code=$?", "echo '>>>>> End Test Output'", "exit $code"]
    assert task.strata == {"package": "pkg", "kind": "arith"}


def test_source_that_was_not_fetched(source: Source) -> None:
    task = make_task(source)
    assert sdist.files(source.sha256)
    sdist.files.cache_clear()
    sdist.archive_path(source.sha256).write_bytes(b"other")
    with pytest.raises(UsageError, match="does not have the digest"):
        sdist.files(source.sha256)
    sdist.archive_path(source.sha256).unlink()
    with pytest.raises(UsageError, match=r"python -m farm\.suites\.pypi fetch"):
        sdist.files(source.sha256)
    assert task.base_commit


def test_cache_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_FARM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert sdist.cache_dir() == Path("/x/rollout-farm/sdists")
    monkeypatch.setenv("ROLLOUT_FARM_CACHE", "/y")
    assert sdist.cache_dir() == Path("/y/sdists")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\nb\nc\n", "a\nB\nc\n"),
        ("a\nb", "a\nc"),
        ("a\r\nb\x0c\u2028c\n", "a\r\nB\x0c\u2028c\n"),
        ("".join(f"{n}\n" for n in range(50)), "".join(f"{n}\n" for n in range(50) if n not in (3, 40))),
        ("", "x\n"),
        ("x\n", ""),
        (None, "x"),
        (None, ""),
    ],
)
def test_diffs_are_what_git_applies(tmp_path: Path, old: str | None, new: str) -> None:
    path = tmp_path / "a.txt"
    if old is not None:
        path.write_bytes(old.encode())
    git_apply(tmp_path, unified("a.txt", old, new))
    assert path.read_bytes() == new.encode()


def test_no_change_no_diff() -> None:
    assert unified("a", "x\n", "x\n") == ""


def test_compact_ids_spread_to_the_same() -> None:
    ids = ("t/a.py::x", "t/a.py::K::y", "t/a.py::K::z[1-2]", "t/b.py::x")
    assert set(spread(compact(ids))) == set(ids)


def test_unknown_package_lists_the_choices() -> None:
    with pytest.raises(UsageError, match="allowed are boltons, idna, more-itertools"):
        pypi.load("nope")


@pytest.mark.parametrize("content", [None, "{", '{"package": "boltons"}\n', '{"package": "nope"}\n'])
def test_unreadable_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    for name in ("requirements.txt", "sources.json"):
        (tmp_path / name).write_text((pypi.DATASET / name).read_text())
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    monkeypatch.setattr(pypi, "DATASET", tmp_path)
    with pytest.raises(UsageError, match=r"tasks\.jsonl can't be read"):
        pypi.load()


def test_pins_and_facts_agree() -> None:
    found = pypi.sources()
    assert len(found) >= 3
    for source in found.values():
        assert len(source.sha256) == 64
        assert source.modules
        assert all(test.startswith(source.remove) for tests in source.modules.values() for test in tests)
