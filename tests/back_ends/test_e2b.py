"""E2B through the real SDK, against a local server that speaks its protocol and breaks as told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from e2b_double import E2BDouble, Fault
from e2b_service import service

from farm import cli
from farm.errors import SandboxLostError, SandboxStartError, UsageError
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox import e2b as e2b_module
from farm.sandbox import runner_sandbox
from farm.sandbox.e2b import E2BProvider, template_name

CREATE, START, KILL = "POST /v2/sandboxes$", "POST /process.Process/Start", "DELETE /sandboxes/"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[E2BDouble]:
    """With short pauses: how long is waited is the limiter's own test."""
    monkeypatch.setattr(e2b_module, "_BACK_OFF_S", (0.2,))
    monkeypatch.setattr(e2b_module, "_PAUSES_S", (0.05,))
    with service() as running:
        yield running


def provider(tmp_path: Path, **changes: object) -> E2BProvider:
    given = {"ledger": str(tmp_path / "ledger"), "creates_per_s": 1000.0, "concurrent": 50, "user": "agent"}
    return E2BProvider(**{**given, **changes})  # type: ignore[arg-type]


def spec(**changes: object) -> SandboxSpec:
    given: dict[str, object] = {"owner": "e2b", "deadline_at_s": time.time() + 60}
    return SandboxSpec(**{**given, **changes})  # type: ignore[arg-type]


