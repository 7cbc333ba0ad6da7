"""Harbor task folders become tasks, as they say; what can't be honoured is refused by the name of its key."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from harbor_folders import TOML, write_folder
from hypothesis import given
from hypothesis import strategies as st

from farm.config import load_config
from farm.errors import FarmError, UsageError
from farm.harbor.folder import dockerfile_workdir, unchanged
from farm.harbor.task_toml import dump, parse
from farm.harbor.write import write_tasks
from farm.preflight import prepare
from farm.sandbox.build_context import build_context, digest_of
from farm.suites import micro
from farm.suites.repo import workspace_files
from farm.tasks import load_tasks
from farm.types import FolderFiles, Limits, Machine, Task


def only(folder: Path) -> Task:
    (task,) = load_tasks(f"harbor:{folder}")
    return task


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    task = only(write_folder(tmp_path / "one"))
    assert (task.instance_id, task.repo) == ("demo__count-lines", "demo/count-lines")
    assert (task.image, task.workdir, task.log_parser) == ("host", "/app", "harbor")
    assert task.own_limits == {"agent_s": 50.0, "grade_s": 20.0, "memory_bytes": 512 << 20, "disk_bytes": 64 << 20}
    assert task.machine == Machine(cpus=1.0, network=False, env={"GREETING": "hello"})
    assert task.strata == {"difficulty": "easy"}
    assert task.problem_statement.startswith("Write 3")
    assert task.dataset.startswith("harbor/one@")
    assert isinstance(task.workspace, FolderFiles)
    assert task.workspace.repository == ""


def test_a_folder_of_folders_in_order_and_whole_trees(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        write_folder(tmp_path / name, toml=TOML.replace("count-lines", name.replace("/", "-")))
    write_folder(tmp_path / "a" / "tests" / "fixture")  # a task inside a task's tests is a fixture
    assert [task.repo for task in load_tasks(f"harbor:{tmp_path}")] == ["demo/a", "demo/b", "demo/deep-c"]
    assert len(load_tasks(f"harbor:{tmp_path}", limit=2)) == 2


def test_identity_is_the_content_and_not_the_place(tmp_path: Path) -> None:
    one, two = only(write_folder(tmp_path / "x" / "t")), only(write_folder(tmp_path / "y" / "t"))
    assert one.digest == two.digest
    (tmp_path / "y" / "t" / "tests" / "test.sh").write_text("#!/bin/bash\n")
    assert only(tmp_path / "y" / "t").digest != one.digest
    (tmp_path / "x" / "t" / "tests" / "test.sh").chmod(0o644)
    assert only(tmp_path / "x" / "t").digest != one.digest


def test_known_tasks_keep_their_identity() -> None:
    task = load_tasks("micro:benchmark", limit=1)[0]
    assert task.digest != replace(task, own_limits={"agent_s": 1.0}).digest
    assert task.digest != replace(task, machine=Machine(network=True)).digest


def test_an_image_is_pulled_or_built(tmp_path: Path) -> None:
    bare = TOML.replace('[metadata.rollout_farm]\nimage = "host"\n', "")
    pulled = write_folder(tmp_path / "pulled", toml=bare.replace("cpus = 1", 'docker_image = "a/b:1"'))
    assert only(pulled).image == "a/b:1"
    built = only(write_folder(tmp_path / "built", toml=bare, dockerfile="FROM a/b:1\nCOPY . /x\n"))
    context = build_context(built.image)
    assert context is not None
    assert (context.folder, context.digest) == (tmp_path / "built" / "environment", digest_of(context.folder))
    assert context.image == f"rollout-farm/built:{context.digest}"
    assert build_context("a/b:1") is None


def test_older_names_mean_what_they_do_in_harbor() -> None:
    old = parse('version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n', where="t")
    assert (old.schema_version, old.environment.memory_mb, old.environment.storage_mb) == ("1.0", 2048, 512)
    assert old.environment.network_mode == "no-network"
    assert parse("", where="t").environment.network_mode == "public"
    assert parse("", where="t").verifier.timeout_sec == 600


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('[[steps]]\nname = "a"', "steps can't be honoured"),
        ("[environment]\ngpus = 1", r"environment\.gpus can't be honoured"),
        ('[environment.tpu]\ntype = "v5"', r"environment\.tpu can't"),
        ('[[environment.mcp_servers]]\nname = "m"', r"environment\.mcp_servers can't"),
        ('[environment]\nskills_dir = "/s"', r"environment\.skills_dir can't"),
        ('[environment.healthcheck]\ncommand = "true"', r"environment\.healthcheck can't"),
        ('[environment]\nallowed_hosts = ["a.org"]', r"environment\.allowed_hosts can't"),
        ('[environment]\nnetwork_mode = "allowlist"', r"environment\.network_mode: given 'allowlist'"),
        ('[environment]\nos = "windows"', r"environment\.os: given 'windows'"),
        ('[environment]\nworkdir = "app"', r"environment\.workdir: 'app' must be an absolute path"),
        ('[environment]\nmemory = "much"', "memory 'much' must be a size"),
        ("[environment]\ncpu = 1", r"environment\.cpu: the farm does not know this key"),
        ('[agent]\nuser = "root"', r"agent\.user can't be honoured: .*USER"),
        ('[agent]\nnetwork_mode = "no-network"', r"agent\.network_mode 'no-network' is another"),
        ('[verifier]\nenvironment_mode = "separate"', r"verifier\.environment_mode: given 'separate'"),
        ('[verifier.environment]\ndocker_image = "x"', r"verifier\.environment can't"),
        ('[[verifier.collect]]\ncommand = "x"', r"verifier\.collect can't"),
        ("[verifier]\ntimeout_sec = 0", r"verifier\.timeout_sec: given 0"),
        ('[task]\nname = "nameless"', r"task\.name: 'nameless' must be ORG/NAME"),
        ("[environment", "not valid TOML"),
    ],
)
def test_what_can_not_be_honoured_is_named(table: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        parse(table, where="some/task.toml")
    assert str(caught.value).startswith("some/task.toml: ")


def test_what_says_nothing_is_no_refusal() -> None:
    said = parse("artifacts = ['/x']\n[environment]\ngpus = 0\nmcp_servers = []\nallowed_hosts = []\n", where="t")
    assert said.environment.cpus is None


def test_a_folder_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        load_tasks(f"harbor:{tmp_path / 'none'}")
    with pytest.raises(UsageError, match="no such folder"):
        load_tasks("harbor:")
    with pytest.raises(UsageError, match=r"no task\.toml in there"):
        load_tasks(f"harbor:{tmp_path}")
    with pytest.raises(UsageError, match=r"tests/test\.sh: no such file"):
        only(write_folder(tmp_path / "untested", test=None))
    bare = TOML.replace('[metadata.rollout_farm]\nimage = "host"\n', "")
    with pytest.raises(UsageError, match=r"docker_image is not said, and there is no environment/Dockerfile"):
        only(write_folder(tmp_path / "imageless", toml=bare))
    composed = write_folder(tmp_path / "composed", dockerfile="FROM x\n")
    (composed / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(UsageError, match=r"docker-compose\.yaml: a task of several containers"):
        only(composed)
    loose = write_folder(tmp_path / "loose", toml=bare.replace("cpus = 1", 'docker_image = "a/b:1"'))
    (loose / "environment").mkdir()
    (loose / "environment" / "data.csv").write_text("1\n")
    with pytest.raises(UsageError, match=r"files beside environment\.docker_image"):
        only(loose)
    linked = write_folder(tmp_path / "linked")
    (linked / "tests" / "more").symlink_to("/etc")
    with pytest.raises(UsageError, match="a link can't be taken"):
        only(linked)
    begun = write_folder(tmp_path / "begun")
    (begun / "trajectory.json").write_text("{}")
    with pytest.raises(UsageError, match="start without a history"):
        only(begun)
    (tmp_path / "wordless").mkdir()
    (tmp_path / "wordless" / "task.toml").write_text("")
    with pytest.raises(UsageError, match=r"instruction\.md: no such file"):
        only(tmp_path / "wordless")


def test_two_tasks_of_one_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "a")
    write_folder(tmp_path / "b")
    with pytest.raises(UsageError, match=r"b/task\.toml: the task's name 'demo__count-lines' is .*a's, too"):
        load_tasks(f"harbor:{tmp_path}")


def test_secrets_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = TOML.replace('GREETING = "hello"', 'GREETING = "${A_SECRET}"\nOTHER = "${NOBODY_SETS_THIS:-fallback}"')
    folder = write_folder(tmp_path / "t", toml=toml)
    with pytest.raises(UsageError, match=r"environment\.env: \$\{A_SECRET\} is not set; export A_SECRET"):
        only(folder)
    monkeypatch.setenv("A_SECRET", "hidden")
    before = only(folder)
    assert before.machine.env == {"GREETING": "hidden", "OTHER": "fallback"}
    monkeypatch.setenv("A_SECRET", "another")
    assert only(folder).digest == before.digest


def test_a_folder_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    workspace = only(write_folder(tmp_path / "t")).workspace
    assert isinstance(workspace, FolderFiles)
    (tmp_path / "t" / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(FarmError, match="changed since its tasks were read") as caught:
        unchanged(workspace.folder, workspace.digest)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM a\nWORKDIR /x\nworkdir y\n", "/x/y"),
        ("FROM a\nWORKDIR /x\nFROM b\n", ""),
        ("FROM a\nWORKDIR rel\n", ""),
        ("FROM a\nWORKDIR /x\nWORKDIR $HOME\n", ""),
        ("", ""),
    ],
)
def test_where_commands_run_by_a_dockerfile(dockerfile: str, workdir: str) -> None:
    assert dockerfile_workdir(dockerfile) == workdir


@pytest.mark.parametrize("split", ["sft", "rl", "benchmark"])
def test_what_is_written_is_read_back_whole(tmp_path: Path, split: str) -> None:
    tasks = micro.generate(split, count=12)
    assert write_tasks(tasks, tmp_path, limits=Limits()) == 12
    back = {task.instance_id: task for task in load_tasks(f"harbor:{tmp_path}")}
    same = ("repo", "base_commit", "problem_statement", "patch", "test_patch", "fail_to_pass", "pass_to_pass")
    for task in tasks:
        made = back[task.instance_id]
        assert {name: getattr(made, name) for name in same} == {name: getattr(task, name) for name in same}
        assert (made.eval_script, made.image, made.strata) == (task.eval_script, task.image, task.strata)
        assert (made.weight, made.workdir, made.machine) == (task.weight, task.workdir, Machine(cpus=1.0))
        assert work_tree(made) == work_tree(task)
        assert made.limits(Limits()) == replace(Limits(), disk_bytes=2 << 30)


def work_tree(task: Task) -> dict[str, bytes]:
    """Without git's own, which may be packed in another order."""
    return {path: data for path, data in workspace_files(task).items() if "/.git/objects/" not in path}


