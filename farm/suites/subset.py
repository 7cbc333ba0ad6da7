"""A stratified subset of a benchmark: which tasks, by which draw, with which weights.

Strata are repository x difficulty. One with too few tasks for two in the sample is pooled with the other small ones of
its difficulty, and a pool that is still too small goes into the next one, so that every task of the benchmark is in a
stratum from which tasks are drawn and a variance can be told for each. Seats are given by largest remainder in
proportion to size; within a stratum it is a simple draw without replacement. A task's weight is its stratum's size over
the stratum's sample: the weighted mean estimates the mean of the whole benchmark without bias, and the sizes stand in
the file for the finite-population correction (``harness.stats.strata``).

Pure but for ``load`` and ``save``.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.types import Task, content_digest

FORMAT = "rollout-farm/subset/1"
_LEAST = 2  # tasks of a stratum in the sample

# Gold patches that do not pass every time, or never: SWE-bench/sb-cli issues 15 and 20, SWE-bench issue 484.
UNSTABLE_GOLD = (
    "astropy__astropy-7606",
    "astropy__astropy-8707",
    "astropy__astropy-8872",
    "django__django-10097",
    "psf__requests-1724",
    "psf__requests-1766",
    "psf__requests-1921",
    "psf__requests-2317",
    "pylint-dev__pylint-6528",
    "pylint-dev__pylint-7277",
    "sympy__sympy-13091",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """``size`` tasks of the benchmark are in it, ``drawn`` of them in the subset; ``cells`` are the (difficulty,
    repository) pairs that were pooled."""

    name: str
    size: int
    drawn: int
    cells: tuple[tuple[str, str], ...]

    @property
    def weight(self) -> float:
        return self.size / self.drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """``source`` is the task source it was drawn from, ``content`` the digest of the drawn tasks, wherever their rows
    come from. ``tasks``: instance id -> name of its stratum, in the order of the source."""

    source: str
    content: str
    seed: int
    excluded: tuple[str, ...]
    strata: tuple[Stratum, ...]
    tasks: Mapping[str, str]


def draw(tasks: Sequence[Task], *, source: str, size: int, seed: int, excluded: Sequence[str]) -> Subset:
    """``size`` of ``tasks`` without ``excluded``. Raises UsageError on a size that can't be drawn."""
    eligible = [task for task in tasks if task.instance_id not in set(excluded)]
    if not _LEAST <= size <= len(eligible):
        raise UsageError(f"--size {size}: allowed are {_LEAST} to {len(eligible)} (tasks that are not excluded)")
    cells = Counter(_cell(task) for task in eligible)
    pools = _pools(cells, size / len(eligible))
    seats = _seats([sum(cells[cell] for cell in pool) for pool in pools], size)
    strata, chosen = [], {}
    for pool, drawn in zip(pools, seats, strict=True):
        members = sorted(task.instance_id for task in eligible if _cell(task) in pool)
        name = _name(pool)
        strata.append(Stratum(name=name, size=len(members), drawn=drawn, cells=tuple(pool)))
        picked = random.Random(f"{seed} {name}").sample(members, drawn)
        chosen.update(dict.fromkeys(picked, name))
    return Subset(
        source=source,
        content=_content([task for task in eligible if task.instance_id in chosen]),
        seed=seed,
        excluded=tuple(name for name in excluded if name in {task.instance_id for task in tasks}),
        strata=tuple(strata),
        tasks={task.instance_id: chosen[task.instance_id] for task in eligible if task.instance_id in chosen},
    )


def _content(tasks: Sequence[Task]) -> str:
    return content_digest([replace(task, dataset="").digest for task in tasks])


def _cell(task: Task) -> tuple[str, str]:
    return task.strata.get("difficulty", ""), task.strata.get("repo", task.repo)


