"""`harness reproduce`: run each claim's experiment, keep what the figures need of its logs, make the report of that.

The report is always made from the kept logs, never from what an experiment said while it ran: so making it again from
the same logs gives the same bytes.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from farm import __version__
from farm.durable import FolderLock, write_json
from farm.errors import UsageError
from harness import back_ends, claims, document, evidence, experiments, progress, report, sections, shape, twin_cells
from harness.claims import Claim
from harness.document import Row
from harness.lab import Lab, StageError
from harness.profiles import Profile, profile
from harness.provenance import ROOT, provenance
from harness.stage_facts import stage_facts
from harness.twin_cells import STAGE as TWIN

BUILD = ROOT / "build" / "reproduce"
REPORTS = ROOT / "reports"
LOGS, ORIGIN = "logs", "origin.json"
_PROBLEM_LENGTH = 300


def _unsaid(_: str) -> None:
    """Tells nobody."""


def reproduce(claim_ids: tuple[str, ...], *, profile_name: str, out: Path | None) -> int:
    """Exit code: 0 when every experiment ran, 1 when one broke (its row says why)."""
    chosen, settings = claims.select(claim_ids), profile(profile_name)
    back_ends.require(settings, {role for claim in chosen if claim.experiment for role in claim.back_ends}, os.environ)
    # Only a full run may replace the committed report.
    folder = out or (REPORTS / __version__ if profile_name == "full" else BUILD / profile_name / "report")
    console = Console()
    report.check_folder(folder)
    lab = Lab(folder=BUILD / profile_name, profile=settings, console=console, plan=_plan(chosen, settings))
    lab.folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(lab.folder / "reproduce.lock", "reproduction")
    lock.acquire()
    try:
        problems = _run(chosen, lab)
        _keep(lab, folder, problems, {claim.id for claim in chosen} | ({TWIN} if _predicted(chosen) else set()))
        made = rebuild(folder, strict=False)
        report.write(folder, made)
    finally:
        lock.release()
    show(made, console)
    console.print(f"report: {folder / 'report.html'}")
    return int(bool(problems))


def rebuild_from(stages: Path, folder: Path, *, say: Callable[[str], None] = _unsaid) -> dict[str, Any]:
    """Keep the logs of every finished stage below ``stages``, whose name is its profile's, beside the report in
    ``folder``, and give the document that they make with those of other stages that lie there already. Where the report
    has no origin yet, it is this checkout on this machine.

    Raises UsageError when there is no finished stage, they are of another profile than the report, or are damaged; then
    the kept logs are as they were."""
    finished = sorted(done.parent for done in stages.glob("*/done.json"))
    if not finished:
        raise UsageError(f"{stages}: holds no finished stage; give a folder that `harness reproduce` ran in")
    place = folder / LOGS / ORIGIN
    own, known = profile(stages.absolute().name), _read_origin(place) if place.exists() else None
    if known is not None and known["provenance"]["profile"] != own.name:
        raise UsageError(
            f"{stages}: is of profile {own.name}, the report in {folder} of {known['provenance']['profile']}; give "
            "stages of that profile, or another folder for the report"
        )
    with evidence.replaced(folder / LOGS) as logs:
        evidence.keep(finished, logs)
        if known is None:
            write_json(logs / ORIGIN, _origin(own))
        try:
            return _document(logs, strict=True, say=say)
        except UsageError as error:
            raise UsageError(str(error).replace(str(logs), str(stages))) from None


def rebuild(folder: Path, *, strict: bool = True, say: Callable[[str], None] = _unsaid) -> dict[str, Any]:
    """The document that the logs kept in ``folder`` give; ``say`` is told what is read.

    Raises UsageError without them, or if damaged. A claim that can't be made from them is an error if ``strict``, else
    its row says so: it must not cost the others, which were just run."""
    return _document(folder / LOGS, strict=strict, say=say)


def _document(logs: Path, *, strict: bool, say: Callable[[str], None]) -> dict[str, Any]:
    try:
        origin = _read_origin(logs / ORIGIN)
    except FileNotFoundError:
        raise UsageError(f"{logs}: holds no kept logs; `harness reproduce` keeps them beside its report") from None
    name = origin["provenance"]["profile"]
    finished, told = sorted(done.parent for done in logs.glob("*/done.json")), claims.load()
    tell = progress.telling(say, len(finished) + len(told))
    stages = {}
    for stage in finished:
        tell(f"logs of stage {stage.name}")
        stages[stage.name] = stage_facts(stage)
    lab = Lab(folder=logs, profile=profile(name), console=Console(quiet=True), archive=True)
    problems: Mapping[str, str] = origin["problems"]
    broke = problems.get(TWIN, "")  # then what was kept of it is of an earlier run
    cells = {} if broke else twin_cells.twin_cells(lab)
    rows = []
    for claim in told:
        tell(f"claim {claim.id}")
        row = _row(claim, lab, problems.get(claim.id, ""), cells.get(claim.id), strict=strict)
        rows.append(replace(row, twin_problem="" if claim.twin else broke))
    say("figures")
    return document.build(rows, version=origin["version"], provenance=origin["provenance"], stages=stages)


def show(made: Mapping[str, Any], console: Console) -> None:
    """The claim table, on a terminal."""
    from rich.table import Table

    table = Table(*sections.claims(made).head, box=None)
    for row in made["claims"]:
        table.add_row(row["id"], sections.here(row), sections.twin(row), sections.reported(row), row["status"])
    console.print(table, markup=False)


# ------------------------------------------------------------------------------------------------ inside


def _plan(chosen: Sequence[Claim], settings: Profile) -> list[str]:
    stages = [stage for claim in chosen for stage in experiments.stages(claim, settings)]
    return [*dict.fromkeys(stages), *([TWIN] if _predicted(chosen) and twin_cells.wanted(settings) else [])]


def _predicted(chosen: Sequence[Claim]) -> bool:
    """Whether the twin has a say in any of them."""
    return any(not claim.twin for claim in chosen)


def _run(chosen: Sequence[Claim], lab: Lab) -> dict[str, str]:
    """Run what the claims need; claim id -> what broke. One broken experiment must not cost the others."""
    problems = {}
    for claim in chosen:
        experiment = experiments.load(claim, lab.profile)
        if experiment is not None and (problem := _attempt(partial(experiment, lab), claim.id, lab)):
            problems[claim.id] = problem
    if _predicted(chosen) and (problem := _attempt(partial(twin_cells.twin_cells, lab), TWIN, lab)):
        problems[TWIN] = problem
    return problems


def _attempt(run: Callable[[], object], name: str, lab: Lab) -> str:
    try:
        run()
    except (UsageError, KeyboardInterrupt):
        raise
    except Exception as error:
        lab.console.print(f"[red]{name} broke[/]")
        lab.console.print(traceback.format_exc(), markup=False)
        return _told(error, lab)
    return ""


def _told(error: Exception, lab: Lab) -> str:
    """What broke, for the report: without where the checkout lies."""
    words = f"broke: {type(error).__name__}: {error}"
    for folder in (lab.folder.absolute(), ROOT):
        words = words.replace(f"{folder}/", "")
    return words[:_PROBLEM_LENGTH]


def _keep(lab: Lab, folder: Path, problems: Mapping[str, str], chosen: set[str]) -> None:
    """The logs of the stages that were used; those of other claims stay as they were kept before. ``chosen``: the
    claims, and the twin where it was asked."""
    used = [lab.folder / name for name in lab.used if (lab.folder / name / "done.json").exists()]
    place = folder / LOGS / ORIGIN
    before = _read_origin(place)["problems"] if place.exists() else {}
    others = {claim: problem for claim, problem in before.items() if claim not in chosen}
    with evidence.replaced(folder / LOGS) as logs:
        evidence.keep(used, logs)
        if chosen >= {claim.id for claim in claims.load()}:
            evidence.forget(logs, keep={stage.name for stage in used})
        write_json(logs / ORIGIN, _origin(lab.profile) | {"problems": {**others, **problems}})


def _read_origin(place: Path) -> Mapping[str, Any]:
    remedy = "bring back the committed one (git checkout), or remove it and run `harness reproduce --all`"
    return shape.read(shape.Origin, place, remedy=remedy)


def _origin(settings: Profile) -> dict[str, Any]:
    return {
        "version": __version__,
        "provenance": provenance(settings.name) | {"back_ends": dict(settings.back_ends)},
        "problems": {},
    }


def _row(claim: Claim, lab: Lab, problem: str, twin: Mapping[str, Any] | None, *, strict: bool) -> Row:
    experiment = experiments.load(claim, lab.profile)
    if experiment is None or problem:
        return Row(claim=claim, measurement=None, problem=problem, twin=twin)
    lab.used.clear()
    try:
        measurement = experiment(lab)
    except StageError as error:
        return Row(claim=claim, measurement=None, problem=f"not run: {error}", twin=twin)
    except Exception as error:
        if strict and isinstance(error, UsageError):
            raise
        if strict:
            stages = ", ".join(lab.used)
            raise UsageError(
                f"{lab.folder}: the logs of {stages} do not give the row {claim.id} ({_told(error, lab)}); "
                f"bring back the committed ones (git checkout), or run `harness reproduce {claim.id}`"
            ) from error
        return Row(claim=claim, measurement=None, problem=_told(error, lab), twin=twin, stages=tuple(lab.used))
    return Row(claim=claim, measurement=measurement, twin=twin, stages=tuple(lab.used))
