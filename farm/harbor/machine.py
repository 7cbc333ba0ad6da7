"""What Harbor does inside a task's machine: the solution is run, the tests are run, the reward is read.

``/logs/verifier``, ``/tests`` and ``/solution`` are what Harbor's tasks know them as. The tests come in only after the
agent has ended, into folders that are emptied first. The reward is ``reward.json`` (an object of numbers) before
``reward.txt`` (one number); the exit code of ``test.sh`` says nothing, as in Harbor. Where the tests also left a CTRF
report (``/logs/verifier/ctrf.json``), the evidence has its test names.

A machine in which the tests ran out of time is a grade: 0. One in which they left no reward that can be read is not
(``GraderError``): Harbor calls that a failure of the verifier, too.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from functools import lru_cache

from farm.errors import AgentError, GraderError
from farm.harbor.folder import SOLVE, TEST, Folder, resolved, unchanged
from farm.protocols import ExecResult, Sandbox
from farm.types import Evidence, FolderFiles, Graded, Limits, Task

LOGS = "/logs/verifier"
_TAIL = 2_000
_SET_UP_S = 60.0
_MAX_REPORT_BYTES = 4 << 20
_STATUSES = {"passed": "PASSED", "failed": "FAILED", "skipped": "MISSING", "pending": "MISSING"}


async def solve(task: Task, sandbox: Sandbox, limits: Limits) -> None:
    """Run the task's own solution, as Harbor's oracle does. What it comes to, the tests say. Raises AgentError when the
    task has none."""
    folder = _folder(task)
    if not (folder.path / SOLVE).is_file():
        raise AgentError(
            f"{task.instance_id}: the task has no {SOLVE}: no oracle for it",
            kind="gold_patch",
            retryable=False,
        )
    await _bring(task, sandbox, "solution")
    env = {"DEBIAN_FRONTEND": "noninteractive", **resolved(folder.toml.solution.env, where=task.instance_id)}
    await sandbox.exec(f"chmod +x /{SOLVE} && /{SOLVE}", timeout_s=limits.agent_s, env=env)


async def run_tests(task: Task, sandbox: Sandbox, limits: Limits) -> Graded:
    """Run the task's tests in ``sandbox`` as it is now. Raises GraderError, see the module."""
    folder = _folder(task)
    await _bring(task, sandbox, "tests")
    env = resolved(folder.toml.verifier.env, where=task.instance_id)
    result = await sandbox.exec(f"chmod +x /{TEST} && /{TEST}", timeout_s=limits.grade_s, env=env)
    if result.timed_out:
        return _graded(task, {}, 0.0, {}, result, note=f"the tests ran out of time after {limits.grade_s:g} s\n")
    rewards = await _rewards(task, sandbox, result)
    if "reward" not in rewards and len(rewards) != 1:
        raise GraderError(
            f"{task.instance_id}: reward.json has {', '.join(sorted(rewards)) or 'nothing'}, none of it is 'reward'",
            kind="reward",
            retryable=False,
        )
    reward = rewards["reward"] if "reward" in rewards else next(iter(rewards.values()))
    return _graded(task, rewards, reward, await _report(sandbox), result)


def _folder(task: Task) -> Folder:
    assert isinstance(task.workspace, FolderFiles)
    return unchanged(task.workspace.folder, task.workspace.digest)


@lru_cache(maxsize=64)
def _contents(folder: str, digest: str, part: str) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
    """The files to bring in, by absolute path, and which of them are programs."""
    found = unchanged(folder, digest)
    files = {f"/{part}/{name}": data for name, data in found.files(part).items()}
    return files, tuple(f"/{part}/{name}" for name in found.programs(part))


async def _bring(task: Task, sandbox: Sandbox, part: str) -> None:
    """Put ``part`` of the folder where Harbor has it, and nothing but it. Raises GraderError."""
    assert isinstance(task.workspace, FolderFiles)
    files, programs = _contents(task.workspace.folder, task.workspace.digest, part)
    command = (
        f"mkdir -p /{part} {LOGS} /logs/agent /logs/artifacts && shopt -s dotglob nullglob && rm -rf /{part}/* {LOGS}/*"
    )
    result = await sandbox.exec(command, timeout_s=_SET_UP_S, cwd="/")
    if result.exit_code == 0:
        try:
            await sandbox.write_files(files)
        except OSError as error:
            raise GraderError(f"{task.instance_id}: /{part} can't be written: {error}", kind="machine") from error
        names = " ".join(shlex.quote(name) for name in programs)
        result = await sandbox.exec(f"chmod +x {names}" if names else ":", timeout_s=_SET_UP_S, cwd="/")
    if result.exit_code != 0:
        raise GraderError(
            f"{task.instance_id}: /{part} and {LOGS} can't be made (commands run as the image's own user, who needs to "
            f"be able to): {result.output[-500:]}",
            kind="machine",
        )


async def _rewards(task: Task, sandbox: Sandbox, result: ExecResult) -> dict[str, float]:
    for name, read in (("reward.json", _object), ("reward.txt", _number)):
        try:
            text = (await sandbox.read_file(f"{LOGS}/{name}")).decode()
            rewards = read(text)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise GraderError(f"{task.instance_id}: {LOGS}/{name}: {error}", kind="reward") from error
        if all(math.isfinite(value) for value in rewards.values()):
            return rewards
        raise GraderError(f"{task.instance_id}: {LOGS}/{name}: {rewards} is not finite", kind="reward")
    raise GraderError(
        f"{task.instance_id}: the tests left no reward in {LOGS}; exit code {result.exit_code}: {result.output[-500:]}",
        kind="no_reward",
    )


def _object(text: str) -> dict[str, float]:
    found = json.loads(text)
    if not isinstance(found, dict) or not all(type(value) in (int, float, bool) for value in found.values()):
        raise ValueError("not an object of numbers")
    return {str(name): float(value) for name, value in found.items()}


def _number(text: str) -> dict[str, float]:
    return {"reward": float(text)}


async def _report(sandbox: Sandbox) -> dict[str, str]:
    """Test -> status by the CTRF report; none where there is no such file, or it can't be read."""
    try:
        data = await sandbox.read_file(f"{LOGS}/ctrf.json", max_bytes=_MAX_REPORT_BYTES)
        tests = json.loads(data)["results"]["tests"]
        return {str(test["name"]): _STATUSES.get(str(test["status"]), "ERROR") for test in tests}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _graded(
    task: Task,
    rewards: Mapping[str, float],
    reward: float,
    report: Mapping[str, str],
    result: ExecResult,
    *,
    note: str = "",
) -> Graded:
    expected = (*task.fail_to_pass, *task.pass_to_pass)
    said = " ".join(f"{name}={value:g}" for name, value in rewards.items())
    evidence = Evidence(
        statuses={test: report.get(test, "MISSING") for test in expected} if expected else report,
        resolved=reward >= 1,
        patch_applied=True,
        exit_code=result.exit_code,
        log_tail=f"{note}{f'reward: {said}' if said else ''}\n{result.output[-_TAIL:]}".lstrip("\n"),
    )
    return Graded(reward=reward, evidence=evidence)
