"""Qualification: what it counts, what it quarantines and why, and that the loader keeps to it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from farm import tasks as task_sources
from farm.errors import GraderError, SandboxStartError, UsageError
from farm.protocols import Sandbox, SandboxSpec
from farm.suites import qualify
from farm.suites.qualify import Qualification
from farm.suites.subset import draw, save
from farm.types import Evidence, ImageFiles, Limits, Task

SCRIPT = ": '>>>>> Start Test Output'\n: '>>>>> End Test Output'\n"


def task(name: str, **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "instance_id": name,
        "dataset": "d@1",
        "repo": "r",
        "base_commit": "0",
        "problem_statement": "",
        "patch": "gold",
        "test_patch": "",
        "fail_to_pass": ("t",),
        "pass_to_pass": (),
        "eval_script": "",
        "log_parser": "micro",
        "workspace": ImageFiles(),
    }
    return Task(**(fields | changes))


class Provider:
    """Counts what is open; the first ``broken`` starts fail."""

    name = "counting"

    def __init__(self, broken: int = 0) -> None:
        self.broken, self.now_open, self.most_open = broken, 0, 0

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if self.broken:
            self.broken -= 1
            raise SandboxStartError("no room")
        self.now_open += 1
        self.most_open = max(self.most_open, self.now_open)
        try:
            await asyncio.sleep(0)
            yield None  # type: ignore[misc]
        finally:
            self.now_open -= 1

    async def sweep(self, *, now_s: float) -> int:
        return 0


class Grader:
    """Answers from a list of results per instance id; by default as a good task would."""

    def __init__(self, **answers: list[bool | Exception]) -> None:
        self.answers = answers

    async def grade(self, task: Task, patch: str, *, sandbox: Sandbox, limits: Limits) -> Evidence:
        queue = self.answers.get(task.instance_id)
        answer = queue.pop(0) if queue else patch == "gold"
        if isinstance(answer, Exception):
            raise answer
        return Evidence(statuses={}, resolved=answer, patch_applied=True, exit_code=0, log_tail="the log's end")


def run(names: list[str], grader: Grader, provider: Provider | None = None, runs: int = 3) -> list[Qualification]:
    work = qualify.qualify([task(n) for n in names], provider=provider or Provider(), grader=grader, runs=runs)
    return asyncio.run(work)


def test_good_tasks_qualify_in_order_with_bounded_concurrency() -> None:
    provider = Provider()
    results = run(["a", "b", "c", "d"], Grader(), provider)
    assert [r.instance_id for r in results] == ["a", "b", "c", "d"]
    assert all(r.qualified and (r.gold_passed, r.empty_failed) == (3, 3) for r in results)
    assert provider.most_open == 2


@pytest.mark.parametrize(
    ("answers", "reason", "counts"),
    [
        ([False], "gold patch: not resolved in run 1: the log's end", (0, 0)),
        ([True, True], "empty patch: resolved in run 1: the log's end", (1, 0)),
        ([True, False, True, False, False], "gold patch: not resolved in run 3: the log's end", (2, 2)),
    ],
)
def test_wrong_results_quarantine(answers: list[bool | Exception], reason: str, counts: tuple[int, int]) -> None:
    bad, good = run(["bad", "good"], Grader(bad=answers))
    assert not bad.qualified
    assert bad.reason == reason
    assert (bad.gold_passed, bad.empty_failed) == counts
    assert good.qualified


def test_an_infrastructure_failure_is_tried_again() -> None:
    (result,) = run(["a"], Grader(), Provider(broken=2))
    assert result.qualified


def test_what_can_not_be_graded_says_so() -> None:
    (result,) = run(["a"], Grader(), Provider(broken=3))
    assert result.reason == "gold patch: not gradable: sandbox_start/start: no room"
    final: list[bool | Exception] = [GraderError("no such parser", kind="log_parser", retryable=False)]
    (result,) = run(["a"], Grader(a=final))
    assert result.reason == "gold patch: not gradable: grader/log_parser: no such parser"


def test_digest_covers_what_is_graded_and_nothing_else() -> None:
    base = qualify.graded_digest(task("a"))
    assert base == qualify.graded_digest(
        task("a", dataset="d@2", weight=2.0, strata={"kind": "x"}, problem_statement="y")
    )
    assert base != qualify.graded_digest(task("a", eval_script="x"))
    assert base != qualify.graded_digest(task("a", patch="x"))


def result(name: str, reason: str = "") -> Qualification:
    return Qualification(instance_id=name, graded="0", runs=1, gold_passed=1, empty_failed=1, reason=reason)


def test_results_are_added_to_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    assert qualify.read(path) == {}
    qualify.write(path, [result("b", "old"), result("a")])
    qualify.write(path, [result("c"), result("b")])
    assert [json.loads(line)["instance_id"] for line in path.read_text().splitlines()] == ["a", "b", "c"]
    assert qualify.read(path)["b"].qualified
    assert [p.name for p in tmp_path.iterdir()] == ["q.jsonl"]


COLUMNS = ("repo", "base_commit", "patch", "test_patch", "problem_statement", "version", "eval_script", "log_parser")


def rows(path: Path, names: str, **changes: str) -> str:
    """A file of SWE-bench rows; its spec."""
    row = dict.fromkeys(COLUMNS, "x") | {"eval_script": SCRIPT, "image": "i", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": []}
    path.write_text("".join(json.dumps(row | changes | {"instance_id": name}) + "\n" for name in names))
    return f"swebench:{path}"


def test_quarantined_tasks_are_not_loaded(tmp_path: Path) -> None:
    spec = rows(tmp_path / "rows.jsonl", "abc")
    qualify.write(qualify.results_path(spec), [result("b", "gold patch: not resolved"), result("c")])
    assert [t.instance_id for t in task_sources.load_tasks(spec)] == ["a", "c"]
    assert [t.instance_id for t in task_sources.load_tasks(spec, quarantined=True)] == ["a", "b", "c"]


def test_a_source_is_qualified_and_what_is_not_is_named(tmp_path: Path) -> None:
    spec = rows(tmp_path / "rows.jsonl", "ab", log_parser="nope")
    said: list[str] = []
    found = qualify.qualify_source(spec, runs=2, provider="fake", sets=["grader.name=tests"], say=said.append)
    assert (found.tasks, found.qualified, found.runs) == (2, 0, 2)
    assert [one.instance_id for one in found.quarantined] == ["a", "b"]
    assert "log parser 'nope' is unknown" in found.quarantined[0].reason
    assert said[0] == "2 of 2 tasks to qualify in 2 runs each"
    assert said[1].startswith("quarantined a: gold patch: not gradable")


class Told(Exception):
    """Ends a qualification where its grader is made."""


@pytest.mark.parametrize("source", ["swebench", "subset"])
def test_rows_are_graded_by_the_grader_of_their_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    asked: list[str] = []

    def make_grader(name: str) -> None:
        asked.append(name)
        raise Told

    monkeypatch.setattr("farm.grader.make_grader", make_grader)
    spec = rows(tmp_path / "rows.jsonl", "ab")
    if source == "subset":
        drawn = draw(task_sources.load_tasks(spec), source=spec, size=2, seed=1, excluded=())
        save(drawn, tmp_path / "two.json")
        spec = f"subset:{tmp_path / 'two.json'}"
    with pytest.raises(Told):
        qualify.qualify_source(spec, runs=1, provider="fake")
    assert asked == ["swebench"]
    assert qualify.results_path(spec).parent == tmp_path


def test_what_can_not_be_graded_here_quarantines_nothing(tmp_path: Path) -> None:
    spec = rows(tmp_path / "rows.jsonl", "ab")
    with pytest.raises(UsageError, match="--provider docker"):
        qualify.qualify_source(spec, runs=1, provider="bubblewrap")
    assert not qualify.results_path(spec).exists()
    assert len(task_sources.load_tasks(spec)) == 2


@pytest.mark.parametrize("arguments", [["nope", "--runs", "1"], ["micro:rl", "--runs", "0"]])
def test_command_refuses_bad_input(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert qualify.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(("split", "runs"), [("benchmark", 5), ("rl", 3), ("sft", 3)])
def test_the_shipped_micro_suite_is_qualified_as_it_is_now(split: str, runs: int) -> None:
    results = qualify.read(qualify.results_path(f"micro:{split}"))
    for shipped in task_sources.load_tasks(f"micro:{split}", quarantined=True):
        found = results[shipped.instance_id]
        assert found.qualified
        assert found.runs >= runs
        assert found.graded == qualify.graded_digest(shipped)