def refusal(folder: Path, *sets: str) -> str:
    config = load_config(
        sets=["agent.name=null", "sandbox.provider=bubblewrap", *sets],
        overrides={"rollout": {"tasks": f"harbor:{folder}"}},
    )
    with pytest.raises(UsageError) as caught:
        prepare(config)
    return str(caught.value)


def test_what_the_sandboxes_here_can_not_give_is_refused_before_a_run(tmp_path: Path) -> None:
    public = write_folder(tmp_path / "public", toml=TOML.replace('network_mode = "no-network"\n', ""))
    assert "network_mode 'public' is Harbor's default" in refusal(public)
    nowhere = write_folder(tmp_path / "nowhere", toml=TOML.replace('workdir = "/app"\n', ""))
    assert "set environment.workdir" in refusal(nowhere)
    slow = write_folder(tmp_path / "slow")
    told = refusal(slow, "limits.agent_s=20", "limits.tool_s=10")
    assert "asks for agent_s = 50, limits.agent_s is 20; allow it: --set limits.agent_s=50" in told


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.one_of(
    TEXT, st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.lists(TEXT, max_size=3)
)
INNERMOST = st.dictionaries(TEXT, VALUES, max_size=3)
INNER = st.dictionaries(TEXT, st.one_of(VALUES, INNERMOST), max_size=3)
TABLES = st.dictionaries(TEXT, st.one_of(VALUES, INNER), max_size=4)


@given(TABLES)
def test_what_is_written_as_toml_is_read_back(tables: dict[str, object]) -> None:
    assert tomllib.loads(dump(tables)) == _with_tables(tables)


def _with_tables(table: dict[str, object]) -> dict[str, object]:
    """Tables that hold nothing are not written."""
    made: dict[str, object] = {}
    for name, value in table.items():
        inner = _with_tables(value) if isinstance(value, dict) else value
        if inner != {}:
            made[name] = inner
    return made
