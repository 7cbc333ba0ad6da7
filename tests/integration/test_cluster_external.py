"""A scheduler that somebody else runs, over TLS: work, drain, leave it running; who may join it, and who may not."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_kinds import make_attempt, start_cluster

from farm.cluster import Cluster, Finished
from farm.config import ClusterConfig
from farm.errors import UsageError
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded

RUNNER = """
import asyncio, os

class Runner:
    def __init__(self, *, worker):
        self.worker = worker
    async def run(self, attempt):
        await asyncio.sleep(0.05)
        return os.getpid()
    def distrust(self):
        pass
    async def close(self):
        pass
"""

# A throw-away certificate authority for this test, made by openssl; one certificate serves every role.
OPENSSL = """
for ca in ca other; do
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test-$ca \
    -keyout $ca.key -out $ca.pem
done
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test -keyout key.pem -out req.pem
openssl x509 -req -in req.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out cert.pem
openssl x509 -req -in req.pem -CA other.pem -CAkey other.key -CAcreateserial -days 2 -out other-cert.pem
"""


def tls(folder: Path) -> list[str]:
    files = {"--tls-ca-file": "ca.pem", "--tls-cert": "cert.pem", "--tls-key": "key.pem"}
    return [part for option, name in files.items() for part in (option, str(folder / name))]


def worker_arguments(address: str, folder: Path) -> list[str]:
    return [
        "worker", address, "--nthreads", "4", "--no-nanny", "--no-dashboard", "--memory-limit", "0", *tls(folder),
        "--local-directory", str(folder),
    ]  # fmt: skip


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterConfig]:
    """A scheduler and one worker of 4 slots, each a process of its own."""
    (tmp_path / "external_test_runner.py").write_text(RUNNER)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{before}" if before else str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    subprocess.run(["bash", "-ec", OPENSSL], cwd=tmp_path, check=True, capture_output=True)
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "scheduler.log").open("w+"))
        started = stack.enter_context(
            _process(
                [
                    "scheduler",
                    "--host",
                    "tls://127.0.0.1",
                    "--port",
                    "0",
                    "--no-dashboard",
                    "--no-show",
                    *tls(tmp_path),
                ],
                tmp_path,
                log,
            )
        )
        address = None
        while address is None:
            assert started.poll() is None, (tmp_path / "scheduler.log").read_text()
            address = re.search(r"tls://127\.0\.0\.1:\d+", (tmp_path / "scheduler.log").read_text())
            time.sleep(0.05)
        stack.enter_context(_process(worker_arguments(address[0], tmp_path), tmp_path, log))
        yield ClusterConfig(
            address=address[0],
            tls_ca=str(tmp_path / "ca.pem"),
            tls_cert=str(tmp_path / "cert.pem"),
            tls_key=str(tmp_path / "key.pem"),
        )


class _process:
    def __init__(self, arguments: list[str], folder: Path, log: object) -> None:
        command = [sys.executable, "-m", "dask", *arguments]
        self.popen = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)  # type: ignore[call-overload]

    def __enter__(self) -> subprocess.Popen[bytes]:
        popen: subprocess.Popen[bytes] = self.popen
        return popen

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()


pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def test_work_on_a_scheduler_of_others_over_tls(scheduler: ClusterConfig) -> None:
    async def main() -> None:
        for _ in range(2):  # the second farm finds everything as the first one left it
            cluster = await start_cluster(
                scheduler,
                workers=1,
                runner="external_test_runner:Runner",
                options={},
                scratch=Path(scheduler.tls_ca).parent,
            )
            try:
                async with asyncio.timeout(60):
                    assert cluster.address == scheduler.address
                    size = await cluster.scale(1)
                    assert (size.workers, size.slots) == (1, 4)
                    for index in range(6):
                        cluster.submit(make_attempt(index, ""))
                    events = [await cluster.events.get() for _ in range(6)]
                    assert all(isinstance(event, Finished) for event in events)
            finally:
                await cluster.close()

    asyncio.run(main())


def test_the_command_line_joins_it(scheduler: ClusterConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "farm.cli", "rollout", "--tasks", "micro:rl", "--limit", "2", "--attempts", "2"),
        *("--agent", "oracle", "--run", str(run), "--cluster", scheduler.address),
    ]
    names = ("tls_ca", "tls_cert", "tls_key")
    certificates = [part for n in names for part in ("--set", f"cluster.{n}={getattr(scheduler, n)}")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "tls_ca, tls_cert and tls_key" in refused.stderr
    done = subprocess.run([*command, *certificates], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    with DirectoryLog(run / "trajectories", create=False) as log:
        rows = [row for _, row in log.read(Cursor())]
    assert [row.outcome.reward for row in rows if isinstance(row.outcome, Graded)] == [1.0] * 4
    assert len({row.worker for row in rows}) == 1


async def start(config: ClusterConfig, **options: object) -> Cluster:
    folder = Path(config.tls_ca).parent
    return await start_cluster(
        config, workers=1, runner="external_test_runner:Runner", options=options, scratch=folder / "scratch"
    )


def test_whoever_has_no_certificate_of_its_authority_stays_outside(scheduler: ClusterConfig) -> None:
    folder = Path(scheduler.tls_ca).parent
    foreign = scheduler.model_copy(
        update={"tls_ca": str(folder / "other.pem"), "tls_cert": str(folder / "other-cert.pem")}
    )
    plain = scheduler.model_copy(update={"address": scheduler.address.replace("tls://", "tcp://")})
    for config in (foreign, plain):
        with pytest.raises(UsageError, match=r"no scheduler answers .*certificates of the same authority"):
            asyncio.run(start(config))


def test_a_worker_that_comes_later_and_is_not_fit_takes_no_attempt(
    scheduler: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(scheduler.tls_ca).parent
    log, elsewhere = folder / "late.log", folder / "elsewhere"
    elsewhere.mkdir()

    async def main() -> None:
        cluster = await start(scheduler)
        try:
            monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].removeprefix(str(folder)))  # without the runner
            arguments = worker_arguments(scheduler.address, folder)
            with log.open("w") as stream, _process(arguments, elsewhere, stream) as late:
                async with asyncio.timeout(100):
                    assert await asyncio.to_thread(late.wait) == 0
                    assert (await cluster.scale(1)).workers == 1
                    cluster.submit(make_attempt(0, ""))
                    assert isinstance(await cluster.events.get(), Finished)
        finally:
            await cluster.close()

    asyncio.run(main())
    assert "No module named 'external_test_runner'; this worker ends" in log.read_text()
