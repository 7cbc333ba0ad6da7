"""The command line: light to start, and wrong input is one line on stderr and exit code 2, with nothing started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from farm.breaker import Trip
from farm.cli import main
from farm.config import load_config
from farm.durable import FolderLock
from farm.engine_orders import read_orders
from farm.errors import UsageError
from farm.farm_state import write_status
from farm.render.micro_tokenizer import save_tokenizer, train_tokenizer
from farm.run_folder import RunFolder
from farm.start import open_run
from farm.trajectory_log import DirectoryLog
from farm.types import Boundary


def refused(*arguments: str, code: int = 2) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    lines = [text for text in result.stderr.splitlines() if text.startswith("farm:")]
    assert len(lines) == 1, result.output
    return lines[0]


def rollout(run: Path, *arguments: str) -> str:
    text = refused("rollout", "--run", str(run), *arguments)
    assert not run.exists(), "something was started"
    return text


def policy(folder: Path) -> Path:
    """As complete as the checks ask for, without being a model."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    return folder


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, farm.cli; "
        "heavy = {'torch', 'distributed', 'dask', 'pydantic', 'pyarrow', 'rich', 'aiohttp', 'transformers'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        "up",
        "rollout",
        "status",
        "top",
        "down",
        "doctor",
        "replay",
        "engines",
        "grade",
        "subset",
        "overlap",
        "make-tasks",
        "predictions",
    ],
)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0


def test_tasks_that_are_not_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "unknown suite 'nowhere'" in rollout(run, "--tasks", "nowhere:rl", "--agent", "oracle")
    assert "split 'nothing'" in rollout(run, "--tasks", "micro:nothing", "--agent", "oracle")
    missing = rollout(run, "--tasks", f"swebench:{tmp_path / 'none.parquet'}", "--agent", "oracle")
    assert "No such file" in missing
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 not really")
    assert "not a readable Parquet file" in rollout(run, "--tasks", f"swebench:{broken}", "--agent", "oracle")


