"""`harness reproduce`: what lacks is said first, a broken experiment costs its own row, kept logs make the report."""

from __future__ import annotations

import errno
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from click.testing import CliRunner
from rich.console import Console

from farm.durable import Disk
from farm.errors import FarmError, UsageError
from harness import (
    back_ends,
    claims,
    cli,
    document,
    evidence,
    experiments,
    lab,
    profiles,
    progress,
    report,
    reproduce,
    sections,
    twin_cells,
    views,
)
from harness.claims import Claim, Measurement
from harness.lab import Lab
from harness.profiles import Profile
from harness.stats import Estimate

CLAIMS = [
    Claim(id="one", statement="one", metric="m", reported={"text": "1"}, experiment="x.one", back_ends=("sandbox",),
          rule="r"),
    Claim(id="two", statement="two", metric="m", reported={"text": "2"}, experiment="x.two", rule="r"),
    Claim(id="three", statement="three", metric="m", reported={"text": "3"}),
]  # fmt: skip


RAN: list[str] = []  # the stages that were run; not captured by their work, so not part of their keys


class Bench:
    """Two experiments. ``numbers``: what their stages write; ``broken``: those that raise."""

    def __init__(self) -> None:
        self.numbers = {"one": 1.0, "two": 2.0}
        self.broken: set[str] = set()

    def load(self, claim: Claim, _: Profile) -> Callable[[Lab], Measurement] | None:
        return None if claim.experiment is None else lambda lab: self.measure(claim.id, lab)

    def measure(self, name: str, lab: Lab) -> Measurement:
        number, broken = self.numbers[name], name in self.broken

        def work(folder: Path) -> None:
            if broken:
                raise ValueError("no luck")
            RAN.append(name)
            (folder / "number.json").write_text(json.dumps(number))

        value = json.loads((lab.stage(f"stage-{name}", work) / "number.json").read_text())
        estimate = Estimate(value=value, low=value - 1, high=value + 1, n=3)
        return Measurement(estimate=estimate, unit="s", holds=value < 5, detail={"value": value})


class FullDisk(Disk):
    """Has room for so many files, and half of the next."""

    def __init__(self, files: int) -> None:
        self.left = files

    def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        if self.left == 0:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= 1
        super().write(path, fill)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    made = Bench()
    RAN.clear()
    monkeypatch.setattr(claims, "load", lambda: CLAIMS)
    monkeypatch.setattr(experiments, "load", made.load)
    monkeypatch.setattr(reproduce, "BUILD", tmp_path / "build")
    monkeypatch.setattr(twin_cells, "twin_cells", lambda _: {"three": {"text": "3.1x", "value": 3.1}})
    return made


def run(tmp_path: Path, *names: str) -> tuple[int, dict[str, dict[str, object]]]:
    code = reproduce.reproduce(names, profile_name="quick", out=tmp_path / "reports" / "1")
    rows = document.read(tmp_path / "reports" / "1")["claims"]
    return code, {row["id"]: row for row in rows}


def test_a_second_run_redoes_only_what_changed(bench: Bench, tmp_path: Path) -> None:
    code, rows = run(tmp_path)
    assert (code, RAN) == (0, ["one", "two"])
    assert [rows[name]["status"] for name in ("one", "two", "three")] == ["holds", "holds", "not built yet"]
    assert rows["one"]["detail"]["stages"] == ["stage-one"]  # type: ignore[index]
    assert rows["three"]["twin"] == {"text": "3.1x", "value": 3.1}
    before = report.files(document.read(tmp_path / "reports" / "1"))
    assert run(tmp_path)[0] == 0
    assert RAN == ["one", "two"]
    assert report.files(document.read(tmp_path / "reports" / "1")) == before
    bench.numbers["two"] = 7.0
    _, rows = run(tmp_path)
    assert RAN == ["one", "two", "two"]
    assert rows["two"]["status"] == "differs"


def test_a_broken_experiment_costs_its_own_row_only(bench: Bench, tmp_path: Path) -> None:
    bench.broken.add("one")
    code, rows = run(tmp_path)
    assert code == 1
    assert rows["one"]["status"] == "not run"
    assert rows["one"]["detail"]["problem"] == "broke: ValueError: no luck"  # type: ignore[index]
    assert rows["two"]["status"] == "holds"
    bench.broken.clear()
    code, rows = run(tmp_path, "one")  # alone: the other's row stays as it was
    assert (code, RAN) == (0, ["two", "one"])
    assert {rows[name]["status"] for name in ("one", "two")} == {"holds"}


