"""Repositories made without git are read by the real git as its own."""

import os
import subprocess
from pathlib import Path

import pytest

from farm.errors import FarmError
from farm.suites.repo import make_repo, workspace_files
from farm.types import ImageFiles, InlineFiles, Task

FILES = {
    "a.py": "def f(x):\n    return x + 1\n",
    "a-b.txt": "sorts before a/\n",
    "a/inner/deep.py": "x = 1\n",
    "a.d/z": "",
    "b.sh": "echo hi\n",
    "ünï.txt": "käse\n",
    "big.txt": "line of text\n" * 5000,
}


def git(at: Path, *args: str) -> str:
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(at)}
    done = subprocess.run(["git", *args], cwd=at, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(at: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target = at / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def make(at: Path, files: dict[str, str]) -> str:
    commit, made = make_repo(files)
    write(at, made)
    return commit


def task(**changes: object) -> Task:
    fields: dict[str, object] = {
        "instance_id": "t-1",
        "dataset": "d",
        "repo": "r",
        "base_commit": make_repo(FILES)[0],
        "problem_statement": "",
        "patch": "",
        "test_patch": "",
        "fail_to_pass": (),
        "pass_to_pass": (),
        "eval_script": "",
        "log_parser": "micro",
        "workspace": InlineFiles(files=FILES),
    }
    return Task(**(fields | changes))  # type: ignore[arg-type]


def test_real_git_accepts_it(tmp_path: Path) -> None:
    commit = make(tmp_path, FILES)
    assert git(tmp_path, "fsck", "--strict", "--full").strip() == ""
    assert git(tmp_path, "rev-parse", "HEAD").strip() == commit
    assert git(tmp_path, "symbolic-ref", "HEAD").strip() == "refs/heads/main"
    assert git(tmp_path, "status", "--porcelain") == ""
    assert git(tmp_path, "diff") == ""
    listed = git(tmp_path, "-c", "core.quotepath=false", "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    assert sorted(listed) == sorted(FILES)


def test_same_commit_as_git_itself_would_make(tmp_path: Path) -> None:
    commit = make(tmp_path, FILES)
    git(tmp_path, "update-ref", "-d", "refs/heads/main")
    (tmp_path / ".git/index").unlink()
    git(tmp_path, "add", "-A")
    stamp = "1700000000 +0000"
    who = ["-c", "user.name=Rollout Farm", "-c", "user.email=farm@localhost"]
    tree = git(tmp_path, "write-tree").strip()
    env = {**os.environ, "GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp}
    made = subprocess.run(
        ["git", *who, "commit-tree", tree, "-m", "base"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.stdout.strip() == commit


def test_edit_is_seen_and_checkout_restores_it(tmp_path: Path) -> None:
    make(tmp_path, FILES)
    (tmp_path / "a.py").write_text("def f(x):\n    return x - 1\n")  # same length: only the content differs
    (tmp_path / "a/inner/deep.py").unlink()
    (tmp_path / "new.py").write_text("y = 2\n")
    assert "-    return x + 1\n+    return x - 1\n" in git(tmp_path, "diff")
    git(tmp_path, "add", "-A")
    staged = git(tmp_path, "diff", "--cached", "--name-status").split()
    assert staged == ["M", "a.py", "D", "a/inner/deep.py", "A", "new.py"]
    git(tmp_path, "reset", "-q")
    git(tmp_path, "checkout", ".")
    assert (tmp_path / "a.py").read_text() == FILES["a.py"]
    assert (tmp_path / "a/inner/deep.py").read_text() == "x = 1\n"


def test_a_diff_from_one_copy_applies_to_another(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for at in (one, other):
        at.mkdir()
        make(at, FILES)
    (one / "a.py").write_text("def f(x):\n    return x\n")
    git(one, "add", "-A")
    (other / "p.diff").write_text(git(one, "diff", "--cached", "HEAD"))
    git(other, "apply", "p.diff")
    assert (other / "a.py").read_text() == "def f(x):\n    return x\n"


def test_left_overs_of_a_run_are_not_part_of_the_change(tmp_path: Path) -> None:
    make(tmp_path, FILES)
    write(tmp_path, {"a/__pycache__/deep.cpython-311.pyc": b"\0", ".pytest_cache/x": b"", "m.pyc": b"\0"})
    git(tmp_path, "add", "-A")
    assert git(tmp_path, "diff", "--cached") == ""


def test_agent_can_commit(tmp_path: Path) -> None:
    make(tmp_path, FILES)
    (tmp_path / "a.py").write_text("pass\n")
    git(tmp_path, "commit", "-qam", "mine")
    assert git(tmp_path, "rev-list", "--count", "HEAD").strip() == "2"


def test_hundreds_of_files_and_deep_folders(tmp_path: Path) -> None:
    make(tmp_path, {f"p{n % 7}/q{n % 11}/f{n}.py": f"x = {n}\n" for n in range(400)})
    assert git(tmp_path, "fsck", "--strict", "--full").strip() == ""
    assert git(tmp_path, "status", "--porcelain") == ""


def test_empty_repository(tmp_path: Path) -> None:
    make(tmp_path, {})
    assert git(tmp_path, "status", "--porcelain") == ""


def test_deterministic_whatever_the_order() -> None:
    assert make_repo(FILES) == make_repo(FILES)
    assert make_repo(dict(reversed(FILES.items())))[0] == make_repo(FILES)[0]


@pytest.mark.parametrize("path", ["/etc/passwd", "a//b", "../x", "a/../b", ".git/config", "x/.GIT/hooks", "", "a/"])
def test_refuses_paths_that_leave_the_tree(path: str) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        make_repo({path: ""})


def test_refuses_a_file_where_a_folder_is() -> None:
    with pytest.raises(ValueError, match="both a file and a folder"):
        make_repo({"a": "", "a/b": ""})


def test_workspace_is_absolute_and_checked() -> None:
    made = workspace_files(task())
    assert made["/testbed/a.py"] == FILES["a.py"].encode()
    assert all(path.startswith("/testbed/") for path in made)
    assert workspace_files(task(workspace=ImageFiles())) == {}
    with pytest.raises(FarmError, match="the task says 000") as caught:
        workspace_files(task(base_commit="0" * 40))
    assert not caught.value.retryable
