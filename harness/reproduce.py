"""`harness reproduce`: run each claim's experiment, judge it, write the report."""

from __future__ import annotations

import traceback
from pathlib import Path

from rich.console import Console

from farm import __version__
from farm.errors import UsageError
from harness import claims, experiments, report
from harness.claims import Claim
from harness.lab import Lab
from harness.profiles import profile
from harness.provenance import ROOT, provenance

BUILD = ROOT / "build" / "reproduce"


def reproduce(claim_ids: tuple[str, ...], *, profile_name: str, out: Path | None) -> int:
    """Exit code: 0 when every experiment ran, 1 when one broke (its row says why)."""
    chosen, settings = claims.select(claim_ids), profile(profile_name)
    # Only a full run may replace the committed report.
    folder = out or (ROOT / "reports" / __version__ if profile_name == "full" else BUILD / profile_name / "report")
    console = Console()
    lab = Lab(folder=BUILD / profile_name, profile=settings, console=console, plan=_plan(chosen))
    rows = [_run(claim, lab) for claim in chosen]
    report.write(folder, rows, provenance(profile_name) | {"stages": lab.commits()})
    console.print(report.table(rows), markup=False, soft_wrap=True)
    console.print(f"report: {folder / 'report.md'}")
    return int(any(row.problem for row in rows))


def _plan(chosen: list[Claim]) -> list[str]:
    stages = [stage for claim in chosen for stage in experiments.STAGES.get(claim.experiment or "", ())]
    return list(dict.fromkeys(stages))


def _run(claim: Claim, lab: Lab) -> report.Row:
    experiment = experiments.load(claim)
    if experiment is None:
        return report.Row(claim=claim, measurement=None)
    try:
        return report.Row(claim=claim, measurement=experiment(lab))
    except (UsageError, KeyboardInterrupt):
        raise
    except Exception as error:  # one broken experiment must not cost the others; its row and the exit code tell
        lab.console.print(f"[red]{claim.id} broke[/]")
        lab.console.print(traceback.format_exc(), markup=False)
        return report.Row(claim=claim, measurement=None, problem=f"broke: {type(error).__name__}: {error}"[:300])
