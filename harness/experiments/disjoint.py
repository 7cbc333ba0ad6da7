"""Whether any training repository is one of the benchmark's: the micro splits, and the shipped real packages against
SWE-bench Verified where that lies here. What public training sets share with it is told beside that: nobody here trains
on them, and that some of it is found shows that the check finds it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from farm.suites import made, micro_names
from farm.suites.overlap import Overlap, RepoRef, overlap
from farm.suites.overlap_refs import ref_of
from farm.tasks import load_tasks
from harness.claims import Measurement
from harness.lab import Lab
from harness.provenance import ROOT
from harness.stats import Estimate

VERIFIED, REPOSITORIES = "SWE-bench_Verified_test.parquet", "train_bench_repos.json"
OURS = "shipped packages"
SHIPPED = ROOT / "datasets" / "pypi" / "train"
LISTS = "ROLLOUT_FARM_DATA"  # the folder with both
BESIDE = Path("shared") / "data"  # where they are looked for as well, beside the project or a folder that it lies in


def overlaps(lab: Lab) -> Measurement:
    real = (_found(VERIFIED), _found(REPOSITORIES))

    def work(stage: Path) -> None:
        checked = {"micro": _micro(), "real_lists": _real_lists(*real)}
        (stage / "overlaps.json").write_text(json.dumps(checked))

    checked = json.loads((lab.stage("disjoint", work) / "overlaps.json").read_text())
    micro, lists = checked["micro"], checked["real_lists"]
    found, against = list(micro["overlaps"]), "the micro benchmark's repositories"
    if isinstance(lists, dict):
        found += lists[OURS]["overlaps"]
        against += " and, for the shipped real packages, SWE-bench Verified's"
    count = float(len(found))
    return Measurement(
        estimate=Estimate(value=count, low=count, high=count, n=micro["benchmark_repositories"]),
        unit=f"overlaps with {against}",
        holds=not found,
        detail=checked,
    )


def _found(name: str, root: Path = ROOT) -> Path:
    """The file of the first folder that has it; where it should be when none has."""
    given = os.environ.get(LISTS)
    folders = [*([Path(given)] if given else []), *(parent / BESIDE for parent in root.parents)]
    return next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)


def _micro() -> dict[str, Any]:
    bench = [RepoRef(name=t.repo, base_commit=t.base_commit) for t in load_tasks("micro:benchmark")]
    train = [RepoRef(name=t.repo, base_commit=t.base_commit) for s in ("rl", "sft") for t in load_tasks(f"micro:{s}")]
    # Pretraining problems are made on the fly, from every repository that is not held out.
    train += [RepoRef(name=names.repo) for names in micro_names.repositories(held_out=False)]
    return {
        "overlaps": _told(overlap(train, bench)),
        "train_repositories": len({r.name for r in train}),
        "benchmark_repositories": len({ref.name for ref in bench}),
    }


def _real_lists(verified: Path, lists: Path) -> dict[str, Any] | str:
    """Overlaps of the public training sets, and of the tasks from real packages that are shipped, with SWE-bench
    Verified, canonical names, aliases and forks resolved."""
    if not (verified.is_file() and lists.is_file()):
        return f"not checked: set {LISTS} to the folder with {verified.name} and {lists.name}"
    rows = load_tasks(f"swebench:{verified}")
    bench = [ref_of(task) for task in rows]
    known = json.loads(lists.read_text())
    sets = {
        "SWE-smith": known["swe_smith"]["python_repos"],
        "R2E-Gym": known["r2e_gym"]["bare_repo_names"],
        "SWE-Gym": known["swe_gym"]["repos_seen_in_stored_files"],
        "SWE-bench train": known["swebench_train_split_repos_35"]["repos"],
        "SWE-bench dev": known["swebench_dev_repos"],
    }
    refs = {name: [RepoRef(name=repo) for repo in repos] for name, repos in sets.items()}
    packages = made.read_sources(SHIPPED)
    refs[OURS] = [
        RepoRef(name=packages[row["package"]].source.repo, paths=(row["path"],)) for row in made.read_rows(SHIPPED)
    ]
    return {
        name: {"repositories": len({ref.name for ref in train}), "overlaps": _told(overlap(train, bench))}
        for name, train in refs.items()
    }


def _told(found: list[Overlap]) -> list[str]:
    return sorted({f"{o.train.name} is {o.bench} ({o.reason})" for o in found})
