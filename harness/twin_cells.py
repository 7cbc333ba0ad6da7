"""The twin's column of the report: its predictions, made once for the code and the calibration as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from harness import shape
from harness.lab import Lab, StageError
from harness.profiles import Profile

STAGE, FILE = "twin", "predictions.json"


def wanted(profile: Profile) -> bool:
    return profile.name != "quick"


def twin_cells(lab: Lab) -> dict[str, Any]:
    """Claim id -> cell; empty where an archive has no predictions, and for a quick run, which has no time for them.

    Raises UsageError where they are damaged."""

    def work(folder: Path) -> None:
        from harness.twin import predictions, sensitivity

        cells = predictions.predictions(ranges=sensitivity.stored())
        (folder / FILE).write_text(json.dumps({claim: cell.to_json() for claim, cell in cells.items()}))

    if not (lab.archive or wanted(lab.profile)):
        return {}
    try:
        place = lab.stage(STAGE, work) / FILE
    except StageError:
        return {}
    remedy = f"remove {place.parent} and run `harness reproduce`, or bring back the committed logs (git checkout)"
    try:
        return dict(shape.read(shape.Predictions, place, remedy=remedy))
    except FileNotFoundError as error:
        raise UsageError(f"{place}: holds no predictions ({error}); {remedy}") from None
