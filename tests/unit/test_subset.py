"""The stratified subset: every task has its chance, weights give back the whole, the same seed draws the same."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.cli import main
from farm.errors import UsageError
from farm.suites.subset import UNSTABLE_GOLD, draw, load, save
from farm.tasks import load_tasks
from farm.types import ImageFiles, Task

DATA = Path(os.environ.get("ROLLOUT_FARM_DATA") or Path(__file__).parents[3] / "shared" / "data")


def task(number: int, repo: str, difficulty: str) -> Task:
    return Task(
        instance_id=f"{repo.replace('/', '__')}-{number}",
        dataset="d@1",
        repo=repo,
        base_commit="",
        problem_statement="",
        patch="",
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        eval_script="",
        log_parser="",
        workspace=ImageFiles(),
        strata={"repo": repo, "difficulty": difficulty},
    )


CELLS = {
    ("o/big", "easy"): 60,
    ("o/big", "hard"): 12,
    ("o/mid", "easy"): 20,
    ("o/small", "easy"): 3,
    ("o/one", "hard"): 1,
}
TASKS = [task(i, repo, d) for (repo, d), count in CELLS.items() for i in range(count)]
TASKS = [task(n, t.repo, t.strata["difficulty"]) for n, t in enumerate(TASKS)]


def test_strata_are_proportional_and_cover_everything() -> None:
    drawn = draw(TASKS, source="s", size=24, seed=1, excluded=())
    assert len(drawn.tasks) == sum(s.drawn for s in drawn.strata) == 24
    assert sum(s.size for s in drawn.strata) == len(TASKS)
    cells = [cell for s in drawn.strata for cell in s.cells]
    assert sorted(cells) == sorted({(d, repo) for repo, d in CELLS})
    assert all(s.drawn >= 2 for s in drawn.strata)
    assert Counter(drawn.tasks.values()) == {s.name: s.drawn for s in drawn.strata}
    assert abs(sum(s.weight * s.drawn for s in drawn.strata) - len(TASKS)) < 1e-9


@settings(max_examples=60, deadline=None)
@given(
    counts=st.dictionaries(
        st.tuples(st.sampled_from(["a/x", "b/y", "c/z", "d/w"]), st.sampled_from(["easy", "mid", "hard"])),
        st.integers(1, 40),
        min_size=1,
        max_size=12,
    ),
    share=st.floats(0.05, 1.0),
    seed=st.integers(0, 5),
)
def test_any_benchmark_can_be_drawn_from(counts: dict[tuple[str, str], int], share: float, seed: int) -> None:
    cells = [cell for cell, count in counts.items() for _ in range(count)]
    tasks = [task(n, repo, difficulty) for n, (repo, difficulty) in enumerate(cells)]
    if len(tasks) < 2:
        return
    size = max(2, round(share * len(tasks)))
    drawn = draw(tasks, source="s", size=size, seed=seed, excluded=())
    assert len(drawn.tasks) == size
    assert sum(s.size for s in drawn.strata) == len(tasks)
    assert all(2 <= s.drawn <= s.size for s in drawn.strata)
    assert drawn == draw(tasks, source="s", size=size, seed=seed, excluded=())


def test_the_weighted_mean_has_no_bias() -> None:
    """Over many seeds the mean of the weighted estimate is the benchmark's own mean."""
    solved = {t.instance_id: float(t.repo == "o/big" or n % 3 == 0) for n, t in enumerate(TASKS)}
    truth = sum(solved.values()) / len(TASKS)
    estimates = []
    for seed in range(300):
        drawn = draw(TASKS, source="s", size=24, seed=seed, excluded=())
        weight = {s.name: s.weight for s in drawn.strata}
        estimates.append(sum(weight[s] * solved[n] for n, s in drawn.tasks.items()) / len(TASKS))
    assert abs(sum(estimates) / len(estimates) - truth) < 0.01


def test_excluded_ones_are_in_neither() -> None:
    gone = TASKS[0].instance_id
    drawn = draw(TASKS, source="s", size=len(TASKS) - 1, seed=1, excluded=(gone, "not__there-1"))
    assert gone not in drawn.tasks
    assert drawn.excluded == (gone,)
    with pytest.raises(UsageError, match="--size 96: allowed are 2 to 95"):
        draw(TASKS, source="s", size=96, seed=1, excluded=(gone,))


def rows(at: Path, count: int = 12) -> Path:
    row: dict[str, Any] = {
        "repo": "o/r", "base_commit": "a" * 40, "patch": "", "test_patch": "", "problem_statement": "", "version": "1",
        "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": [], "log_parser": "p", "image": "i", "difficulty": "easy",
        "eval_script": ": '>>>>> Start Test Output'\n: '>>>>> End Test Output'\n",
    }  # fmt: skip
    path = at / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"instance_id": f"o__r-{n}"}) + "\n" for n in range(count)))
    return path


def test_the_command_writes_a_file_that_is_a_task_source(tmp_path: Path) -> None:
    source, out = f"swebench:{rows(tmp_path)}", tmp_path / "four.json"
    done = CliRunner().invoke(main, ["subset", source, "--size", "4", "--seed", "7", "--out", str(out)])
    assert done.exit_code == 0, done.output
    tasks = load_tasks(f"subset:{out}")
    assert len(tasks) == 4
    assert {t.weight for t in tasks} == {3.0}
    assert {t.strata["stratum"] for t in tasks} == {"easy, o/r"}
    assert json.loads(out.read_text())["seed"] == 7
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    (tmp_path / "rows.jsonl").unlink()
    assert [t.instance_id for t in load(f"{out}@swebench:{moved}")] == [t.instance_id for t in tasks]
    (tmp_path / "rows.jsonl").write_text(moved.read_text().replace('"version": "1"', '"version": "2"'))
    with pytest.raises(UsageError, match="are not those it was drawn from"):
        load_tasks(f"subset:{out}")
    rows(tmp_path, count=2)
    with pytest.raises(UsageError, match="give its rows, or draw anew"):
        load_tasks(f"subset:{out}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "no subset file"),
        ('{"format": "other/1"}', "format 'other/1'"),
        ("[]", "no subset file"),
    ],
)
def test_files_that_are_no_subset(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load_tasks(f"subset:{path}")


def test_the_hundred_of_verified(tmp_path: Path) -> None:
    path = DATA / "SWE-bench_Verified_test.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent: set ROLLOUT_FARM_DATA to the folder that holds it")
    tasks = load_tasks(f"swebench:{path}")
    assert {t.instance_id for t in tasks} >= set(UNSTABLE_GOLD)
    drawn = draw(tasks, source=f"swebench:{path}", size=100, seed=20261129, excluded=UNSTABLE_GOLD)
    assert len(drawn.tasks) == 100
    assert sum(s.size for s in drawn.strata) == 489
    assert not set(UNSTABLE_GOLD) & set(drawn.tasks)
    save(drawn, tmp_path / "hundred.json")
    loaded = load_tasks(f"subset:{tmp_path / 'hundred.json'}")
    assert [t.instance_id for t in loaded] == list(drawn.tasks)
    assert abs(sum(t.weight for t in loaded) - 489) < 1e-6
    shipped = Path(__file__).parents[2] / "datasets" / "swebench" / "verified-100.json"
    assert load_tasks(f"subset:{shipped}@swebench:{path}") == loaded, "the shipped draw is this one"
    wide = Counter(t.strata["difficulty"] for t in loaded)
    assert abs(wide["15 min - 1 hour"] - 52) <= 2
    assert abs(wide["<15 min fix"] - 39) <= 2
