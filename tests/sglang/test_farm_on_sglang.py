"""The whole farm on real SGLang servers that it starts itself: the same episodes as on the embedded engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import real_sglang
from click.testing import CliRunner

from farm.cli import main
from farm.farm_state import ProcessId
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Graded, Trajectory

TASKS, ATTEMPTS = 6, 2
PATIENCE_S = 900.0  # on a machine at work elsewhere; half a minute on an idle one

pytestmark = pytest.mark.timeout(2000)


def command(run: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "farm.cli", "rollout", "--tasks", "micro:benchmark", "--limit", str(TASKS),
        "--attempts", str(ATTEMPTS), "--run", str(run), "--workers", "1", "--set", "cluster.slots=6",
        "--set", "rollout.temperature=0", *arguments,
    ]  # fmt: skip


def launch(count: int) -> list[str]:
    settings = {"command": list(real_sglang.command()), "gpus_per_engine": 0, "start_timeout_s": PATIENCE_S}
    sets = [text for name, value in settings.items() for text in ("--set", f"engine.{name}={json.dumps(value)}")]
    return ["--launch-engines", str(count), *sets]


def rows(run: Path) -> dict[str, Trajectory]:
    log = DirectoryLog(run / "trajectories", create=False)
    return {row.episode_id: row for _, row in log.read(Cursor())}


def test_episodes_are_those_of_the_embedded_engine(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path / "real", *launch(1)), check=True, timeout=PATIENCE_S)
    subprocess.run(command(tmp_path / "embedded"), check=True, timeout=PATIENCE_S)
    real, embedded = rows(tmp_path / "real"), rows(tmp_path / "embedded")
    assert real.keys() == embedded.keys()
    assert len(real) == TASKS * ATTEMPTS
    same = 0
    for episode, theirs in real.items():
        ours = embedded[episode]
        assert isinstance(theirs.outcome, Graded)
        assert isinstance(ours.outcome, Graded)
        assert {span.step for turn in theirs.turns for span in turn.spans} == {0}
        same += [turn.output_ids for turn in theirs.turns] == [turn.output_ids for turn in ours.turns]
        for their, our in zip(theirs.turns, ours.turns, strict=False):
            if their.context_ids != our.context_ids or their.output_ids != our.output_ids:
                break  # a near tie that fell the other way; what follows has another past
            assert our.output_logprobs == pytest.approx(their.output_logprobs, abs=1e-4)
    assert same >= len(real) - 1


def test_an_engine_is_replaced_under_a_running_farm(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (tmp_path / "output.txt").open("wb") as stream:
        up = [sys.executable, "-m", "farm.cli", "up", "--run", str(run), "--workers", "1", "--set", "cluster.slots=2"]
        farm = subprocess.Popen([*up, *launch(1)], stdout=stream, stderr=stream, start_new_session=True)
    try:
        first = _engine(run, farm, lambda engine: engine["state"] == "up")
        result = CliRunner().invoke(main, ["engines", "replace", str(run), "engine-0", "--wait", str(PATIENCE_S)])
        assert result.exit_code == 0, result.output
        again = _engine(run, farm, lambda engine: engine["state"] == "up")
        assert again["url"] != first["url"]
        assert not ProcessId.from_json(first["process"]).alive
    finally:
        farm.terminate()
        farm.wait(60)
    assert not ProcessId.from_json(again["process"]).alive


def _engine(run: Path, farm: subprocess.Popen[bytes], condition: Any) -> dict[str, Any]:
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        assert farm.poll() is None, (run.parent / "output.txt").read_text()
        try:
            engines = json.loads((run / "farm.json").read_text())["engines"]
        except FileNotFoundError:
            engines = []
        if engines and condition(engines[0]):
            return dict(engines[0])
        time.sleep(0.2)
    raise AssertionError("waited in vain for the engine")
