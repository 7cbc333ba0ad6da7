"""`python -m harness.twin`: the predictions at the reference's scale, and their sensitivity."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from harness.twin import calibration, scenarios, sensitivity
from harness.twin.predictions import FIGURES, NO_RANGE, SHORT, Runs, predictions


@click.group()
def main() -> None:
    """The twin."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), help="Write the cells as JSON, too.")
def predict(out: Path | None) -> None:
    """Predict every claim and print it. Takes about a minute of one core."""
    ranges = sensitivity.stored()
    if ranges is None:
        click.echo(f"ranges: {NO_RANGE}", err=True)
    cells = predictions(ranges=ranges)
    for claim, cell in cells.items():
        click.echo(f"{claim:15} {cell.text}")
    if out is not None:
        document = {claim: cell.to_json() for claim, cell in cells.items()}
        out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


@main.command("sensitivity")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes.")
def sensitivity_(jobs: int) -> None:
    """Move every input by a fifth and keep how far each figure moves. Takes about 10 minutes of one core."""
    inputs = scenarios.half(calibration.load())
    with ProcessPoolExecutor(jobs) as pool:
        ranges = sensitivity.compute(
            FIGURES, _figures, inputs, each=pool.map, report=lambda text: click.echo(text, err=True)
        )
    sensitivity.save(ranges)
    click.echo(f"written to {sensitivity.STORED}")


def _figures(job: sensitivity.Job) -> dict[str, float]:
    runs = Runs(job.inputs, SHORT)
    return {name: FIGURES[name](runs) for name in job.figures}


if __name__ == "__main__":
    main()
