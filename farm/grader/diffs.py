"""Git diffs as data: which files they touch, and applying the plain ones without git.

The reader is strict. A diff consists of ``diff --git`` sections whose hunks have the lengths they announce and are
followed by nothing: a section can't hide a second file from whoever filters by path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_HEAD_LINE = re.compile(
    r"(old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from|rename to|similarity index|"
    r"dissimilarity index|index|---|\+\+\+) (.*)"
)
_BINARY_LINE = re.compile(r"|(?:literal|delta) \d+|[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+")
_LINK_MODES = frozenset({"120000", "160000"})  # symbolic link, submodule
_NO_PARTS = frozenset({"", ".", "..", ".git"})  # of a path: git refuses them
_ABSENT = "/dev/null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """Replace the lines ``old`` at line ``start`` (from 1; 0 before the first) by ``new``. Lines keep their ends."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDiff:
    """One section. ``old`` and ``new`` are the paths before and after; None where the file does not exist."""

    text: str
    old: str | None
    new: str | None
    modes: frozenset[str]
    hunks: tuple[Hunk, ...]
    binary: bool

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(path for path in (self.old, self.new) if path is not None)

    @property
    def link(self) -> bool:
        """A symbolic link or a submodule."""
        return bool(self.modes & _LINK_MODES)

    @property
    def plain(self) -> bool:
        """Text, at one path inside the repository, without a file mode that matters."""
        return (
            not self.binary
            and len(self.paths) == 1
            and self.modes <= {"100644"}
            and not any(part.lower() in _NO_PARTS for part in next(iter(self.paths)).split("/"))
        )


def read(diff: str) -> list[FileDiff]:
    """The sections of ``diff``. Raises ValueError when it is not a diff as git writes it."""
    lines = diff.split("\n")
    if lines[-1] == "":
        lines.pop()
    sections = []
    place = 0
    while place < len(lines):
        start = place
        if not lines[start].startswith("diff --git "):
            raise ValueError(f"line {start + 1} begins no section: {lines[start][:80]!r}")
        place = _end_of_head(lines, start + 1)
        head = lines[start:place]
        binary = place < len(lines) and lines[place] == "GIT binary patch"
        hunks = []
        if binary:
            place = _end_of_binary(lines, place + 1)
        while place < len(lines) and not lines[place].startswith("diff --git "):
            hunk, place = _hunk(lines, place)
            hunks.append(hunk)
        text = "".join(f"{line}\n" for line in lines[start:place])
        sections.append(_section(text, head, tuple(hunks), binary))
    return sections


def touched(diff: str) -> frozenset[str]:
    """All paths that ``diff`` reads or writes. Raises ValueError."""
    return frozenset().union(*(part.paths for part in read(diff)))


def apply_plain(parts: list[FileDiff], files: Mapping[str, bytes]) -> dict[str, bytes | None] | None:
    """What ``parts`` make of ``files`` (path -> bytes): the changed files, None for a deleted one.

    Gives None where git is needed: a part is not plain, text is not UTF-8, a hunk does not fit exactly where it says,
    or a file would be where a folder is.
    """
    changed: dict[str, bytes | None] = {}
    folders = {path[: match.start()] for path in files for match in re.finditer("/", path)}
    for part in parts:
        path = next(iter(part.paths))
        data = files.get(path)
        if not part.plain or path in changed or (data is None) != (part.old is None):
            return None
        if data is None and (path in folders or any(path[: m.start()] in files for m in re.finditer("/", path))):
            return None
        try:
            text = _patched((data or b"").decode(), part.hunks)
        except ValueError:
            return None
        if part.new is None and text:
            return None
        changed[path] = None if part.new is None else text.encode()
    return changed


