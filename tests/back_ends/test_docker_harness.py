"""The harness compares with Docker where it runs: two stages for real, and what the report says of them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest
from rich.console import Console

from farm.sandbox.docker import PREFIX
from harness.docker_here import docker_problem
from harness.experiments import sandbox_start, throughput
from harness.lab import Lab
from harness.profiles import QUICK


@pytest.fixture
def client() -> Iterator[Any]:
    made = docker.APIClient(base_url=os.environ["DOCKER_HOST"], timeout=60)
    yield made
    left = [row["Names"][0] for row in made.containers(all=True) if PREFIX in row["Names"][0]]
    made.close()
    assert left == []


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """With a ``farm`` of this very environment, which has the SDK."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "farm").write_text(
        f"#!{sys.executable}\nfrom farm.cli import main\n\nif __name__ == '__main__':\n    main()\n"
    )
    (programs / "farm").chmod(0o755)
    few = replace(QUICK, throughput_tasks=6, throughput_slots=6, sandbox_starts=5)
    return Lab(folder=tmp_path / "stages", profile=few, console=Console(file=io.StringIO()), programs=programs)


def archived(lab: Lab) -> Lab:
    return replace(lab, archive=True)


def test_a_sandbox_starts_and_is_gone(client: Any) -> None:
    assert client.ping()
    assert docker_problem() == ""


@pytest.mark.usefixtures("client")
def test_throughput_has_docker_as_its_slow_back_end(lab: Lab) -> None:
    found = throughput.ratio(lab)
    slow, fast = found.detail["slow"], found.detail["fast"]
    assert (slow["back_end"], fast["back_end"]) == ("docker", "bubblewrap")
    assert slow["trajectories"] == fast["trajectories"] == 6
    assert slow["in_flight_at_most"] == fast["in_flight_at_most"] == 6
    assert found.detail["reading"].startswith("two real back ends")
    assert found.estimate is not None
    assert throughput.ratio(archived(lab)).detail == found.detail
    print(f"\nDocker {slow['per_hour']}/h, bubblewrap {fast['per_hour']}/h")


@pytest.mark.usefixtures("client")
def test_starts_under_load_stand_beside_the_embedded_ones(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_start, "CONCURRENT", 4)
    found = sandbox_start.median(lab)
    told = found.detail["docker_on_this_machine"]
    assert found.detail["back_end"] == "bubblewrap on this machine"
    assert told["starts_loaded"] == 8
    assert lab.used == ["sandbox", sandbox_start.DOCKER_STAGE]
    assert "Docker, 4 at once" in found.figures["sandbox_start"]
    assert sandbox_start.median(archived(lab)).detail == found.detail
    print(f"\nunder load: Docker {told['loaded_median_s']} s, alone {told['alone_median_ms']} ms")
