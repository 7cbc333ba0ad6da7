"""A real repository whose later commits fix the issue, in a real sandbox: after the cleaning nothing leads to them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from farm.agent.collect import collect_patch
from farm.errors import FarmError
from farm.history import Past, strip_future
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox import make_provider
from farm.sandbox.fake import FakeProvider, result
from farm.types import ImageFiles, Task

SECRET = "the answer is 42"
T = TypeVar("T")
_ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nowhere",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_ALLOW_PROTOCOL": "file",
}


def git(at: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *arguments],
        cwd=at,
        env=_ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(at: Path, name: str, text: str) -> str:
    (at / name).write_text(text)
    git(at, "add", "-A")
    git(at, "commit", "-q", "-m", f"{name}: {text[:20]}")
    return git(at, "rev-parse", "HEAD")


def make_repository(at: Path) -> tuple[Path, str, str]:
    """An upstream whose future is fetched in every way there is; the work tree stands at the past. Gives its folder,
    the base commit, and the image's own commit on top of it."""
    upstream = at / "upstream"
    upstream.mkdir()
    git(upstream, "init", "-q", "-b", "main")
    commit(upstream, "code.py", "x = 1\n")
    base = commit(upstream, "code.py", "x = 2\n")
    commit(upstream, "code.py", f"x = 42  # {SECRET}\n")
    git(upstream, "tag", "-a", "v2", "-m", f"release: {SECRET}")
    git(upstream, "checkout", "-q", "-b", "fix")
    commit(upstream, "fix.py", f"# {SECRET} on a branch\n")
    tree = at / "testbed"
    git(at, "clone", "-q", str(upstream), str(tree))
    git(tree, "fetch", "-q", "origin", "fix")
    git(tree, "branch", "other", "origin/fix")
    git(tree, "reset", "-q", "--hard", "origin/fix")
    dangling = commit(tree, "late.py", f"# {SECRET} dangling\n")
    git(tree, "notes", "add", "-m", SECRET, dangling)
    git(tree, "reset", "-q", "--hard", base)
    (tree / "code.py").write_text(f"# {SECRET} in a stash\n")
    git(tree, "stash")
    blob = subprocess.run(
        ["git", "hash-object", "-w", "--stdin"],
        cwd=tree,
        env=_ENV,
        input=f"# {SECRET} blob\n".encode(),
        capture_output=True,
    )
    assert blob.returncode == 0
    git(tree, "gc", "-q")  # the future is in packs now; the dangling commit is loose or kept by its reflog
    own = commit(tree, "setup.cfg", "[image]\nset = up\n")
    return tree, base, own


def task(base: str) -> Task:
    return Task(
        instance_id="o__r-1",
        dataset="d",
        repo="o/r",
        base_commit=base,
        problem_statement="",
        patch="",
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        eval_script="",
        log_parser="",
        workspace=ImageFiles(),
    )


def in_sandbox(tree: Path, work: Callable[[Sandbox], Awaitable[T]]) -> T:
    """``work`` on a copy of ``tree`` at /testbed."""

    async def main() -> T:
        spec = SandboxSpec(
            owner="test-history", deadline_at_s=time.time() + 120, output_bytes=1 << 20, pids=128, disk_bytes=128 << 20
        )
        files = {f"/testbed/{f.relative_to(tree)}": f.read_bytes() for f in tree.rglob("*") if f.is_file()}
        async with make_provider("bubblewrap").open(spec) as sandbox:
            await sandbox.write_files(files)
            await sandbox.exec("mkdir -p .git/refs/tags .git/refs/heads .git/objects/info", timeout_s=20)
            return await work(sandbox)

    return asyncio.run(main())


LOOK = """\
git log --all --reflog --format=%H%n%B; git stash list; git notes list; git tag; git branch -a; git remote -v
git fsck --lost-found --no-reflogs 2>&1 | grep -v notice
for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git cat-file -p $o; done
cat .git/packed-refs .git/FETCH_HEAD .git/ORIG_HEAD .git/logs/HEAD
"""


def test_the_future_is_there_before_and_gone_after(tmp_path: Path) -> None:
    tree, base, own = make_repository(tmp_path)

    async def work(sandbox: Sandbox) -> tuple[str, Past, str, str]:
        before = (await sandbox.exec(LOOK, timeout_s=60)).output
        past = await strip_future(task(base), sandbox)
        after = (await sandbox.exec(LOOK, timeout_s=60)).output
        log = (await sandbox.exec("git status --porcelain; git log --format=%H; cat code.py", timeout_s=60)).output
        return before, past, after, log

    before, past, after, log = in_sandbox(tree, work)
    assert before.count(SECRET) > 4
    assert SECRET not in after
    assert (past.head, past.repositories) == (own, 1)
    lines = log.split()
    assert lines[:2] == [own, base]
    assert len(lines) == 3 + 3, "the past has three commits, and the work tree is as it was"


