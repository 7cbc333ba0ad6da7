"""Docker sandboxes on a real engine: what they keep in, what is left after any death, and where images come from."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from click.testing import CliRunner
from docker_engine import Engine
from harbor_folders import TOML, write_folder
from local_registry import Registry, host_tar

from farm import cli
from farm.errors import SandboxLostError, SandboxStartError, UsageError
from farm.protocols import ExecResult, Sandbox, SandboxSpec
from farm.sandbox import docker_images
from farm.sandbox.docker import PREFIX, DockerProvider
from farm.sandbox.docker_disk import DiskWatch
from farm.sandbox.doctor import checks

PLAIN = "farm-test-plain:1"  # a root of its own, writable, commands run as root

_OWNER = """
import asyncio, contextlib, time
from farm.protocols import SandboxSpec
from farm.sandbox.docker import DockerProvider
async def main():
    provider = DockerProvider()
    async with contextlib.AsyncExitStack() as stack:
        for n in range(3):
            spec = SandboxSpec(owner=f"owner-{n}", deadline_at_s=time.time() + 300)
            sandbox = await stack.enter_async_context(provider.open(spec))
            await sandbox.exec("setsid sleep 300 > /dev/null 2>&1 &", timeout_s=10)
        print("up", flush=True)
        await sandbox.exec("sleep 300", timeout_s=300)
