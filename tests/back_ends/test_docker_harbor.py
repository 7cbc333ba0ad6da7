"""Harbor tasks on a real Docker engine: their Dockerfile is built, their machine is graded, their needs are met."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from click.testing import CliRunner
from harbor_folders import TOML, write_folder
from local_registry import host_tar

from farm import cli
from farm.errors import SandboxStartError
from farm.protocols import ExecResult, SandboxSpec
from farm.sandbox.build_context import BuildContext, digest_of
from farm.sandbox.docker import DockerProvider
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded, Machine

BASE = "farm-test-base:1"
OWN = TOML.replace('[metadata.rollout_farm]\nimage = "host"\n', "").replace('workdir = "/app"\n', "")
DOCKERFILE = f"FROM {BASE}\nCOPY seed.txt /seed/\nENV SEED=planted\nWORKDIR /app\n"
TEST = """\
#!/bin/bash
[ "$(pwd) $SEED $(cat /seed/seed.txt) $GREETING" = "/app planted grown hello" ] || exit 1
[ "$(cat count.txt 2>/dev/null)" = "$WANTED" ] && reward=1 || reward=0.1
echo $reward > /logs/verifier/reward.txt
"""


@pytest.fixture(autouse=True)
def base_image() -> Iterator[None]:
    client = docker.APIClient(base_url=os.environ["DOCKER_HOST"], timeout=60)
    changes = ["ENV HOME=/root", "ENV PATH=/usr/bin:/bin"]
    client.import_image_from_data(host_tar(), repository="farm-test-base", tag="1", changes=changes)
    yield
    for image in client.images("rollout-farm/built"):
        client.remove_image(image["Id"], force=True)
    client.close()


def folder(path: Path, **changes: Any) -> Path:
    made = write_folder(path, **{"toml": OWN, "dockerfile": DOCKERFILE, "test": TEST, **changes})
    (made / "environment" / "seed.txt").write_text("grown\n")
    return made


def context(path: Path) -> str:
    return BuildContext(folder=path, digest=digest_of(path)).reference


def one_command(command: str, **changes: Any) -> ExecResult:
    options = changes.pop("options", {})
    spec = SandboxSpec(**{"owner": "t", "deadline_at_s": time.time() + 60, "workdir": "", **changes})

    async def main() -> ExecResult:
        provider = DockerProvider(**options)
        try:
            async with provider.open(spec) as sandbox:
                return await sandbox.exec(command, timeout_s=20)
        finally:
            provider.close()

    return asyncio.run(main())


def rollout(tmp_path: Path, agent: str) -> list[float]:
    run = tmp_path / agent
    tasks = ["--tasks", f"harbor:{tmp_path / 'tasks'}", "--agent", agent, "--workers", "1", "--run", str(run)]
    done = CliRunner().invoke(cli.main, ["rollout", *tasks])
    assert done.exit_code == 0, done.output
    rows = [row for _, row in DirectoryLog(run / "trajectories", create=False).read(Cursor())]
    assert all(isinstance(row.outcome, Graded) for row in rows), [row.outcome for row in rows]
    return [row.outcome.reward for row in rows if isinstance(row.outcome, Graded)]


def test_a_dockerfile_is_built_and_its_machine_graded(tmp_path: Path) -> None:
    """Docker is what harbor: uses unless told otherwise; the folder's own image says where commands run."""
    folder(tmp_path / "tasks" / "one")
    images = CliRunner().invoke(cli.main, ["images", "--tasks", f"harbor:{tmp_path / 'tasks'}"])
    assert (images.exit_code, "ready after" in images.output) == (0, True), images.output
    assert rollout(tmp_path, "oracle") == [1.0]
    assert rollout(tmp_path, "null") == [0.1]


def test_an_image_on_this_hosts_files_works_in_containers_too(tmp_path: Path) -> None:
    write_folder(tmp_path / "tasks" / "one")
    assert rollout(tmp_path, "oracle") == [1.0]


def test_the_images_own_working_directory(tmp_path: Path) -> None:
    place = folder(tmp_path / "t") / "environment"
    assert one_command("pwd", image=context(place)).output == "/app\n"
    assert one_command("pwd", image=BASE).output == "/\n"


def test_a_dockerfile_that_does_not_build_says_why(tmp_path: Path) -> None:
    shell = 'SHELL ["/bin/bash", "-c"]'
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\n{shell}\nRUN echo so far && exit 7\n")
    with pytest.raises(SandboxStartError, match=r"non-zero code: 7: .*so far") as c:
        one_command("true", image=context(tmp_path))
    assert c.value.kind == "build"


def test_a_folder_that_changed_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\n")
    image = context(tmp_path)
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nENV A=1\n")
    with pytest.raises(SandboxStartError, match="has changed since its tasks were read") as caught:
        one_command("true", image=image)
    assert not caught.value.retryable


def test_a_network_is_had_by_asking_and_by_permission() -> None:
    look = "while read -r line; do echo ${line%%:*}; done < /proc/net/dev"

    def names(result: ExecResult) -> list[str]:
        return result.output.splitlines()[2:]

    with pytest.raises(SandboxStartError, match=r"name one in docker\.network"):
        one_command("true", image=BASE, machine=Machine(network=True))
    shared = one_command(look, image=BASE, machine=Machine(network=True), options={"network": "host"})
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    assert names(shared) == [line.split(":")[0].strip() for line in lines]
    assert names(one_command(look, image=BASE, options={"network": "host"})) == ["lo"]


def test_cpus_and_environment_are_the_tasks() -> None:
    machine = Machine(cpus=0.5, env={"A": "x y"})
    quota = "cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null | head -1; echo $A"
    output = one_command(quota, image=BASE, machine=machine).output
    assert output.split()[0] == "50000"
    assert output.endswith("x y\n")
