"""The parts of farm/cluster that need neither Dask nor another host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from farm.cluster.address import cluster_address, own_address
from farm.cluster.crews import LaunchedCrew, PlanView
from farm.cluster.examine import check_engines, check_software, examine, software
from farm.cluster.launcher import Launch, Phase, WorkerState, make_launcher, worker_command
from farm.cluster.roster import RosterRules
from farm.cluster.ssh import SshLauncher, choose_host, explain
from farm.cluster.ticket import Credentials, Expected, Ticket
from farm.config import ClusterConfig, FarmConfig, cluster_overrides, parse_config
from farm.errors import FarmError, UsageError
from farm.preflight import check_cluster


def make_expected(folder: Path, **changes: Any) -> Expected:
    probe = folder / "probe"
    probe.write_text("this start")
    values = {
        "software": software(),
        "probe": str(probe),
        "probe_text": "this start",
        "provider": "fake",
        "provider_options": {},
    }
    return Expected(**{**values, **changes})


def make_ticket(folder: Path) -> Ticket:
    return Ticket(
        scheduler="tls://10.0.0.1:8786",
        slots=4,
        credentials=Credentials(ca="CA", cert="CERT", key="THE KEY"),
        expected=make_expected(folder, engines=("http://10.0.0.2:30000",)),
        environment={"E2B_API_KEY": "THE SECRET"},
    )


# ------------------------------------------------------------------------------------------------ ticket


def test_a_ticket_comes_back_as_it_was_on_one_line_and_shows_no_secret(tmp_path: Path) -> None:
    ticket = make_ticket(tmp_path)
    text = ticket.to_json()
    assert "\n" not in text
    assert Ticket.from_json(text) == ticket
    assert "THE KEY" not in repr(ticket)
    assert "THE SECRET" not in repr(ticket)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}', "not JSON"])
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a farm's ticket"):
        Ticket.from_json(text)


def test_a_ticket_of_another_version_is_refused(tmp_path: Path) -> None:
    text = make_ticket(tmp_path).to_json().replace('"schema_version": 1', '"schema_version": 2')
    with pytest.raises(UsageError, match="version 2, this worker reads 1"):
        Ticket.from_json(text)


# --------------------------------------------------------------------------------------------- examination


def test_software_must_be_the_same_and_only_the_minor_version_of_python_counts() -> None:
    here = software()
    check_software(here, {**here, "python": here["python"] + ".99"}, where="host")
    for name in here:
        with pytest.raises(UsageError, match=f"host: has {name} other, the farm has"):
            check_software(here, {**here, name: "other"}, where="host")
    with pytest.raises(UsageError, match="has dask none"):
        check_software({"dask": "1"}, {}, where="host")


def test_the_storage_is_looked_at_from_the_worker(tmp_path: Path) -> None:
    examine(make_expected(tmp_path), patience_s=0)
    assert [path.name for path in tmp_path.iterdir()] == ["probe"], "the check left something behind"
    with pytest.raises(UsageError, match=r"does not see .*nowhere/probe.*same path"):
        examine(make_expected(tmp_path, probe=str(tmp_path / "nowhere" / "probe")), patience_s=0)
    with pytest.raises(UsageError, match="sees another file at"):
        examine(make_expected(tmp_path, probe_text="another start"), patience_s=0)
    with pytest.raises(UsageError, match="sandbox 'nothing' is unknown"):
        examine(make_expected(tmp_path, provider="nothing"), patience_s=0)


def test_an_engine_that_is_not_reached() -> None:
    with pytest.raises(UsageError, match=r"reaches no engine at http://127\.0\.0\.1:1 .*engine\.host"):
        check_engines(("http://127.0.0.1:1",))


# --------------------------------------------------------------------------------------------------- ssh


def test_the_least_used_host_that_has_room() -> None:
    hosts = ("a", "b", "c")
    assert choose_host(hosts, {}, set(), each=1) == "a"
    assert choose_host(hosts, {"a": 1}, set(), each=2) == "b"
    assert choose_host(hosts, {"a": 1, "b": 1, "c": 1}, {"a"}, each=2) == "b"
    assert choose_host(hosts, {"a": 1, "b": 1}, {"c"}, each=1) is None


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (2, "motd\nfarm: host: has dask 1, the farm has 2\n", "host: has dask 1, the farm has 2"),
        (255, "Host key verification failed.", "its host key is not known"),
        (255, "root@a: Permission denied (publickey).", "it takes no key of this user"),
        (255, "ssh: connect to host a port 22: Connection refused", "no ssh server listens there"),
        (255, "ssh: Could not resolve hostname a: Name or service not known", "there is no host of that name"),
        (255, "something new", "ssh says: something new; try: ssh a true"),
        (255, "", "the connection broke"),
        (127, "sh: /x/python: not found", "set cluster.python"),
        (1, "/usr/bin/python: No module named farm", "set cluster.python"),
        (9, "", "the worker ended with 9: it said nothing"),
    ],
)
def test_what_went_wrong_with_a_host_is_one_line(code: int, said: str, expected: str) -> None:
    told = explain("a", code, said)
    assert told.startswith("cluster.ssh.hosts 'a': ")
    assert expected in told
    assert "\n" not in told


FAKE_SSH = """#!/bin/sh
# As ssh does: options, a host, a command for a shell there.
while [ "${1#-}" != "$1" ]; do shift; done
[ "$1" = down ] && { echo 'ssh: connect to host down port 22: Connection refused' >&2; exit 255; }
shift
exec sh -c "$*"
"""
FAKE_WORKER = """#!/bin/sh
# As a worker: a ticket on the first line, then until the end of input.
read ticket
case "$ticket" in *"THE KEY"*) ;; *) exit 9;; esac
echo "$@" >>{folder}/started
[ "$5" = --check ] && exit 0
cat >/dev/null
echo ended >>{folder}/started
"""


def with_ssh(
    folder: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[SshLauncher], Awaitable[None]], *hosts: str
) -> list[str]:
    """What the fake workers wrote."""
    for name, text in (("ssh", FAKE_SSH), ("worker", FAKE_WORKER.replace("{folder}", str(folder)))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    config = ClusterConfig.model_validate(
        {"kind": "ssh", "workers": 1, "python": str(folder / "worker"), "ssh": {"hosts": hosts}}
    )
    launch = Launch(config=config, ticket=make_ticket(folder), label="farm-x", logs=folder, folder=folder)

    async def main() -> None:
        launcher = make_launcher("ssh", launch)
        assert isinstance(launcher, SshLauncher)
        try:
            async with asyncio.timeout(60):
                await use(launcher)
        finally:
            await launcher.close()

    asyncio.run(main())
    started = folder / "started"
    return started.read_text().splitlines() if started.exists() else []


async def ended(launcher: SshLauncher, name: str) -> WorkerState:
    while (state := (await launcher.look())[name]).phase is not Phase.ENDED:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return state


def test_ssh_workers_live_as_long_as_their_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(launcher: SshLauncher) -> None:
        await launcher.prepare()
        await launcher.start("worker-0")
        states = await launcher.look()
        assert {name: (state.phase, state.where) for name, state in states.items()} == {
            "worker-0": (Phase.RUNNING, "up")
        }
        with pytest.raises(FarmError, match="no ssh host has room"):
            await launcher.start("worker-1")
        await launcher.withdraw("worker-0")
        assert (await launcher.look())["worker-0"].phase is Phase.RUNNING, "it had begun"
        await launcher.stop("worker-0")
        await launcher.stop("nobody")
        assert not await launcher.look()

    said = with_ssh(tmp_path, monkeypatch, use, "up")
    assert said == [
        "-m farm.cluster.worker --ticket - --check",
        "-m farm.cluster.worker --ticket - --name worker-0",
        "ended",
    ]


def test_a_host_that_is_down_is_told_before_the_start_and_rests_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(launcher: SshLauncher) -> None:
        with pytest.raises(UsageError, match=r"'down': .*Connection refused"):
            await launcher.prepare()
        await launcher.start("worker-0")
        state = await ended(launcher, "worker-0")
        assert (state.code, state.where) == (255, "down")
        assert "no ssh server listens there" in state.message
        await launcher.stop("worker-0")
        for name in ("worker-1", "worker-2"):  # never where it just failed
            with contextlib.suppress(FarmError):
                await launcher.start(name)
        assert {state.where for state in (await launcher.look()).values()} == {"up"}

    with_ssh(tmp_path, monkeypatch, use, "down", "up")


def test_without_the_program_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(launcher: SshLauncher) -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        with pytest.raises(UsageError, match="the program ssh is not installed"):
            await launcher.prepare()

    with_ssh(tmp_path, monkeypatch, use, "up")


def test_the_ticket_is_never_in_a_command(tmp_path: Path) -> None:
    launch = Launch(
        config=ClusterConfig(python="/venv/bin/python"),
        ticket=make_ticket(tmp_path),
        label="farm-x",
        logs=tmp_path,
        folder=tmp_path,
    )
    assert worker_command(launch, ticket="-", name="worker-3") == [
        "/venv/bin/python", "-m", "farm.cluster.worker", "--ticket", "-", "--name", "worker-3",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- crews


class FakeLauncher:
    """Workers that are there at once; starts after the third are refused."""

    def __init__(self) -> None:
        self.states: dict[str, WorkerState] = {}
        self.stopped: list[str] = []
        self.silent = False

    async def prepare(self) -> None:
        return

    async def start(self, name: str) -> None:
        if len(self.states) >= 3:
            raise FarmError("no more room", kind="no_room")
        self.states[name] = WorkerState(phase=Phase.RUNNING)

    async def look(self) -> Mapping[str, WorkerState]:
        if self.silent:
            raise FarmError("the controller does not answer", kind="no_answer")
        return dict(self.states)

    async def withdraw(self, name: str) -> None:
        return

    async def stop(self, name: str) -> None:
        self.stopped.append(name)
        self.states.pop(name, None)

    async def close(self) -> None:
        self.states.clear()


def plan(*live: str) -> PlanView:
    return PlanView(live=frozenset(live), slots=4 * len(live), draining=frozenset(), empty_names=(), empty_addresses=())


def test_a_crew_starts_what_is_missing_and_tells_what_failed() -> None:
    async def main() -> None:
        launcher, now = FakeLauncher(), [100.0]
        ends = contextlib.AsyncExitStack()
        ends.push_async_callback(launcher.close)
        crew = LaunchedCrew(None, launcher, RosterRules(), ends, clock=lambda: now[0])  # the client retires nobody here
        await crew.reach(2, plan())
        assert list(launcher.states) == ["worker-0", "worker-1"]
        await crew.reach(2, plan("worker-0"))
        assert list(launcher.states) == ["worker-0", "worker-1"], "one that is on its way is not asked for again"

        launcher.states["worker-1"] = WorkerState(phase=Phase.ENDED, code=2, message="host: no docker", where="host")
        await crew.reach(2, plan("worker-0"))
        assert launcher.stopped == ["worker-1"]
        assert crew.refusal == "host: no docker"
        assert crew.last_failure == "worker-1: host: no docker"
        launcher.silent = True
        now[0] += 60
        await crew.reach(2, plan("worker-0"))
        assert list(launcher.states) == ["worker-0"], "nothing is decided blindly"
        launcher.silent = False
        await crew.reach(5, plan("worker-0"))
        await crew.reach(5, plan("worker-0", "worker-2"))
        now[0] += 60
        await crew.reach(5, plan("worker-0", "worker-2"))
        now[0] += 60
        await crew.reach(5, plan("worker-0", "worker-2", "worker-3"))
        assert len(launcher.states) == 3
        assert crew.last_failure == "no more room"
        await crew.close()
        assert not launcher.states

    asyncio.run(main())


# ----------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"kind": "sssh"}, ("cluster.kind", "'local'", "'ssh'", "'slurm'", "'kubernetes'", "'join'")),
        ({"kind": "join"}, ("needs address",)),
        ({"kind": "ssh", "address": "tcp://127.0.0.1:1"}, ('is for kind "join"',)),
        ({"kind": "ssh"}, ("needs ssh.hosts",)),
        ({"kind": "ssh", "ssh": {"hosts": ["-oProxyCommand=x"]}}, ("is not a host",)),
        ({"kind": "ssh", "ssh": {"hosts": ["a", "a"]}}, ("named twice",)),
        ({"kind": "ssh", "workers": 3, "ssh": {"hosts": ["a", "b"]}}, ("hold at most 2", "workers_per_host")),
    ],
)
def test_what_can_not_be_a_cluster_is_said(cluster: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        parse_config({"cluster": cluster})
    for part in said:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_the_option_cluster() -> None:
    assert cluster_overrides(None) == {}
    assert cluster_overrides("slurm") == {"kind": "slurm", "address": ""}
    assert cluster_overrides("tls://10.0.0.1:8786") == {"kind": "join", "address": "tls://10.0.0.1:8786"}
    with pytest.raises(UsageError, match="--cluster 'sshh': unknown; give one of local, ssh, slurm, kubernetes"):
        cluster_overrides("sshh")
    assert parse_config({"cluster": {"address": "tcp://127.0.0.1:8786"}}).cluster.kind == "join"


def test_where_the_scheduler_is() -> None:
    assert cluster_address(ClusterConfig()) == "127.0.0.1"
    assert cluster_address(ClusterConfig(address="tcp://localhost:8786")) == "127.0.0.1"
    ssh = {"kind": "ssh", "workers": 1, "ssh": {"hosts": ["root@127.0.0.1"]}}
    assert own_address(ClusterConfig.model_validate(ssh)) == "127.0.0.1"
    assert own_address(ClusterConfig.model_validate({**ssh, "host": "10.1.2.3"})) == "10.1.2.3"
    with pytest.raises(UsageError, match=r"cluster\.host 'nowhere\.invalid': no such address"):
        own_address(ClusterConfig.model_validate({**ssh, "host": "nowhere.invalid"}))


def config_of(**sections: dict[str, Any]) -> FarmConfig:
    return FarmConfig.model_validate(sections)


def test_engines_on_loopback_are_no_good_for_workers_elsewhere() -> None:
    elsewhere = {"kind": "ssh", "workers": 1, "host": "10.1.2.3", "ssh": {"hosts": ["a"]}}
    here = {"kind": "ssh", "workers": 1, "host": "127.0.0.1", "ssh": {"hosts": ["a"]}}
    check_cluster(config_of(cluster=here))
    with pytest.raises(UsageError, match=r"engine\.host: http://127\.0\.0\.1 can't be reached.*10\.1\.2\.3"):
        check_cluster(config_of(cluster=elsewhere))
    urls = {"kind": "sglang", "urls": ["http://localhost:30000"]}
    with pytest.raises(UsageError, match=r"engine\.urls: http://localhost:30000 can't be reached"):
        check_cluster(config_of(cluster=elsewhere, engine=urls))
    check_cluster(config_of(cluster=elsewhere, engine={"host": "10.1.2.3"}))
    check_cluster(config_of(cluster=elsewhere, agent={"name": "oracle"}))
    with pytest.raises(UsageError, match="must be one address"):
        parse_config({"engine": {"host": "0.0.0.0"}})


def test_a_port_that_is_not_this_machine_s() -> None:
    cluster = {"kind": "ssh", "workers": 1, "host": "203.0.113.7", "port": 8786, "ssh": {"hosts": ["a"]}}
    with pytest.raises(UsageError, match=r"cluster\.port 8786: can't be used on 203\.0\.113\.7"):
        check_cluster(config_of(cluster=cluster, agent={"name": "oracle"}))
