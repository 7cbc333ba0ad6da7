"""The twin's column of the report: its predictions, made once for the code and the calibration as they are."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.lab import Lab, StageError

STAGE, FILE = "twin", "predictions.json"


def twin_cells(lab: Lab) -> dict[str, Any]:
    """Claim id -> cell; empty where an archive has no predictions, or this version has no twin."""
    short = lab.profile.name == "quick"

    def work(folder: Path) -> None:
        from harness.twin import predictions, sensitivity

        horizons = predictions.SHORT if short else predictions.FULL
        cells = predictions.predictions(ranges=sensitivity.stored(), horizons=horizons)
        (folder / FILE).write_text(json.dumps({claim: cell.to_json() for claim, cell in cells.items()}))

    if not lab.archive and find_spec("harness.twin.predictions") is None:
        return {}
    try:
        cells: dict[str, Any] = json.loads((lab.stage(STAGE, work) / FILE).read_text())
    except StageError:
        return {}
    return cells