asyncio.run(main())
"""


@pytest.fixture
def client() -> Iterator[Any]:
    made = docker.APIClient(base_url=os.environ["DOCKER_HOST"], timeout=60)
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def plain_image() -> None:
    made = docker.APIClient(base_url=os.environ["DOCKER_HOST"], timeout=60)
    made.import_image_from_data(
        host_tar(), repository="farm-test-plain", tag="1", changes=["ENV HOME=/root", "ENV PATH=/usr/bin:/bin"]
    )
    made.close()


@pytest.fixture
def provider(client: Any, tmp_path: Path) -> Iterator[DockerProvider]:
    """With a ledger of its own."""
    made = DockerProvider()
    made._images._folder = tmp_path / "ledger"
    yield made
    made.close()
    assert names(client) == []


def names(client: Any) -> list[str]:
    found = [row["Names"][0].strip("/") for row in client.containers(all=True)]
    return [name for name in found if name.startswith(PREFIX)]


def spec(**changes: object) -> SandboxSpec:
    given = {"owner": "docker", "deadline_at_s": time.time() + 100, "memory_bytes": 128 << 20, "disk_bytes": 16 << 20}
    return SandboxSpec(**{**given, **changes})  # type: ignore[arg-type]


def inside(provider: DockerProvider, body: Callable[[Sandbox], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        async with provider.open(spec(**changes)) as sandbox:
            await body(sandbox)

    asyncio.run(run())


def run(provider: DockerProvider, *commands: str, timeout_s: float = 30, **changes: object) -> list[ExecResult]:
    done: list[ExecResult] = []

    async def body(sandbox: Sandbox) -> None:
        for command in commands:
            done.append(await sandbox.exec(command, timeout_s=timeout_s))

    inside(provider, body, **changes)
    return done


def eventually(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


# ------------------------------------------------------------------------------------------ isolation

STATUS = "id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t'"


@pytest.mark.parametrize(("image", "uid"), [("host", "1000"), (PLAIN, "0")])
def test_no_privileges(provider: DockerProvider, image: str, uid: str) -> None:
    status, net = run(provider, STATUS, "echo > /dev/tcp/192.0.2.1/80; echo done", image=image)
    none = "0" * 16
    assert status.output.split() == [uid, f"CapEff:{none}", f"CapBnd:{none}", "NoNewPrivs:1", "Seccomp:2"]
    assert "unreachable" in net.output


@pytest.mark.parametrize("image", ["host", PLAIN])
def test_the_command_server_is_out_of_reach(provider: DockerProvider, image: str) -> None:
    hostile = "kill -9 1; kill -STOP 1; echo x > /proc/1/fd/1; echo x > /proc/1/fd/0; cat /proc/1/mem /proc/1/environ"
    first, then = run(provider, hostile, "echo on", image=image)
    assert first.exit_code != 0
    assert then.output == "on\n"


def test_the_host_image_is_read_only_and_has_its_tools(provider: DockerProvider) -> None:
    written, tools, packages = run(
        provider,
        "touch /usr/x /etc/x /x /opt/x; touch /tmp/x ~/x x && echo fine",
        "git init -q; echo a > f; git add f && git commit -qm 1 && python3 -c 'import ssl, sqlite3; print(1)'",
        "python3 -c 'import numpy'",
    )
    assert written.output.count("Read-only") == 4
    assert written.output.endswith("fine\n")
    assert tools.output == "1\n"
    assert "ModuleNotFoundError" in packages.output


def test_the_pytest_image(provider: DockerProvider) -> None:
    test = "printf 'def test_a(): assert 1\\ndef test_b(): assert 0\\n' > test_x.py; python -m pytest -q test_x.py"
    (done,) = run(provider, test, image="host-pytest", memory_bytes=512 << 20)
    assert "1 failed, 1 passed" in done.output


def test_a_container_is_made_as_promised(provider: DockerProvider, client: Any) -> None:
    async def body(sandbox: Sandbox) -> None:
        found = client.inspect_container(sandbox.id)
        host = found["HostConfig"]
        assert (host["NetworkMode"], host["CapDrop"], host["AutoRemove"]) == ("none", ["ALL"], True)
        assert (host["PidsLimit"], host["NanoCpus"], host["LogConfig"]["Type"]) == (64, 10**9, "none")
        assert host["Memory"] == host["MemorySwap"] == (128 + 16) << 20
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert found["Config"]["Labels"]["rollout-farm.owner"] == "docker"

    inside(provider, body)


# --------------------------------------------------------------------------------------------- limits


def test_a_time_out_kills_what_made_a_session_of_its_own(provider: DockerProvider) -> None:
    escape = "setsid bash -c 'while :; do echo x >> /tmp/alive; sleep 0.05; done' > /dev/null 2>&1 & sleep 60"
    size = "stat -c %s /tmp/alive"
    late, one, two = run(provider, escape, f"{size}; sleep 0.4", size, timeout_s=1.0, image=PLAIN)
    assert late.timed_out
    assert one.output == two.output


def test_memory(provider: DockerProvider) -> None:
    grab, on = run(provider, "python3 -c 'b = bytearray(400 << 20); print(len(b))'", "echo on")
    assert grab.exit_code == 137
    assert on.output == "on\n"


def test_a_fork_bomb(provider: DockerProvider) -> None:
    bomb, on = run(provider, ":(){ :|:& };: ; sleep 60", "echo on", timeout_s=2.0)
    assert bomb.timed_out
    assert on.output == "on\n"


def test_a_fork_bomb_in_the_background(provider: DockerProvider) -> None:
    _, on = run(provider, "(bomb() { bomb | bomb & }; bomb) 2> /dev/null & echo left", "echo on", timeout_s=20)
    assert on.output == "on\n"


def test_a_full_disk_is_the_commands_problem(provider: DockerProvider) -> None:
    full, on = run(provider, "dd if=/dev/zero of=big bs=1M count=64", "rm big; echo on > x && cat x")
    assert "No space left" in full.output
    assert on.output == "on\n"


def test_a_layer_without_quota_is_watched(provider: DockerProvider) -> None:
    provider._disk = DiskWatch(provider._daemon, look_s=0.2)
    write = "dd if=/dev/zero of=/root/big bs=1M count=64 2> /dev/null; sleep 60"
    with pytest.raises(SandboxLostError, match="bytes") as caught:
        run(provider, write, image=PLAIN, timeout_s=60)
    assert caught.value.kind == "disk_limit"


def test_a_sandbox_ends_at_its_deadline(provider: DockerProvider) -> None:
    with pytest.raises(SandboxLostError) as caught:
        run(provider, "trap '' TERM; sleep 60", deadline_at_s=time.time() + 2.5)
    assert caught.value.kind == "deadline"


# ---------------------------------------------------------------------------------- nothing left behind


@pytest.fixture
def owner(client: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert len(names(client)) == 3
        yield process
        process.kill()


def test_a_killed_farm_leaves_nothing_without_a_sweep(client: Any, owner: subprocess.Popen[str]) -> None:
    owner.kill()
    assert eventually(lambda: names(client) == [])


def test_a_stopped_farm_is_swept_by_deadline(
    client: Any, owner: subprocess.Popen[str], provider: DockerProvider
) -> None:
    owner.send_signal(signal.SIGSTOP)
    assert asyncio.run(provider.sweep(now_s=time.time())) == 0
    assert asyncio.run(provider.sweep(now_s=time.time() + 400)) == 3
    assert names(client) == []


def test_a_container_made_and_never_started_is_swept(client: Any, provider: DockerProvider) -> None:
    labels = {"rollout-farm.owner": "x", "rollout-farm.deadline": repr(time.time() - 1)}
    client.create_container(PLAIN, command="true", name=f"{PREFIX}dead", labels=labels)
    client.create_container(PLAIN, command="true", name="somebody-elses")
    assert asyncio.run(provider.sweep(now_s=time.time())) == 1
    assert [row["Names"] for row in client.containers(all=True)] == [["/somebody-elses"]]
    client.remove_container("somebody-elses")


def test_a_container_removed_under_us_is_lost(client: Any, provider: DockerProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(client.remove_container, sandbox.id, force=True)
        with pytest.raises(SandboxLostError, match=r"exit code 137|gone") as caught:
            await task
        assert caught.value.kind == "lost"
        with pytest.raises(SandboxLostError):
            await sandbox.read_file("/etc/passwd")

    inside(provider, body)
    assert run(provider, "echo next")[0].output == "next\n"


def test_cancelled_at_any_moment(provider: DockerProvider, client: Any) -> None:
    async def use() -> None:
        async with provider.open(spec()) as sandbox:
            await sandbox.exec("sleep 60", timeout_s=60)

    async def all_of_them() -> None:
        for delay_s in (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.6):
            task = asyncio.create_task(use())
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert names(client) == [], delay_s

    asyncio.run(all_of_them())


def test_the_loop_may_end_with_a_sandbox_open(provider: DockerProvider, client: Any) -> None:
    async def main() -> None:
        async def use() -> None:
            async with provider.open(spec()) as sandbox:
                await sandbox.exec("sleep 60", timeout_s=60)

        task = asyncio.create_task(use())
        await asyncio.sleep(0.8)
        assert not task.done()

    asyncio.run(main())
    assert names(client) == []


def test_a_daemon_that_dies_and_comes_back() -> None:
    with tempfile.TemporaryDirectory(prefix="fd", ignore_cleanup_errors=True) as folder:
        engine = Engine(Path(folder))
        engine.start()
        try:
            provider = DockerProvider(host=engine.host)

            async def body() -> None:
                async with provider.open(spec()) as sandbox:
                    task = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
                    await asyncio.sleep(0.3)
                    await asyncio.to_thread(engine.kill)
                    with pytest.raises(SandboxLostError) as lost:
                        await task
                    assert lost.value.kind == "daemon"
                    with pytest.raises(SandboxStartError) as failed:
                        async with provider.open(spec()):
                            raise AssertionError("started")
                    assert (failed.value.kind, failed.value.retryable) == ("daemon", True)

            asyncio.run(body())
            engine.start()
            assert run(provider, "echo again")[0].output == "again\n"
            assert eventually(lambda: engine.containers() == [])
            provider.close()
        finally:
            engine.stop()
        assert engine.processes() == []


# --------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def stocked() -> Registry:
    made = Registry()
    made.add("swebench/one", host_tar(extra={"name": b"one"}))
    made.add("swebench/two", host_tar(extra={"name": b"two"}))
    made.add("swebench/bare", host_tar(without=("perl",)))
    return made


@pytest.fixture
def registry(client: Any, stocked: Registry) -> Iterator[Registry]:
    with serving(client, stocked) as running:
        yield running


@contextlib.contextmanager
def serving(client: Any, registry: Registry) -> Iterator[Registry]:
    """Nothing of it is at the daemon, before and after."""
    with registry.running() as running:
        running.refuse = 0
        running.asked.clear()
        yield running
        for row in client.images():
            for tag in row["RepoTags"] or []:
                if tag.startswith(running.address):
                    client.remove_image(tag, force=True)


def test_a_missing_image_is_pulled_once_by_all(provider: DockerProvider, registry: Registry) -> None:
    image = f"{registry.address}/swebench/one"

    async def one() -> str:
        async with provider.open(spec(image=image)) as sandbox:
            return (await sandbox.exec("cat /name; id -u; pwd", timeout_s=20)).output

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(all_of_them()) == ["one0\n/testbed\n"] * 4
    assert [image.name for image in provider._images.held()] == [f"{image}:latest"]
    assert len({*registry.asked}) == 1
    assert len(registry.asked) <= 2  # the daemon asks by tag, then by digest


@pytest.mark.parametrize(
    ("name", "words"), [("swebench/none", "correct the image's name"), ("swebench/bare", "/usr/bin/perl")]
)
def test_an_image_that_can_not_be_used(provider: DockerProvider, registry: Registry, name: str, words: str) -> None:
    with pytest.raises(SandboxStartError, match=words) as caught:
        run(provider, "true", image=f"{registry.address}/{name}")
    assert (caught.value.kind, caught.value.retryable) == ("image", False)


def test_a_registry_that_has_had_enough(
    provider: DockerProvider, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_images, "_REFUSED_S", 0.5)
    image = f"{registry.address}/swebench/one"
    registry.refuse = 1
    assert run(provider, "cat /name", image=image)[0].output == "one"
    registry.refuse = 100
    with pytest.raises(SandboxStartError, match="pulls_per_minute") as caught:
        run(provider, "true", image=f"{registry.address}/swebench/two")
    assert (caught.value.kind, caught.value.retryable) == ("rate_limited", True)


def test_the_budget_is_kept_by_removing_the_longest_unused_of_ours(
    provider: DockerProvider, registry: Registry, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_images, "_KEEP_S", 0.0)
    provider._images._budget = 1
    one, two = f"{registry.address}/swebench/one:latest", f"{registry.address}/swebench/two:latest"
    run(provider, "true", image=one)
    run(provider, "true", image=two)
    there = {tag for row in client.images() for tag in row["RepoTags"] or []}
    assert one not in there
    assert PLAIN in there
    assert run(provider, "cat /name", image=two)[0].output == "two"  # pulled again where it had to give way, too


# ------------------------------------------------------------------------------------- the farm's commands


def test_a_rollout_from_end_to_end(client: Any, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "farm.cli", "rollout", "--tasks", "micro:benchmark", "--limit", "3", "--agent", "oracle",
        "--workers", "1", "--run", str(tmp_path / "run"),
        "--set", "sandbox.provider=docker", "--set", "cluster.slots=4",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100" in done.stdout
    assert names(client) == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("docker.host=unix:///nowhere/docker.sock", "start it, or set docker.host"),
        ("docker.host=ssh://somewhere", "must be unix:///PATH or tcp://HOST:PORT"),
        ("docker.runtime=kata", "the daemon does not know it"),
        ("docker.cpus=0", "greater than 0"),
    ],
)
def test_bad_input_is_one_line_before_any_work(setting: str, words: str, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    done = CliRunner().invoke(cli.main, [
        "rollout", "--tasks", "micro:benchmark", "--agent", "null", "--run", str(run_folder),
        "--set", "sandbox.provider=docker", "--set", setting,
    ])  # fmt: skip
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not run_folder.exists()


def test_images_are_made_ready_before_a_run() -> None:
    images = ["images", "--tasks", "micro:benchmark", "--limit", "3"]
    done = CliRunner().invoke(cli.main, [*images, "--set", "sandbox.provider=docker"])
    assert (done.exit_code, done.stdout.count("ready after")) == (0, 1)
    assert CliRunner().invoke(cli.main, images).exit_code == 2


def tasks_of(folder: Path, images: list[str]) -> None:
    for number, image in enumerate(images):
        toml = TOML.replace('[metadata.rollout_farm]\nimage = "host"\n', "").replace("demo/", f"demo-{number}/")
        own = toml.replace("[environment]", f'[environment]\ndocker_image = "{image}"')
        write_folder(folder / f"{number}", toml=own)


def test_images_that_do_not_fit_together_are_told_and_not_pulled(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.sandbox.docker.state_directory", lambda: tmp_path / "state")  # a ledger of its own
    tasks_of(tmp_path / "tasks", [f"{registry.address}/swebench/one", f"{registry.address}/swebench/two"])
    command = ["images", "--tasks", f"harbor:{tmp_path / 'tasks'}", "--set", "docker.image_budget_bytes=1"]
    done = CliRunner().invoke(cli.main, command)
    assert done.exit_code == 1, done.output
    assert "swebench/one: ready after" in done.output
    assert "does not fit beside the 1 that were made ready" in done.output
    assert {*registry.asked} == {"swebench/one"}


def test_images_are_pulled_at_the_pace_of_their_registry(client: Any, registry: Registry, tmp_path: Path) -> None:
    """A pace so slow that one image of each registry is all that an hour allows: the others are never asked for."""
    stock = Registry()
    stock.add("other/three", host_tar())
    stock.add("other/four", host_tar())
    with serving(client, stock) as other:
        images = [f"{registry.address}/swebench/one", f"{registry.address}/swebench/two"]
        images += [f"{other.address}/other/three", f"{other.address}/other/four"]
        tasks_of(tmp_path, images)
        command = ["images", "--tasks", f"harbor:{tmp_path}", "--set", "docker.pulls_per_minute=0.01"]
        done = CliRunner().invoke(cli.main, command)
        said = done.output.splitlines()
        assert done.exit_code == 1, done.output
        assert ["ready after" in line for line in said[:4]] == [True, False, True, False], done.output
        assert all("no turn to pull it comes before the deadline" in said[number] for number in (1, 3))
        assert {*registry.asked} == {"swebench/one"}
        assert {*other.asked} == {"other/three"}


def test_the_doctor_knows_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.name: check for check in checks()}
    assert found["docker"].status == "ok", found["docker"]
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    found = {check.name: check for check in checks()}
    assert found["docker"].status == "absent"
    assert "start it" in found["docker"].advice


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="runtime"):
        DockerProvider(runtime="kata")
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(UsageError, match="unix"):
        DockerProvider(host="ssh://x")
