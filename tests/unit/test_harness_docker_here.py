"""Which sandbox back end stands for the slow one."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from farm.config import load_config
from farm.errors import UsageError
from harness import docker_here
from harness.docker_here import Compared, compared, docker_problem
from harness.lab import Lab
from harness.profiles import FULL, cluster


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(folder=tmp_path, profile=FULL, console=Console(file=io.StringIO(), width=200))


def said(lab: Lab) -> str:
    assert isinstance(lab.console.file, io.StringIO)
    return lab.console.file.getvalue()


def never_asked() -> str:
    raise AssertionError("nobody should look for Docker")


def test_docker_where_it_runs_is_the_slow_one(lab: Lab) -> None:
    chosen = compared(lab, lambda: "")
    sandboxes = [load_config(sets=sets).sandbox for sets in (chosen.slow, chosen.fast)]
    assert [sandbox.provider for sandbox in sandboxes] == ["docker", "bubblewrap"]
    assert not any(sandbox.start_delay_s for sandbox in sandboxes)
    assert said(lab) == ""


def test_without_docker_the_reference_s_latencies_are_and_it_is_said_why(lab: Lab) -> None:
    chosen = compared(lab, lambda: "no daemon answers")
    assert chosen == Compared(slow=FULL.slow_sandbox, fast=FULL.fast_sandbox)
    assert "simulated: no daemon answers" in said(lab)


def test_a_profile_with_sandboxes_of_its_own_and_an_archive_ask_nobody(lab: Lab) -> None:
    own = cluster({"ROLLOUT_FARM_SANDBOX": "e2b"})
    chosen = compared(replace(lab, profile=own), never_asked)
    assert (chosen.slow, chosen.fast) == (("sandbox.provider=docker",), ("sandbox.provider=e2b",))
    assert compared(replace(lab, archive=True), never_asked).slow == FULL.slow_sandbox


def test_a_docker_that_is_not_there_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise UsageError("sandbox 'docker': no daemon answers at unix:///nowhere")

    monkeypatch.setattr(docker_here, "DockerProvider", absent)
    assert docker_problem() == "sandbox 'docker': no daemon answers at unix:///nowhere"
