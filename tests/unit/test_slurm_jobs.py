"""farm/cluster/slurm_jobs.py: lines as a real Slurm 22.05 prints them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from farm.cluster.launcher import Phase
from farm.cluster.slurm_jobs import QUEUE_FORMAT, Job, parse_queue, parse_site, parse_submitted, script, submission
from farm.config import SlurmConfig

QUEUE = """\
2|PENDING|farm-0a1b-worker-1|N/A|Resources|
1|RUNNING|farm-0a1b-worker-0|2026-11-30T02:17:24|None|
3|RUNNING|farm-0a1b-worker-2|N/A|None|
4|COMPLETING|farm-0a1b-worker-3|2026-11-30T02:17:44|None|
6|PENDING|x|N/A|Job's account not known, so it can't use this partition (closed allows a|b)|
9_[1-3]|PENDING|array|N/A|None|
slurm_load_jobs error: something else
"""


def job(state: str, reason: str = "None") -> Job:
    return Job(id=1, state=state, name="n", preempted=False, reason=reason)


def test_the_queue_is_read_as_slurm_prints_it() -> None:
    jobs = parse_queue(QUEUE)
    assert [found.id for found in jobs] == [2, 1, 3, 4, 6]
    assert [found.preempted for found in jobs] == [False, True, False, False, False]
    assert jobs[0] == Job(id=2, state="PENDING", name="farm-0a1b-worker-1", preempted=False, reason="Resources")
    assert jobs[-1].reason.endswith("(closed allows a|b)")
    assert QUEUE_FORMAT.startswith("JobID:|,State:|")
    assert parse_queue("") == []


@pytest.mark.parametrize(
    ("state", "phase", "code"),
    [
        ("PENDING", Phase.WAITING, None),
        ("REQUEUED", Phase.WAITING, None),
        ("CONFIGURING", Phase.WAITING, None),
        ("RUNNING", Phase.RUNNING, None),
        ("COMPLETING", Phase.RUNNING, None),
        ("SUSPENDED", Phase.RUNNING, None),
        ("A_STATE_OF_SOME_LATER_RELEASE", Phase.RUNNING, None),
        ("COMPLETED", Phase.ENDED, 0),
        ("CANCELLED", Phase.ENDED, None),
        ("TIMEOUT", Phase.ENDED, None),
        ("NODE_FAIL", Phase.ENDED, 1),
        ("OUT_OF_MEMORY", Phase.ENDED, 1),
    ],
)
def test_states(state: str, phase: Phase, code: int | None) -> None:
    assert (job(state).phase, job(state).code) == (phase, code)


def test_only_what_waiting_does_not_remove_is_hopeless() -> None:
    for reason in ("None", "Resources", "Priority", "BeginTime", "QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit"):
        assert job("PENDING", reason).remedy == ""
    assert "cluster.slurm.partition" in job("PENDING", "PartitionDown").remedy
    assert "cluster.slurm.account" in job("PENDING", "Job's account not known, so it can't use this partition").remedy
    assert job("RUNNING", "PartitionDown").remedy == ""


def test_what_the_site_says() -> None:
    text = "Configuration data\nKillWait      = 10 sec\nProctrackType = proctrack/linuxproc\n"
    site = parse_site(text)
    assert (site.kill_wait_s, site.signals_all) == (10.0, True)
    site = parse_site("ProctrackType = proctrack/cgroup\n")
    assert (site.kill_wait_s, site.signals_all) == (30.0, False)


@pytest.mark.parametrize(
    ("said", "number"),
    [("17\n", 17), ("17;other\n", 17), ("welcome to the site\n17\n", 17), ("", None), ("Submitted batch job\n", None)],
)
def test_the_number_of_a_submitted_job(said: str, number: int | None) -> None:
    assert parse_submitted(said) == number


def run_script(folder: Path, command: list[str], *setup: str) -> subprocess.CompletedProcess[str]:
    """As Slurm runs a job's script: by its first line, with little in the environment; ``folder`` is its home."""
    path = folder / "script"
    path.write_text(script(command, setup, path=os.environ["PATH"]))
    path.chmod(0o755)
    environment = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    return subprocess.run([path], capture_output=True, text=True, check=False, env=environment)


def test_the_script_runs_its_setup_and_becomes_the_worker(tmp_path: Path) -> None:
    assert run_script(tmp_path, ["echo", "it's me", "$HOME"]).stdout == "it's me $HOME\n"
    done = run_script(tmp_path, ["echo", "it's me", "$HOME"], "export A=1", "test $A = 1")
    assert done.stdout == "it's me $HOME\n"
    refused = run_script(tmp_path, ["echo", "no"], "false")
    assert (refused.returncode, refused.stdout) == (1, "")


def test_the_setup_has_what_a_login_shell_has_and_the_farm_s_path(tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text("module() { echo module $*; }\nPATH=/of/the/profile\nfalse\n")
    done = run_script(tmp_path, ["printenv", "PATH"], "module load python")
    loaded, path = done.stdout.splitlines()
    assert loaded == "module load python"
    assert path == f"{os.environ['PATH']}:/of/the/profile"
    assert run_script(tmp_path, ["printenv", "PATH"]).stdout.strip() == os.environ["PATH"], "no profile without setup"


def test_the_submission_says_what_is_configured_and_exports_only_what_the_interpreter_needs() -> None:
    config = SlurmConfig(partition="cpu", time="2:00:00", cpus=8, memory="32G", options=("--constraint=avx2",))
    arguments = submission(
        config,
        name="farm-1-worker-0",
        output="/runs/logs/%j.log",
        folder="/runs/logs",
        comment="c",
        environment={"PATH": "/bin", "HOME": "/root", "E2B_API_KEY": "secret"},
    )
    assert {"--partition=cpu", "--time=2:00:00", "--cpus-per-task=8", "--mem=32G", "--requeue"} <= set(arguments)
    assert "--export=HOME,PATH" in arguments
    assert arguments[-1] == "--constraint=avx2"
    assert not any("account" in argument or "qos" in argument for argument in arguments)


@pytest.mark.parametrize("option", ["gpu", "--output=x", "-J", "--array=1-3"])
def test_options_that_are_not_for_the_operator(option: str) -> None:
    with pytest.raises(ValidationError):
        SlurmConfig(options=(option,))