def _pools(cells: Mapping[tuple[str, str], int], rate: float) -> list[list[tuple[str, str]]]:
    """Cells in groups of at least ``_LEAST`` expected seats each. Difficulties go from the most to the least frequent,
    so that a rare one is pooled with what comes before it."""
    difficulties = Counter[str]()
    for (difficulty, _), count in cells.items():
        difficulties[difficulty] += count
    pools: list[list[tuple[str, str]]] = []
    waiting: list[tuple[str, str]] = []

    def expected(pool: Sequence[tuple[str, str]]) -> float:
        return rate * sum(cells[cell] for cell in pool)

    for difficulty, _ in sorted(difficulties.items(), key=lambda item: (-item[1], item[0])):
        inside = sorted((cell for cell in cells if cell[0] == difficulty), key=lambda cell: (-cells[cell], cell))
        pools += [[cell] for cell in inside if expected([cell]) >= _LEAST]
        waiting += [cell for cell in inside if expected([cell]) < _LEAST]
        if expected(waiting) >= _LEAST:
            pools.append(waiting)
            waiting = []
    if waiting and pools:
        pools[-1] = [*pools[-1], *waiting]
    elif waiting:
        pools.append(waiting)
    return pools


def _seats(sizes: Sequence[int], total: int) -> list[int]:
    """``total`` in proportion to ``sizes`` by largest remainder, at least ``_LEAST`` where the size allows."""
    whole = sum(sizes)
    exact = [size * total / whole for size in sizes]
    seats = [max(int(share), min(_LEAST, size)) for share, size in zip(exact, sizes, strict=True)]
    by_need = sorted(range(len(sizes)), key=lambda i: (seats[i] - exact[i], i))
    step = 1 if sum(seats) < total else -1
    while sum(seats) != total:
        for i in by_need if step > 0 else reversed(by_need):
            if sum(seats) == total:
                break
            if step > 0 and seats[i] < sizes[i]:
                seats[i] += 1
            elif step < 0 and seats[i] > min(_LEAST, sizes[i]):
                seats[i] -= 1
    return seats


def _name(pool: Sequence[tuple[str, str]]) -> str:
    difficulties = list(dict.fromkeys(difficulty for difficulty, _ in pool))
    repos = pool[0][1] if len(pool) == 1 else f"{len({repo for _, repo in pool})} repositories"
    return f"{' and '.join(difficulty or 'any difficulty' for difficulty in difficulties)}, {repos}"


def save(subset: Subset, path: Path) -> None:
    """As JSON that people can read."""
    strata = {s.name: {"size": s.size, "drawn": s.drawn, "weight": s.weight, "cells": s.cells} for s in subset.strata}
    weights = {s.name: s.weight for s in subset.strata}
    content = {
        "format": FORMAT,
        "source": subset.source,
        "content": subset.content,
        "seed": subset.seed,
        "size": len(subset.tasks),
        "population": sum(s.size for s in subset.strata),
        "excluded": list(subset.excluded),
        "strata": strata,
        "tasks": [{"instance_id": n, "stratum": s, "weight": weights[s]} for n, s in subset.tasks.items()],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(spec: str) -> list[Task]:
    """The tasks of a subset file, in its order, with weights and the stratum. ``FILE@SOURCE`` takes the rows from
    another place than the file says. Raises UsageError when the rows are not those that it was drawn from."""
    from farm.tasks import load_tasks

    file, _, source = spec.partition("@")
    where = f"--tasks subset:{file}"
    try:
        content: dict[str, Any] = json.loads(Path(file).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, known is {FORMAT!r}")
        named = {entry["instance_id"]: (entry["stratum"], float(entry["weight"])) for entry in content["tasks"]}
        digest, source = content["content"], source or content["source"]
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}; draw one with `farm subset`") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where}: no subset file ({type(error).__name__}: {error}): draw one by `farm subset`"
        ) from error
    if source.partition(":")[0] == "subset":
        raise UsageError(f"{where}: its source {source!r} is a subset itself; name the rows")
    known = {task.instance_id: task for task in load_tasks(source, quarantined=True)}
    missing = sorted(named.keys() - known.keys())
    if missing:
        raise UsageError(f"{where}: not in {source}: {', '.join(missing)[:300]}; give its rows, or draw anew")
    if _content([known[name] for name in named]) != digest:
        raise UsageError(f"{where}: the rows in {source} are not those it was drawn from; give those, or draw anew")
    return [
        replace(known[name], weight=weight, strata={**known[name].strata, "stratum": stratum})
        for name, (stratum, weight) in named.items()
    ]
