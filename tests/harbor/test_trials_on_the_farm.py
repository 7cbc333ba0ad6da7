"""Real Harbor trials whose environment is a sandbox of the farm; and a Harbor environment as the farm's sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harbor_named
import psutil
import pytest
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial
from harbor_folders import TEST, TOML, write_folder

from farm.agent.fixed import NullAgent, OracleAgent
from farm.episode import run_episode
from farm.errors import SandboxLostError, SandboxStartError, UsageError
from farm.grader import make_grader
from farm.harbor.environment import FarmEnvironment
from farm.harbor.tasks import harbor_tasks
from farm.harbor.write import write_tasks
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox import make_provider
from farm.sandbox.harbor import HarborProvider
from farm.suites import micro
from farm.types import Attempt, Episode, Graded, Limits, Machine, Task

pytestmark = pytest.mark.filterwarnings("ignore:Task.checksum:DeprecationWarning")  # Harbor's own, about itself
FARM = "farm.harbor.environment:FarmEnvironment"
LIMITS = Limits(agent_s=60.0, grade_s=60.0, disk_bytes=64 << 20)


def trial(folder: Path, out: Path, agent: str, **environment: Any) -> TrialResult:
    config = {
        "task": {"path": str(folder)},
        "trials_dir": str(out),
        "agent": {"name": agent},
        "environment": {"import_path": FARM, "kwargs": {"sandbox": "bubblewrap"}, **environment},
    }

    async def main() -> TrialResult:
        made = await Trial.create(TrialConfig.model_validate(config))
        return await made.run()

    return asyncio.run(main())


def rewards(result: TrialResult) -> dict[str, float]:
    assert result.exception_info is None, result.exception_info
    assert result.verifier_result is not None
    found = result.verifier_result.rewards
    assert isinstance(found, dict)
    return found


def test_a_task_of_the_farms_is_solved_by_harbors_oracle_and_not_by_nop(tmp_path: Path) -> None:
    """The real Harbor: its trial, its oracle, its verifier; our folder, our sandbox."""
    (task,) = micro.generate("rl", count=1)
    write_tasks([task], tmp_path / "tasks", limits=LIMITS)
    folder = tmp_path / "tasks" / task.instance_id
    assert rewards(trial(folder, tmp_path / "trials", "oracle")) == {"reward": 1.0}
    assert rewards(trial(folder, tmp_path / "trials", "nop")) == {"reward": 0.0}


def test_a_task_of_others_has_its_own_rewards(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t")
    assert rewards(trial(folder, tmp_path / "trials", "oracle")) == {"reward": 1.0, "count": 1}
    assert rewards(trial(folder, tmp_path / "trials", "nop")) == {"reward": 0.0, "count": 0}
    logs = list((tmp_path / "trials").rglob("test-stdout.txt"))
    assert [log.read_text() for log in logs if "count 1" in log.read_text()] == ["count 1 greeting 0.5\n"]


def test_harbor_and_the_farm_give_one_reward(tmp_path: Path) -> None:
    """The same folder, run by Harbor and by the farm itself."""
    half = TEST.replace("greeting=0.5 || greeting=0", "greeting=0 || greeting=0")
    folder = write_folder(tmp_path / "t", test=half)
    (task,) = harbor_tasks(str(folder))
    theirs = rewards(trial(folder, tmp_path / "trials", "oracle"))
    ours = episode(task, OracleAgent(), make_provider("bubblewrap"))
    assert theirs["reward"] == pytest.approx(ours.reward)
    assert 0 < ours.reward < 1


def test_what_harbor_may_not_have_is_refused(tmp_path: Path) -> None:
    public = write_folder(tmp_path / "public", toml=TOML.replace('network_mode = "no-network"\n', ""))
    with pytest.raises(ValueError, match="the task wants a public network"):
        trial(public, tmp_path / "trials", "nop")
    user = write_folder(tmp_path / "user", toml=TOML.replace("[agent]\n", '[agent]\nuser = "nobody"\n'))
    result = trial(user, tmp_path / "trials", "oracle")
    assert result.exception_info is not None
    assert "not as 'nobody'" in result.exception_info.exception_message


def test_a_command_past_its_time_is_killed_and_the_environment_goes_on(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", toml=TOML.replace("timeout_sec = 50.0", "timeout_sec = 1.0"))
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\necho 3 > count.txt\nsleep 60\n")
    result = trial(folder, tmp_path / "trials", "oracle")
    assert result.verifier_result is not None
    assert result.verifier_result.rewards == {"reward": pytest.approx(1 / 1.5), "count": 1}


# ------------------------------------------------------------------------- the other way: Harbor for the farm


def provider(**kwargs: Any) -> HarborProvider:
    return HarborProvider(environment=FARM, kwargs={"sandbox": "bubblewrap", **kwargs})


class Nowhere:
    """The engine of agents that sample nothing."""

    url = ""


def episode(task: Task, agent: Any, given: Any) -> Graded:
    async def main() -> Graded:
        landed = await run_episode(
            Attempt(
                episode=Episode(task=task, group_id="g", index=0, group_size=1, seed=0, limits=task.limits(LIMITS)),
                number=1, engine_url="", min_version=0, queued_at_s=time.time(),
            ),
            provider=given, engine=Nowhere(), agent=agent, renderer=None,  # type: ignore[arg-type]
            grader=make_grader("harbor" if task.log_parser == "harbor" else "tests"), worker="w", now=time.time,
        )  # fmt: skip
        assert isinstance(landed.outcome, Graded), landed.outcome
        return landed.outcome

    return asyncio.run(main())


def test_episodes_of_the_farm_in_a_harbor_environment() -> None:
    (task,) = micro.generate("rl", count=1)
    assert episode(task, OracleAgent(), provider()).reward == 1.0
    assert episode(task, NullAgent(), provider()).reward == 0.0


def inside(body: Any, given: HarborProvider, **changes: Any) -> None:
    spec = SandboxSpec(**{"owner": "t", "deadline_at_s": time.time() + 60, **changes})

    async def main() -> None:
        async with given.open(spec) as sandbox:
            await body(sandbox)

    asyncio.run(main())


def test_an_environment_that_fails_for_good_is_a_lost_sandbox() -> None:
    async def body(sandbox: Sandbox) -> None:
        environment = sandbox._environment  # type: ignore[attr-defined]
        await environment.stop(delete=True)
        with pytest.raises(SandboxLostError, match="not started"):
            await sandbox.exec("true", timeout_s=5)

    inside(body, provider())


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine that lives is a file in this folder. Temporary and state files are in one of their own, too."""
    with tempfile.TemporaryDirectory() as folder:
        machines, temporary = Path(folder, "machines"), Path(folder, "tmp")
        for path in (machines, temporary):
            path.mkdir()
        Path(folder).chmod(0o755)  # sandboxes run as another user
        monkeypatch.setenv(harbor_named.MACHINES, str(machines))
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setenv("PYTHONPATH", str(Path(harbor_named.__file__).parent), prepend=os.pathsep)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield machines


