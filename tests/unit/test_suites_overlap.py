"""Overlap of training and benchmark repositories: every spelling is seen through, siblings are left alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from farm.suites.overlap import RepoRef, canonical, overlap

DATA = Path(os.environ.get("ROLLOUT_FARM_DATA") or Path(__file__).parents[3] / "shared" / "data")
BENCH = [
    RepoRef(name="django/django", base_commit="a" * 40, paths=("django/db/models/query.py", "django/forms/fields.py")),
    RepoRef(name="sympy/sympy", paths=("sympy/core/expr.py",)),
    RepoRef(name="psf/requests", paths=("requests/sessions.py",)),
    RepoRef(name="pallets/flask", paths=("src/flask/app.py",)),
    RepoRef(name="pytest-dev/pytest", paths=("src/_pytest/python.py",)),
    RepoRef(name="matplotlib/matplotlib", paths=("lib/matplotlib/axis.py",)),
    RepoRef(name="pydata/xarray"),
    RepoRef(name="scikit-learn/scikit-learn", paths=("sklearn/base.py",)),
    RepoRef(name="pylint-dev/pylint", paths=("pylint/lint.py",)),
    RepoRef(name="vuejs/core"),
]


def needs(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: set ROLLOUT_FARM_DATA to the folder that holds it")
    return path


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("Django/Django", "django/django"),
        ("https://github.com/django/django.git", "django/django"),
        ("https://github.com/django/django/pull/12?x=1#y", "django/django"),
        ("git@github.com:django/django.git", "django/django"),
        ("ssh://git@example.org:22/django/django", "django/django"),
        ("github.com/django/django/", "django/django"),
        ("swesmith/sympy__sympy.360290c4", "sympy/sympy"),
        ("someone/sympy__sympy", "sympy/sympy"),
        ("swebench/swesmith.x86_64.pallets_1776_flask.bc098406", "pallets/flask"),
        ("swebench/sweb.eval.x86_64.django_1776_django-10097:latest", "django/django"),
        ("docker.io/swebench/sweb.eval.x86_64.scikit-learn_1776_scikit-learn-10297", "scikit-learn/scikit-learn"),
        ("someone/verified:sweb.eval.x86_64.django__django-10097", "django/django"),
        ("xingyaoww/sweb.eval.x86_64.python_s_mypy-10036", "python/mypy"),
        ("namanjain12/sympy_final:0123abc", "sympy"),
        ("sympy", "sympy"),
        ("django__django-10097", "django/django"),
        ("pytest-dev__pytest-xdist-12", "pytest-dev/pytest-xdist"),
        ("sympy__sympy.360290c4.func_pm_ctrl__abc12345", "sympy/sympy"),
        ("instance_ansible__ansible-" + "0" * 40 + "-v1", "ansible/ansible"),
        ("mrdoob/three.js", "mrdoob/three.js"),
    ],
)
def test_canonical_form(spelling: str, expected: str) -> None:
    assert canonical(spelling) == expected


@pytest.mark.parametrize(
    ("ref", "bench", "reason"),
    [
        (RepoRef(name="swesmith/sympy__sympy.360290c4"), "sympy/sympy", "same"),
        (RepoRef(name="namanjain12/sympy_final:0123abc"), "sympy/sympy", "bare name"),
        (RepoRef(name="sklearn"), "scikit-learn/scikit-learn", "alias"),
        (RepoRef(name="kennethreitz/requests"), "psf/requests", "alias"),
        (RepoRef(name="PyCQA__pylint-4551"), "pylint-dev/pylint", "alias"),
        (RepoRef(name="anyone/django"), "django/django", "fork"),
        (RepoRef(name="anyone/django-fork"), "django/django", "fork"),
        (RepoRef(name="acme/web", base_commit="A" * 40), "django/django", "commit"),
        (RepoRef(name="acme/web", paths=("django/db/backends/base.py",)), "django/django", "paths"),
        (RepoRef(name="acme/plots", paths=("lib/matplotlib/pyplot.py", "CHANGES")), "matplotlib/matplotlib", "paths"),
        (RepoRef(name="acme/runner", paths=("src/_pytest/main.py",)), "pytest-dev/pytest", "paths"),
        (RepoRef(name="pypa/pip", paths=("src/pip/_vendor/requests/api.py",)), "psf/requests", "vendored"),
    ],
)
def test_found_with_its_reason(ref: RepoRef, bench: str, reason: str) -> None:
    (found,) = overlap([ref], BENCH)
    assert (found.bench, found.reason, found.train) == (bench, reason, ref)
    assert found.detail


@pytest.mark.parametrize(
    "ref",
    [
        RepoRef(name="pallets/jinja", paths=("src/jinja2/environment.py",)),
        RepoRef(name="django/channels", paths=("channels/layers.py",)),
        RepoRef(name="django/daphne"),
        RepoRef(name="swesmith/django-money__django-money.835c1ab8", paths=("djmoney/money.py",)),
        RepoRef(name="pytest-dev__pytest-xdist-12", paths=("src/xdist/dsession.py",)),
        RepoRef(name="pylint-dev/astroid", base_commit="b" * 40, paths=("astroid/nodes.py",)),
        RepoRef(name="psf/black", paths=("src/black/lines.py",)),
        RepoRef(name="home-assistant/core"),
        RepoRef(name="acme/app", paths=("setup.py", "tests/django/test_x.py")),
        RepoRef(name="acme/short", base_commit="aaaaaaaa"),
        RepoRef(name="requests-html"),
    ],
)
def test_siblings_and_strangers_are_not_flagged(ref: RepoRef) -> None:
    assert overlap([ref], BENCH) == []


def test_one_row_per_repository_and_the_strongest_reason() -> None:
    ref = RepoRef(name="django/django", base_commit="a" * 40, paths=("django/http/request.py",))
    (found,) = overlap([ref], BENCH)
    assert found.reason == "same"


def patched(text: str) -> tuple[str, ...]:
    return tuple(line.split(" b/")[1] for line in text.splitlines() if line.startswith("diff --git "))


def rows(name: str) -> list[RepoRef]:
    table: list[dict[str, Any]] = parquet.read_table(needs(name), columns=["repo", "base_commit", "patch"]).to_pylist()
    return [RepoRef(name=r["repo"], base_commit=r["base_commit"], paths=patched(r["patch"])) for r in table]


def test_real_training_lists_against_verified() -> None:
    bench = rows("SWE-bench_Verified_test.parquet")
    lists = json.loads(needs("train_bench_repos.json").read_text())
    profiles = json.loads(needs("swesmith_0.0.9_profiles.json").read_text())
    spellings = ("mirror", "image")
    smith = [RepoRef(name=p[key]) for p in profiles if p["repo"] for key in spellings]
    assert {found.bench for found in overlap(smith, bench)} == {"pallets/flask", "sympy/sympy"}
    assert {found.reason for found in overlap(smith, bench)} == {"same"}
    gym = [RepoRef(name=f"namanjain12/{name}_final:0123abc") for name in lists["r2e_gym"]["bare_repo_names"]]
    assert [found.bench for found in overlap(gym, bench)] == ["sympy/sympy"]
    train = [RepoRef(name=name) for name in lists["swebench_train_split_repos_35"]["repos"]]
    assert overlap(train, bench) == []
    multilingual = [RepoRef(name=name) for name in lists["swebench_multilingual_repos"]]
    assert overlap(multilingual, bench) == []


def test_real_dev_rows_are_disjoint_from_verified_and_verified_is_not_from_itself() -> None:
    bench = rows("SWE-bench_Verified_test.parquet")
    assert overlap(rows("SWE-bench_dev.parquet"), bench) == []
    renamed = [RepoRef(name="acme/copy", paths=ref.paths) for ref in bench]
    assert len(overlap(renamed, bench)) > 450
    assert len(overlap(bench, bench)) == 500