def test_the_agents_change_is_what_differs_from_the_image(tmp_path: Path) -> None:
    tree, base, own = make_repository(tmp_path)

    async def work(sandbox: Sandbox) -> tuple[str, str]:
        past = await strip_future(task(base), sandbox)
        await sandbox.exec(
            "echo 'x = 3' > code.py && git -c user.name=a -c user.email=a commit -qam mine", timeout_s=60
        )
        return past.head, await collect_patch(task(base), sandbox, base=past.head)

    head, patch = in_sandbox(tree, work)
    assert head == own
    assert "+x = 3" in patch
    assert "setup.cfg" not in patch


def test_repositories_inside_and_submodules_are_cleaned_too(tmp_path: Path) -> None:
    tree, base, _ = make_repository(tmp_path)
    (tmp_path / "a").mkdir()
    inner, _, _ = make_repository(tmp_path / "a")
    git(tree, "submodule", "add", "-q", str(inner), "helpers")
    git(tree, "commit", "-q", "--amend", "--no-edit")

    async def work(sandbox: Sandbox) -> tuple[Past, str]:
        past = await strip_future(task(base), sandbox)
        look = f"cd helpers && {LOOK.replace('cat .git/packed-refs .git/FETCH_HEAD .git/ORIG_HEAD .git/logs/HEAD', '')}"
        return past, (await sandbox.exec(look, timeout_s=60)).output

    past, seen = in_sandbox(tree, work)
    assert past.repositories == 2
    assert SECRET not in seen


def test_borrowed_objects_are_copied_and_the_lender_forgotten(tmp_path: Path) -> None:
    tree, base, own = make_repository(tmp_path)

    async def work(sandbox: Sandbox) -> tuple[Past, str]:
        move = (
            "mkdir -p /tmp/lender && cp -r .git/objects /tmp/lender/ && rm -rf .git/objects "
            "&& mkdir -p .git/objects/info && mkdir .git/objects/pack "
            "&& echo /tmp/lender/objects > .git/objects/info/alternates"
        )
        assert (await sandbox.exec(move, timeout_s=60)).exit_code == 0
        past = await strip_future(task(base), sandbox)
        await sandbox.exec("rm -rf /tmp/lender", timeout_s=60)
        return past, (await sandbox.exec(f"git fsck 2>&1; {LOOK}", timeout_s=60)).output

    past, seen = in_sandbox(tree, work)
    assert past.head == own
    assert SECRET not in seen
    assert "missing" not in seen


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("rm -rf .git", "there is no git repository in /testbed"),
        ("git reset -q --hard HEAD~2", "does not descend from the base commit"),
        ("git reset -q --hard other", "more than 1 commit past the base commit"),
    ],
)
def test_an_image_of_another_commit_is_refused(tmp_path: Path, spoil: str, message: str) -> None:
    tree, base, _ = make_repository(tmp_path)

    async def work(sandbox: Sandbox) -> None:
        await sandbox.exec(spoil, timeout_s=60)
        await strip_future(task(base), sandbox)

    with pytest.raises(FarmError, match=message) as caught:
        in_sandbox(tree, work)
    assert (caught.value.kind, caught.value.retryable) == ("history", False)


def test_only_what_the_second_look_finds_counts() -> None:
    clean = "head abc\npast 1\nothers 0\nremotes 0\nreflogs 0\nheads 0\nborrowed 0\nworktrees 0\nstrays {}\ndone\n"

    def answers(strays: int) -> FakeProvider:
        return FakeProvider(lambda command, _: result(clean.format(strays) if "echo done" in command else ""))

    async def strip(provider: FakeProvider) -> Past:
        async with provider.open(SandboxSpec(owner="t", deadline_at_s=0.0)) as sandbox:
            return await strip_future(task("b"), sandbox)

    assert asyncio.run(strip(answers(0))).head == "abc"
    with pytest.raises(FarmError, match="still shows more than the past: strays 3"):
        asyncio.run(strip(answers(3)))
    with pytest.raises(FarmError, match="still shows more"):
        asyncio.run(strip(FakeProvider()))