def _patched(text: str, hunks: tuple[Hunk, ...]) -> str:
    """Raises ValueError when a hunk does not fit."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    made: list[str] = []
    done = 0
    for hunk in hunks:
        start = hunk.start - 1 if hunk.old else hunk.start
        if start < done or tuple(lines[start : start + len(hunk.old)]) != hunk.old:
            raise ValueError(f"the hunk at line {hunk.start} does not fit")
        made += lines[done:start]
        made += hunk.new
        done = start + len(hunk.old)
    return "".join(made + lines[done:])


def _end_of_head(lines: list[str], place: int) -> int:
    while place < len(lines) and _HEAD_LINE.fullmatch(lines[place]):
        place += 1
        if lines[place - 1].startswith("+++ "):  # the last line of a head
            break
    return place


def _end_of_binary(lines: list[str], place: int) -> int:
    while place < len(lines) and not lines[place].startswith("diff --git "):
        if not _BINARY_LINE.fullmatch(lines[place]):
            raise ValueError(f"line {place + 1} is not of a binary patch: {lines[place][:80]!r}")
        place += 1
    return place


def _hunk(lines: list[str], place: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[place])
    if not match:
        raise ValueError(f"line {place + 1} is not a hunk: {lines[place][:80]!r}")
    old_left, new_left = (int(match[i]) if match[i] is not None else 1 for i in (2, 4))
    old: list[str] = []
    new: list[str] = []
    place += 1
    while old_left > 0 or new_left > 0 or (place < len(lines) and lines[place].startswith("\\")):
        if place == len(lines):
            raise ValueError("the last hunk is cut off")
        mark, body = lines[place][:1] or " ", lines[place][1:]  # some tools drop the space of an empty line
        if mark == "\\":  # the line before has no end
            for side in (old, new):
                if side and lines[place - 1][:1] in (" ", "-" if side is old else "+"):
                    side[-1] = side[-1].removesuffix("\n")
        elif mark in (" ", "-", "+"):
            if mark != "+":
                old.append(f"{body}\n")
                old_left -= 1
            if mark != "-":
                new.append(f"{body}\n")
                new_left -= 1
        else:
            raise ValueError(f"line {place + 1} is not of a hunk: {lines[place][:80]!r}")
        place += 1
    if old_left or new_left:
        raise ValueError(f"the hunk before line {place + 1} has other lengths than it says")
    return Hunk(start=int(match[1]), old=tuple(old), new=tuple(new)), place


def _section(text: str, head: list[str], hunks: tuple[Hunk, ...], binary: bool) -> FileDiff:
    fields = {match[1]: match[2] for match in map(_HEAD_LINE.fullmatch, head[1:]) if match}
    if hunks and "+++" not in fields:
        raise ValueError(f"hunks without a file: {head[0][:80]!r}")
    old, new = _header_paths(head[0])
    old = _unquote(fields.get("rename from") or fields.get("copy from") or "") or old
    new = _unquote(fields.get("rename to") or fields.get("copy to") or "") or new
    named = {name: _unquote(fields[name].removesuffix("\t")) for name in ("---", "+++") if name in fields}
    if named.get("---", _ABSENT) not in (_ABSENT, f"a/{old}") or named.get("+++", _ABSENT) not in (_ABSENT, f"b/{new}"):
        raise ValueError(f"the names of a section differ: {head[0][:80]!r}")
    is_new = "new file mode" in fields or named.get("---") == _ABSENT
    is_gone = "deleted file mode" in fields or named.get("+++") == _ABSENT
    modes = {fields[name] for name in ("old mode", "new mode", "new file mode", "deleted file mode") if name in fields}
    modes |= set(fields.get("index", "").split()[1:])
    return FileDiff(
        text=text,
        old=None if is_new else old,
        new=None if is_gone else new,
        modes=frozenset(modes),
        hunks=hunks,
        binary=binary,
    )


def _header_paths(line: str) -> tuple[str, str]:
    """From ``diff --git a/OLD b/NEW``. Unquoted names are taken apart in the middle: they are the same, unless the
    lines that follow say otherwise."""
    names = line.removeprefix("diff --git ")
    if '"' in names:
        found = [_unquote(name) for name in re.findall(r'"(?:[^"\\]|\\.)*"|[^" ]\S*', names)]
    else:
        middle = names.find(" b/") if " b/" in names and names.count(" b/") == 1 else len(names) // 2
        found = [names[:middle], names[middle + 1 :]]
    if len(found) != 2 or not found[0].startswith("a/") or not found[1].startswith("b/"):
        raise ValueError(f"unreadable section: {line[:80]!r}")
    return found[0][2:], found[1][2:]


def _unquote(name: str) -> str:
    """Undo git's C quoting: ``"a/caf\\303\\251"``."""
    if not (len(name) > 1 and name[0] == name[-1] == '"'):
        return name
    escaped = name[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")
    return escaped.encode("latin-1", "replace").decode(errors="replace")
