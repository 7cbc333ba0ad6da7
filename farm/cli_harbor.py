"""The commands that speak Harbor's formats: ``farm export-harbor`` and ``farm export-atif``."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli import one_line_errors


@click.command("export-harbor")
@click.argument("source", metavar="TASKS")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A folder per task is made below it.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N tasks.")
@one_line_errors
def export_harbor(source: str, out: Path, limit: int | None) -> None:
    """Write TASKS as Harbor task folders (task.toml 1.4): tests hidden, the gold patch as the solution.

    The farm reads them back as --tasks harbor:FOLDER."""
    from farm.config import load_config
    from farm.harbor.write import write_tasks
    from farm.tasks import load_tasks

    limits = load_config(overrides={"rollout": {"tasks": source}}).limits.limits
    count = write_tasks(load_tasks(source, limit=limit), out, limits=limits)
    click.echo(f"{count} tasks in {out}: use them as --tasks harbor:{out}, or `harbor run --path {out}`")


@click.command("export-atif")
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A folder per episode is made below it.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N episodes.")
@one_line_errors
def export_atif(run_path: Path, out: Path, limit: int | None) -> None:
    """Write the landed episodes of RUN as ATIF 1.8 trajectories, with the exact tokens and log-probs of every turn."""
    from farm.harbor.atif import export_run

    done = export_run(run_path, out, limit=limit)
    click.echo(
        f"{done.written} episodes in {out}: {done.graded} graded, {done.failed} infrastructure failures, "
        f"{done.dropped} dropped"
    )