@pytest.mark.usefixtures("bench")
def test_the_report_is_what_its_kept_logs_give(tmp_path: Path) -> None:
    run(tmp_path)
    folder = tmp_path / "reports" / "1"
    assert views.show_report(folder, rebuild=False, verify=True, stages=None) == 0
    kept = folder / "logs" / "stage-one" / "number.json"
    for change in (lambda: kept.write_text("4.0"), kept.unlink):
        change()
        for rebuild in (False, True):
            with pytest.raises(UsageError, match="stage-one: its logs are not those that were kept"):
                views.show_report(folder, rebuild=rebuild, verify=not rebuild, stages=None)
    # From the stages themselves, as they were run:
    views.show_report(folder, rebuild=True, verify=False, stages=tmp_path / "build" / "quick")
    assert document.read(folder)["claims"][0]["here"]["value"] == 1.0
    with pytest.raises(UsageError, match="no finished stage"):
        views.show_report(folder, rebuild=True, verify=False, stages=tmp_path)
    with pytest.raises(UsageError, match="holds no kept logs"):
        views.show_report(tmp_path, rebuild=True, verify=False, stages=None)


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("origin.json", "", r"origin\.json: is not readable JSON.*git checkout"),
        ("origin.json", "{}", r"origin\.json: version: field required.*harness reproduce --all"),
        ("stage-one/done.json", "{}", r"done\.json: wall_s: field required.*git checkout"),
        ("stage-one/done.json", "[1]", r"done\.json: input should be.*git checkout"),
        ("stage-one/run/run.json", "{}", r"stage-one/run: holds neither a trajectory log nor a derived one"),
    ],
)
@pytest.mark.parametrize("how", ["rebuild", "verify"])
def test_damaged_logs_are_a_usage_error(file: str, content: str, told: str, how: str, tmp_path: Path) -> None:
    run(tmp_path)
    folder = tmp_path / "reports" / "1"
    place = folder / "logs" / file
    place.parent.mkdir(exist_ok=True)
    place.write_text(content)
    with pytest.raises(UsageError, match=told):
        views.show_report(folder, rebuild=how == "rebuild", verify=how == "verify", stages=None)


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("text", ['{"a": 1', None], ids=["truncated", "missing"])
@pytest.mark.parametrize("how", ["rebuild", "verify"])
def test_logs_that_an_experiment_cant_read_are_a_usage_error(text: str | None, how: str, tmp_path: Path) -> None:
    run(tmp_path)
    folder = tmp_path / "reports" / "1"
    before = (folder / "report.json").read_bytes()
    edit(folder / "logs" / "stage-one", text)
    with pytest.raises(
        UsageError, match=r"logs: the logs of stage-one do not give the row one \(broke: .*git checkout"
    ):
        views.show_report(folder, rebuild=how == "rebuild", verify=how == "verify", stages=None)
    assert (folder / "report.json").read_bytes() == before


def edit(kept: Path, text: str | None) -> None:
    """Another number among the logs of a stage, or none, without the digest that old ones do not have either."""
    done = json.loads((kept / "done.json").read_text())
    del done["kept"]
    (kept / "done.json").write_text(json.dumps(done))
    (kept / "number.json").unlink()
    if text is not None:
        (kept / "number.json").write_text(text)


