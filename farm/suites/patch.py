"""Unified diffs that ``git apply`` takes, made without git."""

from __future__ import annotations

import difflib
import io


def unified(path: str, old: str | None, new: str) -> str:
    """The diff that turns ``old`` into ``new``; ``old`` None means that the file is new. Empty when nothing changes."""
    if old == new:
        return ""
    head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if old is None else "")
    source = "/dev/null" if old is None else f"a/{path}"
    lines = difflib.unified_diff(_lines(old or ""), _lines(new), source, f"b/{path}")
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as git counts them: only a line feed ends one."""
    return list(io.StringIO(text, newline="\n"))
