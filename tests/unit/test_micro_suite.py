"""The micro suite: the same bytes everywhere, honest tasks, and a benchmark apart from everything else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.suites import micro, micro_names
from farm.suites.micro_edits import candidate_edits
from farm.suites.micro_problem import MAX_LINES, SIZES, Problem, grade, is_held_out, shape
from farm.suites.micro_sim import CHECK, READ, UNDO, Simulation
from farm.suites.operators import KINDS
from farm.suites.repo import workspace_files
from farm.types import InlineFiles, Task


@pytest.fixture(scope="module")
def sample() -> list[Problem]:
    return list(islice(micro.problems("rl"), 44))


def module_of(task: Task) -> str:
    assert isinstance(task.workspace, InlineFiles)
    return next(text for path, text in task.workspace.files.items() if path.endswith(".py"))


def functions_of(tasks: Sequence[Task]) -> set[str]:
    return {line[4 : line.index("(")] for t in tasks for line in module_of(t).splitlines() if line.startswith("def ")}


def test_a_split_is_the_same_every_time_and_is_what_is_shipped() -> None:
    shipped = micro.load("benchmark")
    assert micro.generate("benchmark") == shipped
    assert [t.digest for t in micro.generate("rl", count=5)] != [t.digest for t in micro.generate("sft", count=5)]
    first = [p.broken for p in islice(micro.problems("rl"), 5)]
    assert [module_of(t) for t in micro.load("rl")[:5]] == first


def test_the_manifest_describes_the_shipped_files() -> None:
    manifest = json.loads((micro.FOLDER / "manifest.json").read_text())
    assert manifest["seed"] == micro.SEED
    for split, count in micro.COUNTS.items():
        tasks, entry = micro.load(split), manifest["splits"][split]
        assert len(tasks) == entry["count"] == count
        assert {t.dataset for t in tasks} == {entry["dataset"]}
        assert len({t.instance_id for t in tasks}) == len({t.base_commit for t in tasks}) == count


def test_the_benchmark_shares_no_repository_name_or_shape_with_anything_else() -> None:
    benchmark = micro.load("benchmark")
    others = [*micro.load("sft"), *micro.load("rl")]
    assert not {t.repo for t in benchmark} & {t.repo for t in others}
    assert not functions_of(benchmark) & functions_of(others)
    held, open_ = micro_names.repositories(held_out=True), micro_names.repositories(held_out=False)
    for field in ("repo", "module"):
        assert not {getattr(n, field) for n in held} & {getattr(n, field) for n in open_}
    assert not {f for n in held for f in n.functions} & {f for n in open_ for f in n.functions}
    fixed = [p.fixed for p in islice(micro.problems("pretrain"), 44)]
    assert not any(is_held_out(source) for source in fixed)
    assert all(is_held_out(p.fixed) for p in islice(micro.problems("benchmark"), 22))
    assert not {shape(module_of(t)) for t in benchmark} & {shape(module_of(t)) for t in others}


def test_the_benchmark_is_stratified_and_its_weights_undo_the_strata_sizes() -> None:
    tasks = micro.load("benchmark")
    strata = Counter((t.strata["kind"], t.strata["size"]) for t in tasks)
    assert set(strata) == {(kind, size) for kind in KINDS for size in SIZES}
    assert set(strata.values()) == {4, 5}
    totals: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        totals[task.strata["kind"], task.strata["size"]] += task.weight  # type: ignore[assignment]
    assert all(total == pytest.approx(100 / 22, rel=1e-4) for total in totals.values())


def test_the_gold_edit_repairs_and_nothing_is_broken_without_a_failing_test(sample: list[Problem]) -> None:
    for problem in sample:
        assert problem.gold.apply(problem.broken) == problem.fixed != problem.broken
        assert all(grade(problem.hidden, problem.fixed).values())
        broken = grade(problem.hidden, problem.broken)
        assert {name for name, passed in broken.items() if not passed} == set(problem.fail_to_pass) != set()
        assert {name for name, passed in broken.items() if passed} == set(problem.pass_to_pass) != set()
        assert problem.fixed.count("\n") <= MAX_LINES


def test_the_agent_sees_no_grading_test(sample: list[Problem]) -> None:
    for number, problem in enumerate(sample):
        task = micro.to_task(problem, "rl", number)
        visible = b"\n".join(workspace_files(task).values()).decode(errors="replace") + task.problem_statement
        assert problem.test_path not in visible
        for call in problem.hidden:
            if call.name != "test_defined":
                assert call.call not in visible


def test_rows_survive_a_round_trip(sample: list[Problem]) -> None:
    task = micro.to_task(sample[0], "rl", 0)
    assert micro.from_row(json.loads(json.dumps(micro.to_row(task)))) == task


def test_what_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown; shipped are sft, rl, benchmark"):
        micro.load("train")
    with pytest.raises(UsageError, match=r"rl\.parquet can't be read"):
        micro.load("rl", folder=tmp_path)
    (tmp_path / "rl.parquet").write_bytes(b"no parquet")
    with pytest.raises(UsageError, match=r"rl\.parquet can't be read"):
        micro.load("rl", folder=tmp_path)
    with pytest.raises(UsageError, match="there are pretrain, sft, rl, benchmark"):
        next(micro.problems("train"))


def test_the_simulation_answers_like_the_commands(sample: list[Problem]) -> None:
    problem = sample[0]
    simulation = Simulation(problem)
    assert simulation.run(READ).splitlines()[0] == "" + problem.broken.splitlines()[0]
    assert simulation.run(CHECK).startswith("FAILED ")
    assert simulation.run(problem.gold.command) == ""
    assert simulation.run(CHECK) == "PASSED\n"
    assert simulation.solved()
    assert simulation.run(UNDO) == ""
    assert simulation.source == problem.broken
    assert simulation.run("rm -rf /") == "bash: line 1: rm: command not found\n"


def test_the_right_edit_is_nearly_always_among_the_candidates(sample: list[Problem]) -> None:
    found = [problem.gold in candidate_edits(problem.broken) for problem in sample]
    assert sum(found) >= 0.9 * len(found)