def test_a_row_that_breaks_after_a_run_costs_no_other(bench: Bench, tmp_path: Path) -> None:
    measure = bench.measure

    def reads_what_is_not_kept(name: str, lab: Lab) -> Measurement:
        if name == "one" and lab.archive:
            raise FileNotFoundError("not.kept")
        return measure(name, lab)

    bench.measure = reads_what_is_not_kept  # type: ignore[method-assign]
    _, rows = run(tmp_path)
    assert rows["one"]["detail"]["problem"] == "broke: FileNotFoundError: not.kept"  # type: ignore[index]
    assert rows["two"]["status"] == "holds"


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.usefixtures("bench")
def test_stages_replace_kept_logs_of_their_profile_only_and_those_of_others_stay(tmp_path: Path) -> None:
    run(tmp_path)
    folder, quick = tmp_path / "reports" / "1", tmp_path / "build" / "quick"
    before = content(tmp_path / "reports")
    other = tmp_path / "build" / "full"
    shutil.copytree(quick, other)
    with pytest.raises(UsageError, match=r"build/full: is of profile full, the report in .* of quick; give stages"):
        views.show_report(folder, rebuild=True, verify=False, stages=other)
    shutil.copytree(quick / "stage-one", tmp_path / "build" / "stage-one")
    with pytest.raises(UsageError, match="profile 'build' is unknown"):
        views.show_report(folder, rebuild=True, verify=False, stages=tmp_path / "build")
    (quick / "stage-one" / "number.json").write_text("4")
    (quick / "stage-two" / "number.json").write_text("4 and")
    with pytest.raises(UsageError, match=r"build/quick: the logs of stage-two do not give the row two"):
        views.show_report(folder, rebuild=True, verify=False, stages=quick)
    for arguments in (["--stages", str(quick)], ["--stages", str(quick), "--verify"]):
        raised = CliRunner().invoke(cli.cli, ["report", str(folder), *arguments]).exception
        assert isinstance(raised, UsageError)
        assert "--stages belongs to --rebuild" in str(raised)
    assert content(tmp_path / "reports") == before
    shutil.rmtree(quick / "stage-two")
    assert views.show_report(folder, rebuild=True, verify=False, stages=quick) == 0
    assert [row["here"] and row["here"]["value"] for row in document.read(folder)["claims"]] == [4.0, 2.0, None]
    assert sorted(place.name for place in folder.iterdir()) == [
        "figures",
        "logs",
        "report.html",
        "report.json",
        "report.md",
    ]


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("written", range(6))
def test_a_full_disk_leaves_the_report_as_it_was(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    folder = tmp_path / "reports" / "1"
    edit(folder / "logs" / "stage-one", "4")
    before = content(tmp_path / "reports")
    monkeypatch.setattr(report, "REAL_DISK", FullDisk(written))
    if written > 3:  # report.json, .md, .html and latest
        assert views.show_report(folder, rebuild=True, verify=False, stages=None) == 0
        assert document.read(folder)["claims"][0]["here"]["value"] == 4.0
        return
    monkeypatch.setattr("sys.argv", ["harness", "report", str(folder), "--rebuild"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert content(tmp_path / "reports") == before


@pytest.mark.usefixtures("bench")
def test_a_full_disk_leaves_the_kept_logs_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    folder = tmp_path / "reports" / "1"
    before = content(tmp_path / "reports")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evidence, "keep", full)
    with pytest.raises(FarmError, match=r"1/logs: the logs can't be kept: no space left"):
        views.show_report(folder, rebuild=True, verify=False, stages=tmp_path / "build" / "quick")
    assert content(tmp_path / "reports") == before


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_report_folder_that_is_a_file_is_said_before_anything_starts(below: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match=r"taken is a file; give the folder that the report shall be in"):
        reproduce.reproduce(("one",), profile_name="quick", out=tmp_path / "taken" / below)
    assert RAN == []
    assert not (tmp_path / "build").exists()


@pytest.mark.usefixtures("bench")
def test_making_a_report_anew_says_what_it_is_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    capsys.readouterr()
    assert views.show_report(tmp_path / "reports" / "1", rebuild=False, verify=True, stages=None) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["1 of 5: logs of stage stage-one", "figures"]


def test_a_list_of_parts_is_told_now_and_then() -> None:
    said: list[str] = []
    every, seldom = progress.telling(said.append, 2, every_s=0.0), progress.telling(said.append, 2)
    for tell in (every, seldom):
        tell("a")
        tell("b")
    assert said == ["1 of 2: a", "2 of 2: b", "1 of 2: a"]


@pytest.mark.usefixtures("bench")
def test_a_truncated_derived_log_is_a_usage_error(tmp_path: Path) -> None:
    run(tmp_path)
    kept = tmp_path / "reports" / "1" / "logs" / "stage-one" / "run"
    (kept / "derived").mkdir(parents=True)
    (kept / "run.json").write_text("{}")
    (kept / "config.json").write_text("{}")
    (kept / "derived" / "trajectories.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match=r"stage-one: its logs are damaged \(ArrowInvalid: .*git checkout"):
        views.show_report(tmp_path / "reports" / "1", rebuild=False, verify=True, stages=None)


@pytest.mark.usefixtures("bench")
def test_a_row_keeps_what_made_its_stages_when_another_is_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, commit in (("one", "1" * 40), ("two", "2" * 40)):
        made_by = {"commit": commit, "dirty": name == "two", "machine": f"machine {name}"}
        monkeypatch.setattr(lab, "made_by", lambda made_by=made_by: made_by)
        _, rows = run(tmp_path, name)
    for name, commit in (("one", "1" * 40), ("two", "2" * 40)):
        assert rows[name]["detail"]["made_by"] == [  # type: ignore[index]
            {"commit": commit, "dirty": name == "two", "machine": f"machine {name}", "stages": [f"stage-{name}"]}
        ]


@pytest.mark.usefixtures("bench")
def test_what_is_missing_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(profiles.SANDBOX, raising=False)
    with pytest.raises(UsageError, match=r"profile 'cluster' can't start here: no sandboxes: set ROLLOUT_FARM_SANDBOX"):
        reproduce.reproduce(("one",), profile_name="cluster", out=tmp_path / "r")
    assert RAN == []
    assert not (tmp_path / "build").exists()


# --------------------------------------------------------------------------------------------- back ends


def missing(role: str, **environment: str) -> list[str]:
    return back_ends.missing(profiles.cluster(environment), {role}, environment)


def test_the_cluster_profile_names_everything_with_what_to_set(tmp_path: Path) -> None:
    assert missing("engine") == [
        "no engines: set ROLLOUT_FARM_ENGINES to the addresses of SGLang servers (http://host:port,http://...)"
    ]
    assert missing("engine", ROLLOUT_FARM_ENGINES="http://127.0.0.1:9, x") == [
        "no SGLang server answers at http://127.0.0.1:9: start it, or correct ROLLOUT_FARM_ENGINES",
        "no SGLang server answers at x: start it, or correct ROLLOUT_FARM_ENGINES",
    ]
    assert missing("sandbox", ROLLOUT_FARM_SANDBOX="k8s") == [
        "no sandboxes: set ROLLOUT_FARM_SANDBOX to e2b or docker (is k8s)"
    ]
    assert any("set E2B_API_KEY" in phrase for phrase in missing("sandbox", ROLLOUT_FARM_SANDBOX="e2b"))
    tasks = missing("tasks")
    assert [phrase.partition(":")[0] for phrase in tasks] == ["no benchmark", "no training tasks", "no model"]
    (tmp_path / profiles.VERIFIED).write_text("")
    (tmp_path / "config.json").write_text("{}")
    assert missing("tasks", ROLLOUT_FARM_DATA=str(tmp_path), ROLLOUT_FARM_RL_TASKS="swebench:x.parquet",
                   ROLLOUT_FARM_POLICY=str(tmp_path)) == []  # fmt: skip


def test_the_cluster_profile_runs_the_same_experiments_on_other_back_ends() -> None:
    made = profiles.cluster({profiles.ENGINES: "http://a:1,http://b:2", profiles.SANDBOX: "e2b", profiles.DATA: "/d"})
    assert made.settings == (
        "engine.kind=sglang", 'engine.urls=["http://a:1", "http://b:2"]', "sandbox.provider=e2b",
    )  # fmt: skip
    assert made.benchmark == f"swebench:/d/{profiles.VERIFIED}"
    assert made.back_ends["sandbox"] == "e2b"
    assert (made.benchmark_tasks, made.attempts, made.rl_steps) == (100, 4, 145)


def test_the_embedded_back_ends_are_here() -> None:
    assert back_ends.missing(profiles.QUICK, {"engine", "sandbox", "trainer", "tasks"}, {}) == []


# ---------------------------------------------------------------------------------------------- commands


def test_an_archive_gives_the_twins_predictions_or_none(tmp_path: Path) -> None:
    lab = Lab(folder=tmp_path, profile=profiles.QUICK, console=Console(file=io.StringIO()), archive=True)
    assert twin_cells.twin_cells(lab) == {}
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "done.json").write_text("{}")
    (tmp_path / "twin" / twin_cells.FILE).write_text('{"throughput": {"text": "4.2x"}}')
    assert twin_cells.twin_cells(lab) == {"throughput": {"text": "4.2x"}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "input should be a valid dictionary"),
        ('{"throughput": 5}', "throughput: input should be a valid dictionary"),
        ('{"throughput": {}}', r"throughput\.text: field required"),
        ("[" * 200_000, "nested too deep"),
    ],
    ids=["list", "number", "empty", "deep"],
)
def test_predictions_of_another_shape_are_a_usage_error(content: str, told: str, tmp_path: Path) -> None:
    lab = Lab(folder=tmp_path, profile=profiles.FULL, console=Console(file=io.StringIO()), archive=True)
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "done.json").write_text("{}")
    (tmp_path / "twin" / twin_cells.FILE).write_text(content)
    with pytest.raises(UsageError, match=rf"predictions\.json: .*{told}.*git checkout"):
        twin_cells.twin_cells(lab)