def test_unknown_back_ends(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tasks = ("--tasks", "micro:benchmark")
    assert "bash, external, null, oracle" in rollout(run, *tasks, "--agent", "human")
    assert "bubblewrap, docker, e2b, fake, harbor" in rollout(
        run, *tasks, "--agent", "null", "--set", "sandbox.provider=vm"
    )
    assert "'embedded', 'launch' or 'sglang'" in rollout(run, *tasks, "--set", "engine.kind=other")
    assert "at least one worker" in rollout(run, *tasks, "--workers", "0")
    assert "chat, micro" in rollout(run, *tasks, "--set", "renderer.name=x", "--policy", str(policy(tmp_path / "p")))


def test_malformed_policies(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "policy"
    tasks = ("--tasks", "micro:benchmark", "--policy", str(folder))
    assert "no such folder" in rollout(run, *tasks)
    policy(folder)
    (folder / "config.json").write_text("{")
    assert "config.json" in rollout(run, *tasks)
    (folder / "config.json").unlink()
    assert "has no config.json" in rollout(run, *tasks)
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    assert "not a whole safetensors file" in rollout(run, *tasks)
    weights.unlink()
    assert "holds no *.safetensors" in rollout(run, *tasks)


def test_servers_that_are_not_there_and_a_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    null = ("--tasks", "micro:benchmark", "--agent", "null", "--set")
    assert "nobody answers there" in rollout(run, *null, "cluster.address=tcp://127.0.0.1:9")
    given = ("--set", "engine.kind=sglang", "--set", 'engine.urls=["http://127.0.0.1:9"]')
    folder = policy(tmp_path / "policy")
    save_tokenizer(train_tokenizer(["return a + b"]), folder)
    engine = rollout(run, "--tasks", "micro:benchmark", "--policy", str(folder), *given)
    assert "no SGLang server answers there" in engine
    given = ("--engines", "http://127.0.0.1:9", "--engines", "http://127.0.0.1:9")
    assert "no SGLang server answers there" in rollout(
        run, "--tasks", "micro:benchmark", "--policy", str(folder), *given
    )
    launch = ("--tasks", "micro:benchmark", "--policy", str(folder), "--launch-engines", "8", "--set")
    assert "'no-such-python' is not a program here" in rollout(
        run, *launch, 'engine.command=["no-such-python", "{port}"]'
    )
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert "need 8 GPUs, this machine shows 2" in rollout(run, *launch, 'engine.command=["env", "{port}"]')
    both = ("--engines", "http://127.0.0.1:9", "--launch-engines", "1")
    assert "give one of them" in rollout(run, "--tasks", "micro:benchmark", *both)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = rollout(run, "--tasks", "micro:benchmark", "--agent", "null", "--set", f"cluster.port={port}")
    assert "cluster.port" in text
    assert "in use" in text


def test_configuration_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tasks = ("--tasks", "micro:benchmark", "--config")
    assert "no such configuration file" in rollout(run, *tasks, str(tmp_path / "none.toml"))
    config = tmp_path / "farm.toml"
    config.write_text("[rollout]\ngroup_sise = 3\n")
    assert "did you mean 'group_size'" in rollout(run, *tasks, str(config))


def test_run_folders_that_are_not_ours(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    start = ("rollout", "--tasks", "micro:benchmark", "--agent", "null", "--run")
    assert "thesis.tex" in refused(*start, str(foreign))
    other = RunFolder.create(tmp_path / "other", {}).path
    (other / "run.json").write_text(json.dumps({"format": "rollout-farm run", "schema_version": 99}))
    for arguments in ((*start, str(other)), ("up", "--run", str(other)), ("status", str(other)), ("down", str(other))):
        assert "schema version 99" in refused(*arguments)
    assert "is not a rollout-farm run" in refused("status", str(tmp_path / "none"))


def test_another_configuration_on_the_same_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"rollout": {"seed": 1}}).path
    text = refused("rollout", "--tasks", "micro:benchmark", "--agent", "null", "--run", str(run))
    assert "another configuration" in text


def test_status_before_any_farm(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {}).path
    for command in ("status", "top", "down"):
        assert "no farm has run here yet" in refused(command, str(run))
    (run / "farm.json").write_text(json.dumps({"schema_version": 99}))
    assert "schema version 99" in refused("status", str(run))


def test_orders_to_engines_that_are_not_there(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    for command in (("list",), ("drain", "engine-0"), ("remove", "engine-0"), ("replace", "x"), ("add", "http://x")):
        assert "no farm has run here yet" in refused("engines", command[0], str(run.path), *command[1:])
    engine = {"name": "http://x:1", "url": "http://x:1", "state": "up", "process": None, "restarts": 0}
    write_status(run, {"state": "stopped", "process": {"pid": 1, "started": 0}, "engines": [engine]})
    assert "there are: http://x:1" in refused("engines", "drain", str(run.path), "engine-7")
    assert "was not started by this farm" in refused("engines", "replace", str(run.path), "http://x:1")
    assert "must start with http" in refused("engines", "add", str(run.path), "x:1")
    assert "no SGLang server answers there" in refused("engines", "add", str(run.path), "http://127.0.0.1:9")
    result = CliRunner().invoke(main, ["engines", "drain", str(run.path), "http://x:1/"])
    assert result.exit_code == 0
    assert "the next one will do it" in result.output
    assert read_orders(run).drained == {"http://x:1"}
    assert "http://x:1" in CliRunner().invoke(main, ["engines", "list", str(run.path)]).output


def test_replay_of_what_is_not_there(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {}).path
    refused("replay", str(run), "abc")


def test_engines_may_be_elsewhere_when_a_run_goes_on(tmp_path: Path) -> None:
    first = open_run(tmp_path / "run", load_config())
    moved = load_config(overrides={"engine": {"kind": "sglang", "urls": ["http://x:1"]}})
    assert open_run(first.path, moved).config() == first.config()
    smaller = load_config(overrides={"engine": {"max_total_tokens": 1024}})
    with pytest.raises(UsageError, match=r"engine\.max_total_tokens: 32768 -> 1024"):
        open_run(first.path, smaller)
    before = {key: value for key, value in first.config()["engine"].items() if key not in ("pools", "weights")}
    (first.path / "config.json").write_text(json.dumps({**first.config(), "engine": before}))
    open_run(first.path, load_config())  # of a version that knew neither


def test_two_farms_on_one_folder(tmp_path: Path) -> None:
    given = {
        "agent": {"name": "null"},
        "rollout": {"tasks": "micro:benchmark", "purpose": "eval", "group_size": 1},
    }
    run = open_run(tmp_path / "run", load_config(overrides=given))
    held = FolderLock(run.path / "farm.lock", "farm")
    held.acquire()
    try:
        text = refused("rollout", "--tasks", "micro:benchmark", "--agent", "null", "--run", str(run.path))
    finally:
        held.release()
    assert "is the farm already" in text


def test_a_farm_that_its_breaker_stopped_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trip = Trip(boundary=Boundary.GRADER, kind="no_markers", attempts=48, seconds=12.0, message="no test ran")

    async def stopped(run: RunFolder, *_: object, **__: object) -> SimpleNamespace:
        DirectoryLog(run.trajectories)
        return SimpleNamespace(tripped=trip, finished=False)

    monkeypatch.setattr("farm.start.run_farm", stopped)
    arguments = ("--tasks", "micro:benchmark", "--agent", "oracle")
    told = refused("rollout", "--run", str(tmp_path / "run"), *arguments, code=1)
    assert "48 attempts failed at grader (no_markers)" in told