def sweep(now_s: float) -> int:
    return asyncio.run(make_provider("harbor", **harbor_named.options()).sweep(now_s=now_s))


def test_what_a_killed_owner_left_is_ended_by_the_next_sweep(machines: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", harbor_named.OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        (machine,) = machines.iterdir()
        pid = int(machine.read_text())
        assert sweep(time.time()) == 0  # it lives, and is in time
        owner.kill()
    assert psutil.pid_exists(pid)
    assert sweep(time.time()) == 1
    assert not list(machines.iterdir())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not list(Path(tempfile.gettempdir()).glob("farm-harbor-*"))
    assert not list(Path(tempfile.gettempdir()).glob("rollout-farm-*/harbor/*"))
    assert sweep(time.time()) == 0


def test_a_sandbox_ends_at_its_deadline_without_a_sweep(machines: Path) -> None:
    async def main() -> None:
        owner = make_provider("harbor", **harbor_named.options())
        async with owner.open(SandboxSpec(owner="t", deadline_at_s=time.time() + 4)) as sandbox:
            for _ in range(300):
                if not list(machines.iterdir()):
                    break
                await asyncio.sleep(0.1)
            assert not list(machines.iterdir())
            with pytest.raises(SandboxLostError, match="deadline") as caught:
                await sandbox.exec("true", timeout_s=1)
            assert caught.value.kind == "deadline"

    asyncio.run(main())


def test_what_could_not_be_stopped_is_left_to_the_next_sweep(machines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = harbor_named.NamedEnvironment.stop

    async def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody answers")

    async def body(_: Sandbox) -> None:
        monkeypatch.setattr(harbor_named.NamedEnvironment, "stop", broken)

    given = make_provider("harbor", **harbor_named.options())
    inside(body, given)  # type: ignore[arg-type]
    assert sweep(time.time()) == 1  # tried, in vain
    assert list(machines.iterdir())
    monkeypatch.setattr(harbor_named.NamedEnvironment, "stop", real)
    assert sweep(time.time()) == 1
    assert not list(machines.iterdir())
    assert sweep(time.time()) == 0


def test_a_hiccup_of_an_environment_costs_nothing() -> None:
    async def body(sandbox: Sandbox) -> None:
        environment = sandbox._environment  # type: ignore[attr-defined]
        real, calls = environment.exec, []

        async def shaky(**given: Any) -> Any:
            calls.append(given)
            answer = await real(**given)
            if len(calls) == 1:
                raise ConnectionError("the answer is lost")
            return answer

        environment.exec = shaky
        done = await sandbox.exec("echo once >> log; cat log", timeout_s=10)
        assert done.output == "once\n"  # asked for again, not run again
        assert len(calls) == 2

    inside(body, provider())


def test_bad_input_is_told_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="environment 'nowhere'"):
        make_provider("harbor", environment="nowhere")
    with pytest.raises(UsageError, match=r"environment 'no\.such:Thing'"):
        make_provider("harbor", environment="no.such:Thing")
    with pytest.raises(SandboxStartError, match="the task wants a public network") as caught:
        inside(lambda _: None, provider(), machine=Machine(network=True))
    assert not caught.value.retryable


def test_an_environment_that_answers_through_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As podman-compose does: lines end in two characters, and the end is lost."""
    plain = FarmEnvironment.exec

    async def through_a_terminal(self: FarmEnvironment, *given: Any, **named: Any) -> Any:
        answer = await plain(self, *given, **named)
        return answer.model_copy(update={"stdout": answer.stdout.replace("\n", "\r\n").rstrip()})

    monkeypatch.setattr(FarmEnvironment, "exec", through_a_terminal)

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_files({"/testbed/f": b"1\r\n2\n\n"})
        assert (await sandbox.exec("cat f; exit 3", timeout_s=10)).output == "1\r\n2\n\n"
        assert await sandbox.read_file("/testbed/f") == b"1\r\n2\n\n"

    inside(body, provider())
