"""Git history that shows the future, removed from a task's repository before an agent can look at it.

A repository that came with an image may hold the very commits that fix the issue: on other branches and tags, in
reflogs, as fetched but unmerged heads, or as objects that nothing points to any more (``git fsck --lost-found`` lists
them, ``git show`` prints them). Kept are the commit that is checked out and its ancestors, which are the past, and what
is staged. The same is done to submodules and to repositories inside the work tree.

The result is looked at again by a second command, and only what that one finds counts: a repository in which anything
else is left is a failure of the farm (``FarmError``), and no agent starts.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from farm.errors import FarmError
from farm.protocols import Sandbox
from farm.types import Task

_TIMEOUT_S = 600.0  # of each of the two commands; a large repository is packed anew
_MOST_OWN_COMMITS = 1  # between the base commit and the one checked out: images add one of their own

# What both commands begin with. ``repositories`` prints the git directory of every repository of the work tree.
_COMMON = """\
set -u
export LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1
export GIT_CONFIG_COUNT=3 GIT_CONFIG_KEY_0=safe.directory 'GIT_CONFIG_VALUE_0=*' GIT_CONFIG_KEY_1=core.hooksPath
export GIT_CONFIG_VALUE_1=/dev/null GIT_CONFIG_KEY_2=core.fsmonitor GIT_CONFIG_VALUE_2=false
cd {workdir} || exit 41
main=$(git rev-parse --absolute-git-dir) || exit 41
repositories() {{
  printf '%s\\n' "$main"
  if [ -d "$main/modules" ]; then find "$main/modules" -name HEAD -type f -printf '%h\\n'; fi
  find . -mindepth 2 -name .git -type d -printf "$PWD/%P\\n"
}}
is_repository() {{ [ -d "$1/objects" ] && [ -d "$1/refs" ]; }}
strays() {{  # objects that neither HEAD nor the index leads to
  comm -23 <(git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u) \\
    <(git rev-list --objects --indexed-objects HEAD | cut -d ' ' -f 1 | sort -u) | wc -l
}}
"""

_STRIP = """\
git cat-file -e {base}^{{commit}} || exit 42
git merge-base --is-ancestor {base} HEAD || exit 43
[ "$(git rev-list --count {base}..HEAD)" -le {most} ] || exit 44
strip() {{
  export GIT_DIR=$1
  local here
  here=$(git symbolic-ref -q HEAD)
  git for-each-ref --format='%(refname)' | while read -r ref; do
    [ "$ref" = "$here" ] || git update-ref --no-deref -d "$ref" || exit 45
  done || return 1
  git remote | while read -r name; do git remote remove "$name" || exit 45; done || return 1
  rm -rf "$1"/logs "$1"/*_HEAD "$1"/AUTO_MERGE "$1"/BISECT_* "$1"/rebase-apply "$1"/rebase-merge "$1"/worktrees \\
    "$1"/lost-found "$1"/rr-cache "$1"/info/grafts "$1"/objects/info/commit-graph* "$1"/objects/pack/multi-pack-index*
  if [ -e "$1/objects/info/alternates" ] || [ "$(strays)" -ne 0 ]; then
    rm -f "$1"/objects/pack/*.keep "$1"/objects/pack/*.promisor
    git repack -a -d -q --no-write-bitmap-index || return 1
    rm -f "$1/objects/info/alternates"
    git prune --expire=now || return 1
  fi
}}
repositories | while read -r found; do
  if is_repository "$found"; then ( strip "$found" ) || exit 45; fi
done || exit 45
"""

_LOOK = """\
look() {{
  export GIT_DIR=$1
  local here
  here=$(git symbolic-ref -q HEAD)
  echo "others $(git for-each-ref --format='%(refname)' | grep -cvxF "${{here:-none}}")"
  echo "remotes $(git remote | wc -l)"
  echo "reflogs $(find "$1" -path "$1/logs/*" -type f | wc -l)"
  echo "heads $(find "$1" -maxdepth 1 -name '*_HEAD' | wc -l)"
  echo "borrowed $(find "$1/objects/info" -name '*alternates' | wc -l)"
  echo "worktrees $(find "$1" -maxdepth 1 -name worktrees | wc -l)"
  echo "strays $(strays)"
}}
echo "head $(git rev-parse HEAD)"
echo "past $(git merge-base --is-ancestor {base} HEAD && git rev-list --count {base}..HEAD)"
repositories | while read -r found; do
  if is_repository "$found"; then ( look "$found" ) || exit 45; fi
done || exit 45
echo done
"""

_REASONS = {
    41: "there is no git repository in {workdir}",
    42: "the repository lacks the base commit {base}",
    43: "what is checked out does not descend from the base commit {base}",
    44: "what is checked out is more than {most} commit past the base commit {base}",
    45: "git can't clean the repository",
}
_NOTHING_ELSE = ("others", "remotes", "reflogs", "heads", "borrowed", "worktrees", "strays")


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """``head`` is the commit that is checked out: the base commit, or the image's own commit on top of it. The agent's
    change is what differs from it."""

    head: str
    repositories: int


async def strip_future(task: Task, sandbox: Sandbox) -> Past:
    """Remove from the repository in ``task.workdir`` all that is not the past of its checked-out commit, and look.

    Nothing of the work tree changes. Raises FarmError (kind ``history``), not retryable where the image is to blame."""
    await _run(task, sandbox, _STRIP)
    return _judge(task, await _run(task, sandbox, _LOOK))


def strip_script(task: Task) -> str:
    """What :func:`strip_future` runs first, for others to run; exit code 0 when it could be done."""
    return _script(task, _STRIP)


def _script(task: Task, script: str) -> str:
    words = {"workdir": shlex.quote(task.workdir), "base": shlex.quote(task.base_commit), "most": _MOST_OWN_COMMITS}
    return (_COMMON + script).format(**words)


async def _run(task: Task, sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(_script(task, script), timeout_s=_TIMEOUT_S, cwd="/")
    if result.timed_out:
        raise FarmError(f"{task.instance_id}: cleaning the history took over {_TIMEOUT_S:g} s", kind="history_timeout")
    if result.exit_code != 0:
        told = {"workdir": task.workdir, "base": task.base_commit, "most": _MOST_OWN_COMMITS}
        reason = _REASONS.get(result.exit_code, "the history can't be cleaned").format(**told)
        raise FarmError(
            f"{task.instance_id}: {reason}: exit code {result.exit_code}: {result.output[-500:]}",
            kind="history",
            retryable=result.exit_code not in _REASONS,
        )
    return result.output


def _judge(task: Task, report: str) -> Past:
    lines = [line.partition(" ") for line in report.splitlines()]
    facts = [(name, value) for name, _, value in lines]
    left = [f"{name} {value}" for name, value in facts if name in _NOTHING_ELSE and value != "0"]
    found = dict(facts)
    repositories = sum(name == "strays" for name, _ in facts)
    past = found.get("past", "")
    if left or "done" not in found or not repositories or not past.isdigit() or int(past) > _MOST_OWN_COMMITS:
        raise FarmError(
            f"{task.instance_id}: the repository still shows more than the past: {', '.join(left) or report[-300:]}",
            kind="history",
            retryable=False,
        )
    return Past(head=found["head"], repositories=repositories)