@pytest.mark.usefixtures("bench")
def test_a_broken_twin_is_told_beside_each_claim_it_has_a_say_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)

    def broken(_: Lab) -> dict[str, object]:
        raise ValueError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(twin_cells, "twin_cells", broken)
        code, rows = run(tmp_path)
    assert code == 1
    assert rows["three"]["twin"] is None
    assert sections.twin(rows["three"]) == "broke: ValueError: no luck"
    assert "* twin: broke: ValueError: no luck" in (tmp_path / "reports" / "1" / "report.md").read_text()
    assert run(tmp_path, "two")[1]["three"]["twin"] == {"text": "3.1x", "value": 3.1}


@pytest.mark.usefixtures("bench")
def test_what_the_twin_has_no_say_in_does_not_clear_its_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    place = tmp_path / "reports" / "1" / "logs" / "origin.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"problems": {"twin": "broke: no luck"}}))
    monkeypatch.setattr(claims, "load", lambda: [replace(CLAIMS[0], twin="nothing to simulate"), *CLAIMS[1:]])
    _, rows = run(tmp_path, "one")
    assert sections.twin(rows["one"]) == sections.NOTHING
    assert sections.twin(rows["two"]) == "broke: no luck"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["show", "nothing"], "claim 'nothing' is unknown; known: pass1-base"),
        (["check", "/nowhere"], "no such report"),
        (["diff", "/nowhere", "/nowhere"], "no such report"),
        (["reproduce"], "name the claims to reproduce"),
        (["reproduce", "--all", "--profile", "huge"], "profile 'huge' is unknown"),
        (["report", "--rebuild", "--verify"], "exclude each other"),
        (["report", "/nowhere", "--rebuild"], "holds no kept logs"),
    ],
)
def test_bad_input_is_a_usage_error(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(cli.cli, arguments)
    assert isinstance(result.exception, UsageError)
    assert text in str(result.exception)


def test_a_damaged_newest_report_is_said_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "REPORTS", tmp_path)
    assert CliRunner().invoke(cli.cli, ["list"]).exit_code == 0
    (tmp_path / "latest").write_text("1\n")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "report.json").write_text('{"schema": 2')
    for arguments in (["list"], ["show", "pass1-rl"]):
        raised = CliRunner().invoke(cli.cli, arguments).exception
        assert isinstance(raised, UsageError)
        assert "not a readable report" in str(raised)


