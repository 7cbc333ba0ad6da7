"""Code to make tasks from: what is read of a git folder or a distribution, and what is hidden from the agent."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from farm.errors import FarmError, UsageError
from farm.suites import sdist
from farm.suites.code_source import open_source
from farm.suites.package_index import PackageIndexes
from farm.suites.tracing import read_trace

FILES = {
    "src/pkg/core.py": "def f():\n    return 1\n",
    "src/pkg/tests/test_inner.py": "def test_i(): ...\n",
    "src/pkg/broken.py": "def (\n",
    "tests/conftest.py": "",
    "tests/test_core.py": "def test_f(): ...\n",
    "tests/data/x.json": "{}",
    "core_test.py": "def test_top(): ...\n",
    "docs/test_docs.py": "def test_d(): ...\n",
    "setup.py": "",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_FARM_CACHE", str(tmp_path / "cache"))


def git(at: Path, *arguments: str) -> str:
    names = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nowhere"} | {
        f"GIT_{n}": "a" for n in names
    }
    done = subprocess.run(["git", *arguments], cwd=at, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def repository(at: Path, files: dict[str, str]) -> Path:
    at.mkdir()
    git(at, "init", "-q")
    for path, text in files.items():
        (at / path).parent.mkdir(parents=True, exist_ok=True)
        (at / path).write_text(text)
    (at / "link").symlink_to("/etc/passwd")
    git(at, "add", "-A")
    git(at, "commit", "-q", "-m", "first")
    return at


def test_a_commit_of_a_git_folder(tmp_path: Path) -> None:
    at = repository(tmp_path / "proj", FILES)
    git(at, "remote", "add", "origin", "git@github.com:Owner/Proj.git")
    first = git(at, "rev-parse", "HEAD")
    (at / "later.py").write_text("")
    git(at, "add", "-A")
    git(at, "commit", "-q", "-m", "second")
    code = open_source(f"{at}@{first[:10]}")
    assert code.files.keys() == FILES.keys()
    assert code.source.repo == "owner/proj"
    assert (code.source.package, code.source.version) == ("proj", first[:12])
    assert code.source.remove == ("core_test.py", "src/pkg/tests/", "tests/")
    assert code.tests == ("core_test.py", "src/pkg/tests/test_inner.py", "tests/test_core.py")
    assert code.modules == ("src/pkg/core.py",)
    assert code.source.python_path == "/testbed /testbed/src"
    assert code.origin == f"{at}@{first}"
    assert open_source(code.origin).source == code.source, "the same commit gives the same archive"
    assert "later.py" in open_source(str(at)).files


def test_a_pinned_distribution(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    metadata = (
        "Name: pkg\nHome-page: https://pkg.example\nProject-URL: Source, https://github.com/Owner/Pkg/tree/main\n\nx"
    )
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in {"PKG-INFO": metadata, "pkg.py": "", "test_pkg.py": ""}.items():
            member = tarfile.TarInfo(f"pkg-1.0/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    places = tmp_path / "files"
    places.mkdir()
    (places / "pkg-1.0.tar.gz").write_bytes(buffer.getvalue())
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    indexes = PackageIndexes(indexes=(), places=(str(places),))
    code = open_source(f"pkg==1.0#sha256={sha256}", indexes)
    assert (code.source.repo, code.source.remove, code.modules) == ("owner/pkg", ("test_pkg.py",), ("pkg.py",))
    assert sdist.is_cached(sha256)
    with pytest.raises(FarmError, match="no package index has"):
        open_source(f"pkg==1.0#sha256={'0' * 64}", indexes)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pkg==1.0", "must be pinned by its hash"),
        ("pkg==1.0#sha256=abc", "must be pinned by its hash"),
        ("nowhere", "no such folder"),
        ("{plain}", "git can't read it"),
        ("{proj}@nothing", "git can't read it"),
        ("{bare}", "holds no test files"),
    ],
)
def test_bad_sources(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "plain").mkdir()
    proj = repository(tmp_path / "proj", FILES)
    bare = repository(tmp_path / "bare", {"a.py": ""})
    with pytest.raises(UsageError, match=message) as caught:
        open_source(spec.format(plain=tmp_path / "plain", proj=proj, bare=bare))
    assert "\n" not in str(caught.value)


def test_traces_are_read_strictly() -> None:
    trace = read_trace(b'{"functions": [["a.py", 3], ["b.py", 7]], "tests": {"t.py::x": [0.5, [1]]}}')
    assert trace.calls == {"t.py::x": frozenset({("b.py", 7)})}
    assert trace.cpu_s == {"t.py::x": 0.5}
    for spoilt in (
        b"",
        b"[]",
        b'{"functions": [], "tests": {"t": [0.1, [4]]}}',
        b'{"functions": [["a"]], "tests": {}}',
    ):
        with pytest.raises(FarmError, match="can't be read"):
            read_trace(spoilt)
