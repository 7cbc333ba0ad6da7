"""The contract of SandboxProvider, on every implementation. ``real`` marks what needs commands really run.

Docker and E2B need more than a plain installation has; `make test-sandboxes` names them in ROLLOUT_FARM_BACK_ENDS and
runs this suite on them: against a real Docker engine, and through the real SDK against a local server that speaks E2B.
Harbor needs Python 3.12; `make test-harbor` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from farm.errors import SandboxLostError, SandboxStartError, UsageError
from farm.protocols import ExecResult, Sandbox, SandboxProvider, SandboxSpec
from farm.sandbox import PROVIDERS, make_provider
from farm.sandbox.fake import FakeProvider, result

ELSEWHERE = {"docker", "e2b", "harbor"}
REAL = ["bubblewrap", *filter(None, os.environ.get("ROLLOUT_FARM_BACK_ENDS", "").split(","))]


def echo(command: str, files: dict[str, bytes]) -> ExecResult:
    """Enough of a shell for the contract."""
    word, _, rest = command.partition(" ")
    if word == "cat":
        return result(files[rest].decode())
    return result(f"{rest}\n") if word == "echo" else result(exit_code=int(rest) if word == "exit" else 0)


@pytest.fixture(params=[*REAL, "fake"])
def provider(request: pytest.FixtureRequest) -> Iterator[SandboxProvider]:
    if request.param == "fake":
        yield FakeProvider(echo)
    else:
        yield from started(request.param)


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest) -> Iterator[SandboxProvider]:
    yield from started(request.param)


@pytest.fixture(params=REAL)
def two(request: pytest.FixtureRequest) -> Iterator[tuple[SandboxProvider, SandboxProvider]]:
    """Instances that know nothing of each other, as in two processes of one farm."""
    yield from started_twice(request.param)


def started(name: str) -> Iterator[SandboxProvider]:
    for one, _ in started_twice(name):
        yield one


def started_twice(name: str) -> Iterator[tuple[SandboxProvider, SandboxProvider]]:
    with contextlib.ExitStack() as stack:
        if name == "e2b":
            from e2b_service import local_account

            options = stack.enter_context(local_account())
        elif name == "harbor":  # a Harbor environment that runs anywhere: the farm's own
            options = {"environment": "farm.harbor.environment:FarmEnvironment", "kwargs": {"sandbox": "bubblewrap"}}
        else:
            options = {}
        both = make_provider(name, **options), make_provider(name, **options)
        for provider in both:
            stack.callback(getattr(provider, "close", lambda: None))
        yield both


@contextlib.contextmanager
def no_such_image(provider: SandboxProvider) -> Iterator[str]:
    """The name of one; of a registry that answers, where the provider would ask one."""
    if provider.name != "docker":
        yield "none:latest"
        return
    from local_registry import Registry

    with Registry().running() as registry:
        yield f"{registry.address}/none:latest"


def spec(**changes: object) -> SandboxSpec:
    return SandboxSpec(**{"owner": "contract", "deadline_at_s": time.time() + 60, **changes})  # type: ignore[arg-type]


def inside(provider: SandboxProvider, body: Callable[[Sandbox], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        async with provider.open(spec(**changes)) as sandbox:
            await body(sandbox)

    asyncio.run(run())


def test_every_provider_is_tested() -> None:
    assert set(PROVIDERS) == {*REAL, *ELSEWHERE, "fake"}


def test_an_unknown_provider_is_bad_input() -> None:
    with pytest.raises(UsageError, match="bubblewrap, docker, e2b, fake, harbor"):
        make_provider("podman")
    with pytest.raises(UsageError, match="colour"):
        make_provider("fake", colour="red")


def test_exec_gives_output_and_exit_code(provider: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert sandbox.id
        done = await sandbox.exec("echo hello", timeout_s=10)
        assert (done.exit_code, done.output, done.truncated, done.timed_out) == (0, "hello\n", False, False)
        assert (await sandbox.exec("exit 3", timeout_s=10)).exit_code == 3

    inside(provider, body)


def test_files_go_in_and_come_out(provider: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        big = bytes(range(256)) * 2000
        await sandbox.write_files({"/testbed/a/b/c.txt": b"one\n", "/testbed/big": big, "/tmp/empty": b""})
        await sandbox.write_files({"/testbed/a/b/c.txt": b"two\n"})
        await sandbox.write_files({})
        assert await sandbox.read_file("/testbed/a/b/c.txt") == b"two\n"
        assert await sandbox.read_file("/testbed/big", max_bytes=len(big)) == big
        assert await sandbox.read_file("/tmp/empty") == b""
        assert (await sandbox.exec("cat /testbed/a/b/c.txt", timeout_s=10)).output == "two\n"

    inside(provider, body)


def test_files_that_are_not_there(provider: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_files({"/testbed/long": b"x" * 101})
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("/testbed/none")
        with pytest.raises(ValueError, match="100 bytes"):
            await sandbox.read_file("/testbed/long", max_bytes=100)
        with pytest.raises(ValueError, match="absolute"):
            await sandbox.write_files({"testbed/x": b""})
        assert len(await sandbox.read_file("/testbed/long", max_bytes=101)) == 101

    inside(provider, body)


def test_sandboxes_share_nothing(provider: SandboxProvider) -> None:
    async def run() -> None:
        async with provider.open(spec()) as one, provider.open(spec()) as two:
            assert one.id != two.id
            await one.write_files({"/testbed/mine": b"1"})
            with pytest.raises(FileNotFoundError):
                await two.read_file("/testbed/mine")

    asyncio.run(run())


def test_a_closed_sandbox_is_lost(provider: SandboxProvider) -> None:
    async def run() -> None:
        async with provider.open(spec()) as sandbox:
            pass
        for use in (sandbox.exec("true", timeout_s=1), sandbox.read_file("/x"), sandbox.write_files({"/x": b""})):
            with pytest.raises(SandboxLostError):
                await use

    asyncio.run(run())


def test_an_error_in_the_body_comes_through(provider: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        raise LookupError(sandbox.id)

    with pytest.raises(LookupError):
        inside(provider, body)


def test_a_sandbox_past_its_deadline_is_swept(provider: SandboxProvider) -> None:
    async def run() -> None:
        now_s = time.time()
        async with provider.open(spec(deadline_at_s=now_s + 40)) as overdue, provider.open(spec()) as other:
            assert await provider.sweep(now_s=now_s + 50) >= 1
            with pytest.raises(SandboxLostError):
                await overdue.exec("true", timeout_s=1)
            assert (await other.exec("echo on", timeout_s=10)).output == "on\n"

    asyncio.run(run())


def test_a_sweep_finds_what_another_instance_opened(two: tuple[SandboxProvider, SandboxProvider]) -> None:
    """As those of the driver and of the workers do, which have no sandboxes of their own."""
    owner, sweeper = two

    async def run() -> None:
        now_s = time.time()
        async with owner.open(spec(deadline_at_s=now_s + 40)) as overdue, owner.open(spec()) as other:
            assert await sweeper.sweep(now_s=now_s + 50) >= 1
            with pytest.raises(SandboxLostError):
                await overdue.exec("true", timeout_s=1)
            assert (await other.exec("echo on", timeout_s=10)).output == "on\n"

    asyncio.run(run())


def test_cpu_time_grows(provider: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        before = await sandbox.cpu_s()
        await sandbox.exec("for i in {1..20000}; do :; done", timeout_s=10)
        assert await sandbox.cpu_s() > before

    inside(provider, body)


def test_streams_are_merged_in_order(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.exec("echo 1; echo 2 >&2; printf '\\xff'; echo 3; exit 7", timeout_s=10)
        assert (done.exit_code, done.output) == (7, "1\n2\n�3\n")

    inside(real, body)


def test_where_and_with_what_a_command_runs(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("pwd", timeout_s=10)).output == "/src/project\n"
        assert (await sandbox.exec("pwd", timeout_s=10, cwd="/tmp")).output == "/tmp\n"
        done = await sandbox.exec('echo "$A $HOME"', timeout_s=10, env={"A": "x y"})
        assert done.output == "x y /home/agent\n"
        assert (await sandbox.exec('echo "<$A>"', timeout_s=10)).output == "<>\n"
        assert (await sandbox.exec("true", timeout_s=10, cwd="/none")).exit_code == 126

    inside(real, body, workdir="/src/project")


def test_files_stay_between_commands(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec("echo kept > f; export LOST=1; cd /", timeout_s=10)
        assert (await sandbox.exec("cat f; echo $LOST", timeout_s=10)).output == "kept\n\n"

    inside(real, body)


def test_output_is_capped_by_bytes(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.exec("head -c 300000 /dev/zero | tr '\\0' x; exit 4", timeout_s=10)
        assert (done.exit_code, done.output, done.truncated) == (4, "x" * 1000, True)
        exact = await sandbox.exec("head -c 1000 /dev/zero | tr '\\0' x", timeout_s=10)
        assert (exact.output, exact.truncated) == ("x" * 1000, False)

    inside(real, body, output_bytes=1000)


def test_much_output_fits_when_it_may(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.exec("head -c 700000 /dev/zero | tr '\\0' x", timeout_s=10)
        assert (len(done.output), done.truncated) == (700_000, False)

    inside(real, body, output_bytes=1 << 20)


def test_a_command_past_its_time_is_killed_and_the_sandbox_stays(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.exec("echo early; sleep 60", timeout_s=0.2)
        assert (done.timed_out, done.output) == (True, "early\n")
        assert (await sandbox.exec("echo still here", timeout_s=10)).output == "still here\n"

    inside(real, body)


def test_a_cancelled_command_is_stopped_and_the_sandbox_stays(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.exec("echo wrong; sleep 60; echo wrong", timeout_s=60))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await sandbox.exec("echo right; pgrep sleep", timeout_s=10)).output == "right\n"

    inside(real, body)


def test_commands_given_at_once_run_one_after_the_other(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        commands = (sandbox.exec(f"echo {n}; sleep 0.01; echo {n}", timeout_s=10) for n in range(5))
        assert [done.output for done in await asyncio.gather(*commands)] == [f"{n}\n{n}\n" for n in range(5)]

    inside(real, body)


def test_a_command_that_bash_can_not_take(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        for command in ("echo a\0b", "#" * (128 << 10), "#" * (1 << 20)):
            done = await sandbox.exec(command, timeout_s=10)
            assert done.exit_code == 126
            assert done.output.startswith("bash: ")
        assert (await sandbox.exec("#" * (100 << 10), timeout_s=10)).exit_code == 0
        assert (await sandbox.exec("if", timeout_s=10)).exit_code == 2

    inside(real, body)


def test_special_files_can_not_stall_reading(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec("mkfifo fifo; mkdir dir; ln -s dir/none dangling; ln -s /dev/zero zero", timeout_s=10)
        for path in ("/testbed/fifo", "/testbed/dir", "/testbed/dangling", "/testbed/zero"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)
        with pytest.raises(OSError, match="directory"):
            await sandbox.write_files({"/testbed/dir": b""})
        assert (await sandbox.exec("echo on", timeout_s=10)).output == "on\n"

    inside(real, body)


def test_an_unknown_image_does_not_start(real: SandboxProvider) -> None:
    async def body(sandbox: Sandbox) -> None:
        raise AssertionError(sandbox.id)

    with no_such_image(real) as image:
        with pytest.raises(SandboxStartError, match=image) as caught:
            inside(real, body, image=image)
        assert not caught.value.retryable


def test_many_at_once(real: SandboxProvider) -> None:
    async def one(n: int) -> str:
        async with real.open(spec()) as sandbox:
            return (await sandbox.exec(f"echo {n}", timeout_s=30)).output

    many = 24 if real.name in ("docker", "harbor") else 96  # these start a few a second

    async def run() -> list[str]:
        return await asyncio.gather(*(one(n) for n in range(many)))

    assert asyncio.run(run()) == [f"{n}\n" for n in range(many)]
