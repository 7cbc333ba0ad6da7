"""The agent's change as a diff against the base commit, whatever it did to its repository.

Mostly an agent has edited a few small files. Then the farm reads them back and makes the diff itself, which costs one
shell start. In all other cases (files came or went, links, large trees, other encodings) git makes it, with a git
directory of the farm's own that is written beside the work tree after the agent has ended: commits, a rewritten
history, hooks, filters or a removed ``.git`` make no difference. Only a repository that came with the image is read
through its own ``.git``.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping

from farm.errors import FarmError
from farm.protocols import Sandbox
from farm.suites.patch import unified
from farm.types import Task
from farm.workspace import base_tree, git_files, workspace

MAX_PATCH_BYTES = 1 << 20

_TIMEOUT_S = 30.0
_REFUSED = (1, 128)  # exit codes of a git that says no

_SMALL_TREE = 8  # files
_SMALL_FILE = 64 << 10  # bytes
# All paths of the work tree by builtins of the shell alone; the number of links comes first.
_LIST = """\
shopt -s globstar dotglob nullglob
links=0
for path in **; do [[ -L $path ]] && links=1; done
printf '%s\\n' $links **
"""

_ROOM = "head -c 65536 /dev/zero > /tmp/farm-room"  # fails when the agent has filled or removed the place

_DIFF = """\
export GIT_DIR={git_dir} GIT_WORK_TREE={workdir} GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_OPTIONAL_LOCKS=0
mkdir -p {workdir} && cd {workdir} || exit 1
stage() {{ git add --all --intent-to-add . ; }}
stage || {{ find . -mindepth 2 -name .git -prune -exec rm -rf {{}} + ; stage; }} || exit
git -c core.fileMode={file_mode} diff --no-ext-diff --no-textconv --no-renames --no-color --full-index --binary \
--src-prefix=a/ --dst-prefix=b/ {base} > {diff}
"""


class NoPatchError(Exception):
    """The agent left something that no diff can be taken of. Its own doing: graded, not retried."""


async def collect_patch(task: Task, sandbox: Sandbox, *, base: str | None = None) -> str:
    """The diff between the base commit and the work tree, at most ``MAX_PATCH_BYTES``. ``base``: another commit to
    start from (that of an image whose set-up changed tracked files).

    New files count, ignored ones don't. Raises NoPatchError, ``SandboxLostError``, or FarmError when git is missing or
    takes too long.
    """
    tree = await base_tree(task)
    diff = await _edits(task, sandbox, tree) if tree is not None and len(tree) <= _SMALL_TREE else None
    return await _by_git(task, sandbox, base or task.base_commit) if diff is None else diff


async def _edits(task: Task, sandbox: Sandbox, base: Mapping[str, bytes]) -> str | None:
    """The diff when nothing but the content of small text files has changed; None when git has to look."""
    listing = await sandbox.exec(_LIST, timeout_s=_TIMEOUT_S)
    links, *found = listing.output.split("\n")[:-1] or [""]
    folders = {path[:at] for path in base for at, c in enumerate(path) if c == "/"}
    own = {path for path in found if path.split("/")[0] != ".git" and "__pycache__" not in path.split("/")}
    if listing.exit_code != 0 or listing.truncated or links != "0" or own != base.keys() | folders:
        return None
    diffs = []
    for path, before in sorted(base.items()):
        try:
            after = await sandbox.read_file(f"{task.workdir}/{path}", max_bytes=_SMALL_FILE)
            if after != before:
                diffs.append(unified(path, before.decode(), after.decode()))
        except (OSError, ValueError):
            return None
    return "".join(diffs)


async def _by_git(task: Task, sandbox: Sandbox, base: str) -> str:
    folder = f"/tmp/farm-{secrets.token_hex(4)}"
    git = git_files(task, await workspace(task), f"{folder}/git")
    diff = await _git_diff(task, sandbox, git, folder, base)
    try:
        return diff.decode()
    except UnicodeDecodeError:
        as_binary = {f"{folder}/git/info/attributes": b"* -diff\n"}
        return (await _git_diff(task, sandbox, git | as_binary, folder, base)).decode(errors="replace")


async def _git_diff(task: Task, sandbox: Sandbox, git: Mapping[str, bytes], folder: str, base: str) -> bytes:
    try:
        await sandbox.write_files(git or {f"{folder}/README": b""})
    except OSError as error:
        room = await sandbox.exec(_ROOM, timeout_s=_TIMEOUT_S, cwd="/")
        if room.exit_code == 0:
            raise
        raise NoPatchError(f"the agent left no room to write: {error}") from error
    script = _DIFF.format(
        git_dir=f"{folder}/git" if git else shlex.quote(f"{task.workdir}/.git"),
        workdir=shlex.quote(task.workdir),
        file_mode="false" if git else "true",
        base=shlex.quote(base),
        diff=f"{folder}/agent.diff",
    )
    result = await sandbox.exec(script, timeout_s=_TIMEOUT_S, cwd="/")
    if result.timed_out:
        raise FarmError(f"{task.instance_id}: taking the diff took over {_TIMEOUT_S:g} s", kind="collect_timeout")
    if result.exit_code in _REFUSED:
        raise NoPatchError(f"git can't read what the agent left: {result.output[-500:]}")
    if result.exit_code != 0:
        raise FarmError(f"{task.instance_id}: exit code {result.exit_code}: {result.output[-500:]}", kind="collect")
    try:
        return await sandbox.read_file(f"{folder}/agent.diff", max_bytes=MAX_PATCH_BYTES)
    except ValueError as error:
        raise NoPatchError(f"the diff is larger than {MAX_PATCH_BYTES} bytes") from error
