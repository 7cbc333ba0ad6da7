"""A task's repository as files: to write into a sandbox, and to compare with what the agent made of them."""

from __future__ import annotations

import asyncio

from farm.suites.repo import workspace_files
from farm.types import FolderFiles, ImageFiles, InlineFiles, SdistFiles, Task


async def workspace(task: Task) -> dict[str, bytes]:
    """What to write into a sandbox: absolute path -> bytes, ``.git`` included; {} when the image holds the repository.

    Unpacking a source distribution takes long enough to stall other episodes, so that is done in a thread.
    """
    if isinstance(task.workspace, SdistFiles | FolderFiles):
        return await asyncio.to_thread(workspace_files, task)
    return workspace_files(task)


async def base_tree(task: Task) -> dict[str, bytes] | None:
    """The tracked files at the base commit, path inside the repository -> bytes; None when only the image has them."""
    match task.workspace:
        case ImageFiles() | FolderFiles(repository=""):
            return None
        case InlineFiles(files=files):
            return {path: text.encode() for path, text in files.items()}
        case SdistFiles() | FolderFiles():
            prefix, git = f"{task.workdir}/", f"{task.workdir}/.git/"
            files_and_git = await workspace(task)
            return {path.removeprefix(prefix): b for path, b in files_and_git.items() if not path.startswith(git)}


def git_files(task: Task, files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    """The ``.git`` among the files of :func:`workspace`, moved to ``folder``."""
    git = f"{task.workdir}/.git/"
    return {f"{folder}/{path.removeprefix(git)}": data for path, data in files.items() if path.startswith(git)}
