"""A task's repository as files to write, for the agent's sandbox and for the grader's."""

from __future__ import annotations

import asyncio

from farm.suites.repo import workspace_files
from farm.types import SdistFiles, Task


async def workspace(task: Task) -> dict[str, bytes]:
    """Absolute path -> bytes; {} when the image holds the repository.

    Unpacking a source distribution takes long enough to stall other episodes, so that is done in a thread.
    """
    if isinstance(task.workspace, SdistFiles):
        return await asyncio.to_thread(workspace_files, task)
    return workspace_files(task)