def test_the_list_is_readable_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(cli.cli, ["list"]).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 3 * len(claims.load())
    for claim in claims.load():
        (line,) = (line for line in lines if line.startswith(f" {claim.id} "))
        assert "…" not in line


@pytest.mark.usefixtures("bench")
def test_check_compares_with_the_newest_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    monkeypatch.setattr(views, "REPORTS", tmp_path / "reports")
    assert views.check(None) == 0
    other = tmp_path / "other"
    report.write(other / "2", document.read(tmp_path / "reports" / "1"))
    assert views.check(other / "2") == 0
    text = (other / "2" / "report.json").read_text()
    (other / "2" / "report.json").write_text(text.replace('"status": "holds"', '"status": "differs"', 1))
    assert views.check(other / "2") == 1
    assert views.diff(tmp_path / "reports" / "1", other / "2") == 1


def test_list_show_diff_and_report_on_the_newest_report() -> None:
    folder = str(views.newest_folder())
    for arguments, word in (
        (["list"], "pass1-rl"),
        (["show", "pass1-rl"], "measured.gain_over_sft.points >= 14.7"),
        (["diff", folder, folder], "equal"),
        (["report"], "verdict"),
    ):
        result = CliRunner().invoke(cli.cli, arguments)
        assert result.exit_code == 0, result.output
        assert word in result.output
