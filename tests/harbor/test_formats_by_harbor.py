"""What the farm writes is what Harbor's own models read, and what Harbor accepts the farm reads alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.task.config import NetworkMode, TaskConfig
from harbor.models.task.task import Task as HarborTask
from harbor.models.trajectories import Trajectory as AtifByHarbor
from harbor_folders import TOML, write_folder
from makers import failure, graded, row
from pydantic import TypeAdapter

from farm.harbor import task_toml
from farm.harbor.atif import Who, rollout_details, to_atif
from farm.harbor.task_toml import dump, parse
from farm.harbor.tasks import harbor_tasks
from farm.harbor.write import write_tasks
from farm.suites import micro
from farm.types import Boundary, Dropped, EndReason, Failed, Limits, Outcome, Turn, VersionSpan

TURNS = tuple(
    Turn(
        segment=segment, context_ids=(1, 2), output_ids=(3, 4), output_logprobs=(-0.5, -0.25),
        spans=(VersionSpan(step=1, start=0, end=1), VersionSpan(step=2, start=1, end=2)), finish_reason="stop",
        action="ls", observation="a\n", exit_code=code, cached_tokens=2, retractions=0,
    )
    for segment, code in ((0, 0), (0, 1), (1, None))
)  # fmt: skip


def test_written_tasks_are_valid_for_harbor(tmp_path: Path) -> None:
    tasks = micro.generate("rl", count=6)
    write_tasks(tasks, tmp_path, limits=Limits(agent_s=77.0, grade_s=33.0))
    for task in tasks:
        theirs = HarborTask(tmp_path / task.instance_id)
        config = theirs.config
        assert (config.schema_version, config.environment.workdir) == ("1.4", "/testbed")
        assert (config.agent.timeout_sec, config.verifier.timeout_sec) == (77.0, 33.0)
        assert (config.environment.memory_mb, config.environment.network_mode) == (512, NetworkMode.NO_NETWORK)
        assert theirs.instruction == task.problem_statement
        assert config.task is not None
        assert config.task.short_name == task.instance_id
        assert theirs.paths.discovered_test_path is not None
        assert theirs.paths.discovered_solve_path is not None


@pytest.mark.parametrize(
    "text",
    [
        TOML,
        "",
        'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "1024M"\nallow_internet = false\n',
        "[environment]\nallow_internet = true\ncpus = 2\n[agent]\ntimeout_sec = 5\n",
        '[environment]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "shared"\n',
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_read_a_task_toml_alike(text: str) -> None:
    ours, theirs = parse(text, where="t"), TaskConfig.model_validate_toml(text)
    for name in (
        "docker_image",
        "memory_mb",
        "storage_mb",
        "cpus",
        "env",
        "workdir",
        "network_mode",
        "build_timeout_sec",
    ):
        assert getattr(ours.environment, name) == getattr(theirs.environment, name), name
    assert (ours.agent.timeout_sec, ours.verifier.timeout_sec) == (
        theirs.agent.timeout_sec,
        theirs.verifier.timeout_sec,
    )
    assert (ours.verifier.env, ours.solution.env) == (theirs.verifier.env, theirs.solution.env)


def test_every_key_of_harbors_schema_is_honoured_or_refused_by_name() -> None:
    """A key that a later Harbor brings shows up here."""
    refused = set(task_toml._CANNOT)
    pairs = [
        ("", TaskConfig, task_toml.TaskToml),
        ("environment.", type(TaskConfig().environment), task_toml.EnvironmentTable),
        ("agent.", type(TaskConfig().agent), task_toml.AgentTable),
        ("verifier.", type(TaskConfig().verifier), task_toml.VerifierTable),
        ("solution.", type(TaskConfig().solution), task_toml.SolutionTable),
    ]
    for prefix, theirs, ours in pairs:
        unknown = {f"{prefix}{name}" for name in theirs.model_fields.keys() - ours.model_fields.keys()}
        assert unknown - refused <= {"environment.allow_internet"}, unknown


def test_toml_that_harbor_dumps_is_read_back(tmp_path: Path) -> None:
    theirs = TaskConfig.model_validate_toml(TOML)
    folder = write_folder(tmp_path / "t", toml=theirs.model_dump_toml())
    (mine,) = harbor_tasks(str(write_folder(tmp_path / "u")))
    (back,) = harbor_tasks(str(folder))
    assert (back.own_limits, back.machine, back.image) == (mine.own_limits, mine.machine, mine.image)
    assert (
        TaskConfig.model_validate_toml(dump({"task": {"name": "a/b"}, "metadata": {"x": "é\n"}})).metadata["x"] == "é\n"
    )


@pytest.mark.parametrize(
    "outcome",
    [graded(1.0), Failed(boundary=Boundary.ENGINE, kind="gone", message="m"), Dropped(reason="stale")],
)
@pytest.mark.parametrize("turns", [TURNS, ()])
@pytest.mark.parametrize("decoded", [True, False])
def test_atif_is_valid_for_harbor(outcome: Outcome, turns: tuple[Turn, ...], decoded: bool) -> None:
    landed = replace(row("g", 0, outcome), turns=turns, prior=(failure(1),), end_reason=EndReason.SUBMITTED)
    made = to_atif(landed, Who(agent="bash", model="m"), (lambda ids: f"{len(ids)}") if decoded else None)
    theirs = AtifByHarbor.model_validate_json(made.model_dump_json(exclude_none=True))
    assert theirs.schema_version == "ATIF-v1.8"
    assert len(theirs.steps) == (4 if turns else 1)
    for step, turn in zip(theirs.steps[1:], turns, strict=True):
        assert step.metrics is not None
        assert step.metrics.completion_token_ids == list(turn.output_ids)
        assert step.metrics.logprobs == list(turn.output_logprobs)
    assert theirs.extra is not None
    assert ("reward" in theirs.extra["rollout_farm"]["outcome"]) == (outcome == graded(1.0))


def test_rollout_details_have_harbors_shape() -> None:
    details = [detail.model_dump() for detail in rollout_details(replace(row("g", 0, 1.0), turns=TURNS))]
    checked = TypeAdapter(list[RolloutDetail]).validate_python(details)
    assert [len(detail["prompt_token_ids"]) for detail in checked] == [2, 1]
    for detail in checked:
        lengths = {len(detail[name]) for name in ("prompt_token_ids", "completion_token_ids", "logprobs")}
        assert lengths == {len(values) for values in detail["extra"].values()}
