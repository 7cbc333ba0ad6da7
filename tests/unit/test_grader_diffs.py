"""Git diffs as data, checked against git itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farm.grader.diffs import apply_plain, read, touched


def git(folder: Path, *arguments: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
        cwd=folder,
        input=text.encode() if text is not None else None,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode()


def diff_of(folder: Path, before: dict[str, bytes], after: dict[str, bytes]) -> str:
    """What git makes of the change."""
    git(folder, "init", "-q")
    for files in (before, after):
        for path in folder.iterdir():
            if path.name != ".git":
                path.unlink()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        git(folder, "add", "-A")
        if files is before:
            git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    return git(folder, "diff", "--cached", "--binary", "--no-renames", "--full-index")


LINE = st.sampled_from(
    ["a", "b", "", " c", "- d", "+++ b/x", "--- a/x", "@@ -1 +1 @@", "diff --git a/x b/x", "\\", "é"]
)
TEXT = st.builds(
    lambda lines, end: ("\n".join(lines) + end).encode(), st.lists(LINE, max_size=12), st.sampled_from(["", "\n"])
)
FILES = st.dictionaries(st.sampled_from(["x", "y z", 'q"uote', "é", "b b"]), TEXT, max_size=3)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=FILES, after=FILES)
def test_applying_gives_what_git_started_from(
    tmp_path_factory: pytest.TempPathFactory, before: dict[str, bytes], after: dict[str, bytes]
) -> None:
    diff = diff_of(tmp_path_factory.mktemp("r"), before, after)
    parts = read(diff)
    assert "".join(part.text for part in parts) == diff
    assert {path for part in parts for path in part.paths} == {
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    }
    changed = apply_plain(parts, before)
    assert changed is not None
    assert {path: data for path, data in {**before, **changed}.items() if data is not None} == after


def section(path: str, *lines: str, mode: str = "") -> str:
    head = [f"diff --git a/{path} b/{path}", *([mode] if mode else []), f"--- a/{path}", f"+++ b/{path}"]
    return "\n".join([*head, *lines]) + "\n"


PLAIN = section("f", "@@ -1,2 +1,2 @@", " a", "-b", "+c")


def test_plain_change() -> None:
    assert apply_plain(read(PLAIN), {"f": b"a\nb\n", "g": b""}) == {"f": b"a\nc\n"}


@pytest.mark.parametrize(
    "files", [{"f": b"a\nx\n"}, {}, {"f": b"a"}, {"f": b"z\na\nb\n"}, {"f": b"\xff\na\nb\n"}], ids=repr
)
def test_a_hunk_that_does_not_fit_is_left_to_git(files: dict[str, bytes]) -> None:
    assert apply_plain(read(PLAIN), files) is None


@pytest.mark.parametrize("path", ["../f", "/f", "a/../f", ".git/config", "a/.GIT/x", "a//f", "./f"])
def test_paths_outside_the_work_tree_are_never_applied_here(path: str) -> None:
    new = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    assert apply_plain(read(new), {}) is None


@pytest.mark.parametrize("path", ["f/g", "d"])
def test_a_file_where_a_folder_is_is_left_to_git(path: str) -> None:
    new = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    assert apply_plain(read(new), {"f": b"", "d/e": b""}) is None


@pytest.mark.parametrize("mode", ["new file mode 120000", "new file mode 160000", "old mode 120000"])
def test_links_are_seen(mode: str) -> None:
    text = f"diff --git a/f b/f\n{mode}\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+/etc\n\\ No newline at end of file\n"
    (part,) = read(text)
    assert part.link
    assert apply_plain([part], {}) is None


def test_an_existing_link_that_changes_is_seen() -> None:
    assert read("diff --git a/f b/f\nindex 111..222 120000\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n")[0].link


def test_binary_sections(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, {"x": b"\0\1", "y": b"a\n"}, {"x": b"\0\2" * 50, "y": b"b\n"})
    parts = read(diff)
    assert [part.binary for part in parts] == [True, False]
    assert apply_plain(parts, {"x": b"\0\1", "y": b"a\n"}) is None


def test_renames_count_both_paths() -> None:
    text = "diff --git a/x b/y z\nsimilarity index 100%\nrename from x\nrename to y z\n"
    assert touched(text) == {"x", "y z"}
    assert apply_plain(read(text), {"x": b""}) is None


@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n",
        PLAIN + "--- a/conftest.py\n+++ b/conftest.py\n@@ -1 +1 @@\n-a\n+b\n",
        PLAIN + "junk\n",
        section("f", "@@ -1,2 +1,1 @@", " a", "-b", "-c"),
        section("f", "@@ -1,2 +1,2 @@", " a"),
        "diff --git a/f b/f\n--- a/f\n+++ b/conftest.py\n@@ -1 +1 @@\n-a\n+b\n",
        "diff --git a/f b/f\n@@ -1 +1 @@\n-a\n+b\n",
        "diff --git a/f b/f\nBinary files a/f and b/f differ\n",
        "diff --git nothing\n",
        "diff --git a/f b/f\nindex 1..2\nGIT binary patch\nliteral 3\nKcmZ\n--- a/conftest.py\n",
    ],
    ids=repr,
)
def test_what_git_would_not_write_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


@settings(max_examples=200)
@given(st.text(alphabet=st.sampled_from('diff --git a/f b\n+-@ 1,"\\'), max_size=200))
def test_reading_anything_gives_sections_or_value_error(text: str) -> None:
    try:
        parts = read("diff --git a/f b/f\n" + text)
    except ValueError:
        return
    assert parts