def inside(made: E2BProvider, body: Callable[[Sandbox], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        async with made.open(spec(**changes)) as sandbox:
            await body(sandbox)

    asyncio.run(run())


async def says_on(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo on", timeout_s=20)).output == "on\n"


def leaves_nothing(made: E2BProvider, double: E2BDouble) -> bool:
    return double.running_now == [] and made._limit.held() == 0


# ------------------------------------------------------------------------------------------- creation


@pytest.mark.parametrize(
    "fault",
    [
        Fault(where=CREATE, times=2, status=429, message="rate limit"),
        Fault(where=CREATE, times=2, status=503, message="busy"),
        Fault(where=CREATE, times=1, status=502, message="bad gateway"),
        Fault(where=CREATE, times=1, status=500, message="internal"),
        Fault(where=CREATE, times=2),
    ],
    ids=["429", "503", "502", "500", "cut"],
)
def test_a_creation_that_is_refused_for_now(double: E2BDouble, tmp_path: Path, fault: Fault) -> None:
    made = provider(tmp_path)
    double.faults.append(fault)
    inside(made, says_on)
    assert len(double.created) == 1
    assert leaves_nothing(made, double)


@pytest.mark.parametrize("status", [0, 502, 503, 504])
def test_a_lost_answer_neither_leaks_nor_doubles(double: E2BDouble, tmp_path: Path, status: int) -> None:
    made = provider(tmp_path)
    double.faults.append(Fault(where=CREATE, status=status, after=True))
    inside(made, says_on)
    assert len(double.created) == 1  # asked for again under the same key
    assert leaves_nothing(made, double)


def test_what_was_made_in_spite_of_every_answer_lost_is_killed(double: E2BDouble, tmp_path: Path) -> None:
    made = provider(tmp_path)
    double.faults.append(Fault(where=CREATE, times=99, after=True))
    with pytest.raises(SandboxStartError) as caught:
        inside(made, says_on)
    assert caught.value.retryable
    assert len(double.created) == 1
    assert leaves_nothing(made, double)


@pytest.mark.parametrize(
    ("fault", "changes", "kind"),
    [
        (None, {"image": "none:latest"}, "template"),
        (None, {"deadline_at_s": time.time() + 100_000}, "lifetime"),
        (Fault(where=CREATE, times=9, status=402, message="payment required"), {}, "quota"),
        (Fault(where=CREATE, times=9, status=403, message="quota exceeded"), {}, "quota"),
        (Fault(where=CREATE, times=9, status=401, message="unauthorized"), {}, "key"),
    ],
)
def test_what_nobody_can_wait_away(
    double: E2BDouble, tmp_path: Path, fault: Fault | None, changes: dict[str, object], kind: str
) -> None:
    made = provider(tmp_path)
    double.faults += [fault] if fault else []
    with pytest.raises(SandboxStartError) as caught:
        inside(made, says_on, **changes)
    assert (caught.value.kind, caught.value.retryable) == (kind, False)
    assert double.requests.count("POST /v2/sandboxes") == 1
    assert leaves_nothing(made, double)


def test_the_account_is_never_overdrawn_by_several_workers(double: E2BDouble, tmp_path: Path) -> None:
    """Three providers, as three worker processes would have, on one ledger."""

    async def one(made: E2BProvider) -> None:
        async with made.open(spec()) as sandbox:
            await says_on(sandbox)

    async def run() -> None:
        workers = [provider(tmp_path, creates_per_s=20.0, concurrent=3) for _ in range(3)]
        await asyncio.gather(*(one(workers[n % 3]) for n in range(12)))

    asyncio.run(run())
    assert len(double.created) == 12
    assert double.most_at_once <= 3
    assert max(double.created_at_s) - min(double.created_at_s) >= 11 / 20 * 0.9


def test_a_full_account_is_waited_for_and_then_given_up(double: E2BDouble, tmp_path: Path) -> None:
    made = provider(tmp_path, concurrent=1)

    async def run() -> None:
        async with made.open(spec()):
            with pytest.raises(SandboxStartError) as caught:
                async with made.open(spec(deadline_at_s=time.time() + 1)):
                    raise AssertionError("started")
            assert (caught.value.kind, caught.value.retryable) == ("account_wait", True)

    asyncio.run(run())
    assert leaves_nothing(made, double)


def test_cancelled_at_any_moment(double: E2BDouble, tmp_path: Path) -> None:
    made = provider(tmp_path)

    async def use() -> None:
        async with made.open(spec()) as sandbox:
            await sandbox.exec("sleep 60", timeout_s=60)

    async def run() -> None:
        for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.3):
            task = asyncio.create_task(use())
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert leaves_nothing(made, double), delay_s

    asyncio.run(run())


# ----------------------------------------------------------------------------------------------- use


def test_a_severed_stream_runs_nothing_twice(double: E2BDouble, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        double.faults.append(Fault(where=START, times=2, midway=True))
        done = await sandbox.exec("echo once >> /tmp/log; sleep 0.3; cat /tmp/log", timeout_s=20)
        assert (done.exit_code, done.output) == (0, "once\n")
        double.faults.append(Fault(where=START, after=True))
        assert (await sandbox.exec("echo once >> /tmp/log2; cat /tmp/log2", timeout_s=20)).output == "once\n"
        for status in (502, 503, 0):
            double.faults.append(Fault(where=START, status=status))
            assert (await sandbox.exec(f"echo {status}", timeout_s=20)).output == f"{status}\n"

    inside(provider(tmp_path), body)


def test_no_stream_is_held_for_a_long_command(
    double: E2BDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_sandbox, "_WAIT_S", 0.3)

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("sleep 2; echo done", timeout_s=20)).output == "done\n"
        assert double.requests.count("POST /process.Process/Start") >= 4

    inside(provider(tmp_path), body)
    assert double.longest_stream_s < 1.8


def test_a_sandbox_that_dies_early_is_lost(double: E2BDouble, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(double.end, sandbox.id)
        with pytest.raises(SandboxLostError):
            await task
        for use in (sandbox.exec("true", timeout_s=1), sandbox.read_file("/x"), sandbox.write_files({"/x": b""})):
            with pytest.raises(SandboxLostError):
                await use

    made = provider(tmp_path)
    inside(made, body)
    assert leaves_nothing(made, double)


@pytest.mark.usefixtures("double")
def test_a_sandbox_ends_at_its_deadline(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxLostError):
            await sandbox.exec("sleep 60", timeout_s=60)

    inside(provider(tmp_path), body, deadline_at_s=time.time() + 3)


def test_a_full_disk_is_the_callers_answer(double: E2BDouble, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        double.faults.append(Fault(where="POST /files", status=507, message="not enough disk space"))
        with pytest.raises(OSError, match="space"):
            await sandbox.write_files({"/tmp/x": b"x"})
        await says_on(sandbox)

    inside(provider(tmp_path), body)


@pytest.mark.usefixtures("double")
def test_a_time_out_kills_what_made_a_session_of_its_own(tmp_path: Path) -> None:
    escape = "setsid bash -c 'while :; do echo x >> /tmp/alive; sleep 0.05; done' > /dev/null 2>&1 & sleep 60"

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(escape, timeout_s=1.0)).timed_out
        sizes = await sandbox.exec("stat -c %s /tmp/alive; sleep 0.4; stat -c %s /tmp/alive", timeout_s=10)
        one, two = sizes.output.split()
        assert one == two

    inside(provider(tmp_path), body)


@pytest.mark.usefixtures("double")
def test_a_command_that_kills_its_supervisor_reads_as_killed(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.exec("kill -9 $PPID; sleep 60", timeout_s=30)
        assert (done.exit_code, done.timed_out) == (137, False)
        await says_on(sandbox)

    inside(provider(tmp_path), body)


# --------------------------------------------------------------------------------- sweeping, bad input


def test_sweep_goes_by_metadata(double: E2BDouble, tmp_path: Path) -> None:
    made = provider(tmp_path)

    async def run() -> None:
        now_s = time.time()
        async with made.open(spec(deadline_at_s=now_s + 30)), made.open(spec(deadline_at_s=now_s + 300)):
            stranger = await made._sdk.AsyncSandbox.create("base", metadata={"deadline": "1"}, **made._account)
            double.faults.append(Fault(where="GET /v2/sandboxes", status=503))
            assert await made.sweep(now_s=now_s + 40) == 1
            assert len(double.running_now) == 2
            assert stranger.sandbox_id in double.running_now

    asyncio.run(run())


def test_a_kill_that_fails_is_tried_again(double: E2BDouble, tmp_path: Path) -> None:
    made = provider(tmp_path)
    double.faults.append(Fault(where=KILL, times=2))
    inside(made, says_on)
    assert leaves_nothing(made, double)


ROLLOUT = ("rollout", "--tasks", "micro:benchmark", "--agent", "oracle", "--limit", "3", "--workers", "1",
           "--set", "sandbox.provider=e2b", "--set", "e2b.creates_per_s=20", "--set", "e2b.user=agent")  # fmt: skip


def test_a_rollout_from_end_to_end(double: E2BDouble, tmp_path: Path) -> None:
    double.faults += [Fault(where=CREATE, after=True), Fault(where=START, midway=True), Fault(where=CREATE, status=429)]
    command = [sys.executable, "-m", "farm.cli", *ROLLOUT, "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100" in done.stdout
    assert double.running_now == []
    assert [one["owner"] for one in double.created].count("check") == 1  # before the run
    assert len(double.created) == 1 + 6  # an agent's and a grader's each


def test_bad_input_is_one_line_before_any_work(
    double: E2BDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*settings: str) -> str:
        words = (word for setting in settings for word in ("--set", setting))
        done = CliRunner().invoke(cli.main, [*ROLLOUT, "--run", str(tmp_path / "run"), *words])
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
        assert not (tmp_path / "run").exists()
        return done.stderr

    assert "farm images" in refused('e2b.templates={"host" = "not-built"}')
    assert "e2b.concurrent" in refused("e2b.concurrent=0")
    assert "lower limits.episode_s" in refused("limits.episode_s=3590")  # an hour is all that the double's account has
    double.faults.append(Fault(where=CREATE, status=402, message="payment required"))
    assert "raise the account's limits" in refused()
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "1" * 40)
    assert "set E2B_API_KEY" in refused()
    monkeypatch.delenv("E2B_API_KEY")
    assert "set E2B_API_KEY" in refused()
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    assert "reachable" in refused()
    assert double.created == []


def test_a_check_tries_the_account_once_and_leaves_nothing(double: E2BDouble, tmp_path: Path) -> None:
    made = provider(tmp_path, life_s=3_000.0)
    double.faults.append(Fault(where=CREATE, after=True))  # the answer is lost
    asyncio.run(made.check(["host"]))
    assert len(double.created) == 1
    assert leaves_nothing(made, double)


def test_an_account_that_is_full_just_now_keeps_no_run_from_starting(double: E2BDouble, tmp_path: Path) -> None:
    double.faults.append(Fault(where=CREATE, times=99, status=429, message="maximum number of concurrent sandboxes"))
    asyncio.run(provider(tmp_path, life_s=3_000.0).check(["host"]))
    assert double.created == []


@pytest.mark.parametrize("status", [429, 503, 0])
def test_a_check_of_many_templates_is_no_attack_and_survives_a_refusal(
    double: E2BDouble, tmp_path: Path, status: int
) -> None:
    images = [f"image-{number}" for number in range(300)]
    made = provider(tmp_path, templates={image: image for image in images[:-1]})
    double.built |= dict.fromkeys(images[:-1], "host")
    for where in ("GET /v2/sandboxes$", "GET /templates/aliases/"):
        double.faults.append(Fault(where=where, times=3, status=status, message="planned"))
    asyncio.run(made.check(images[:-1]))
    assert double.templates_at_once <= 8
    with pytest.raises(UsageError, match=r"no template 'farm-image-299-\w+' for image 'image-299'; build it"):
        asyncio.run(made.check(images))


def test_a_service_that_keeps_refusing_is_told_after_a_few_tries(double: E2BDouble, tmp_path: Path) -> None:
    double.faults.append(Fault(where="GET /templates/aliases/", times=10_000, status=429, message="rate limit"))
    made = provider(tmp_path, templates={f"image-{number}": f"known-{number}" for number in range(300)})
    with pytest.raises(UsageError, match=r"429.*raise the account's limits"):
        asyncio.run(made.check(f"image-{number}" for number in range(300)))
    assert sum(request.startswith("GET /templates/") for request in double.requests) <= 16 * 5


def test_a_template_that_is_there_is_not_built_and_one_that_fails_is_told(double: E2BDouble, tmp_path: Path) -> None:
    made = provider(tmp_path, templates={"known": "base"})
    asyncio.run(made.prepare("known", deadline_at_s=time.time() + 20))
    assert double.requests == ["GET /templates/aliases/base"]
    with pytest.raises(SandboxStartError, match="404") as caught:  # the double builds nothing
        asyncio.run(made.prepare("debian:12", deadline_at_s=time.time() + 20))
    assert caught.value.kind == "template"
    assert double.requests[-1].startswith("POST /v3/templates")


def test_bad_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(UsageError, match="E2B_API_KEY"):
        provider(tmp_path)


def test_templates_are_named_by_image() -> None:
    name = template_name("swebench/sweb.eval.x86_64.django_1776_django-11099:latest")
    assert name.startswith("farm-")
    assert name != template_name("swebench/sweb.eval.x86_64.django_1776_django-11095:latest")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
