"""The commands about task sets and grades: ``farm grade``, ``predictions``, ``subset``, ``overlap``, ``make-tasks``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from farm.cli import one_line_errors

_WIDE = 200  # columns of a table that goes to a file


@click.command()
@click.option("--dataset", required=True, metavar="ROWS",
              help="OWNER/SET[:SPLIT] of the Hugging Face Hub, a .parquet or .jsonl file, or subset:FILE.")  # fmt: skip
@click.option("--predictions", required=True, type=click.Path(path_type=Path), help=".jsonl or .json.")
@click.option("--logs", required=True, type=click.Path(path_type=Path),
              help="Folder with INSTANCE/test_output.txt, INSTANCE.log or the official tree of one run.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("graded"), show_default=True,
              help="Where the official files are written.")  # fmt: skip
@click.option("--run-id", help="Never used before in --out. Default: made of the time.")
@one_line_errors
def grade(dataset: str, predictions: Path, logs: Path, out: Path, run_id: str | None) -> None:
    """Grade stored test logs with SWE-bench's own grading, offline, and write its reports."""
    from farm.offline_grading import grade_logs, load_rows, read_predictions

    given = read_predictions(predictions)
    done = grade_logs(load_rows(dataset), given, logs=logs, out=out, dataset=dataset, run_id=run_id)
    report = done.report
    total, resolved, failed = report["total_instances"], report["resolved_instances"], done.infra_failures
    click.echo(
        f"{report['submitted_instances']} predictions for {total} instances: {resolved} resolved, "
        f"{report['unresolved_instances']} not, {report['empty_patch_instances']} without a patch, "
        f"{report['error_instances']} errors"
    )
    click.echo(f"resolved: {_share(resolved, total)} of all, as the official report counts", nl=False)
    click.echo(f"; {_share(resolved, total - failed)} without {failed} infrastructure failures" if failed else "")
    if done.without_log:
        click.echo(f"without a log in {logs}: {', '.join(done.without_log)[:300]}")
    for name, reason in done.ungradable.items():
        click.echo(f"not gradable: {name}: {reason[:300]}")
    click.echo(f"run report: {done.report_path}")


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="model_name_or_path of the predictions.")
@click.option("--index", type=click.IntRange(min=0), default=0, show_default=True, help="Which attempt of each task.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("predictions.jsonl"), show_default=True)
@click.option("--report", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Also write the official tree of logs and reports, and SWE-bench's run report.")  # fmt: skip
@click.option("--run-id", help="For --report; never used before in FOLDER. Default: made of the time.")
@one_line_errors
def predictions(run_path: Path, model: str, index: int, out: Path, report: Path | None, run_id: str | None) -> None:
    """Write what the agents of RUN handed in as SWE-bench predictions and, with --report, how it was graded."""
    from farm.errors import UsageError
    from farm.offline_grading import predictions_of, write_predictions
    from farm.run_report import report_run

    if run_id is not None and report is None:
        raise UsageError("--run-id belongs to --report FOLDER; give both")
    found, failed = predictions_of(run_path, model=model, index=index)
    done = None if report is None else report_run(run_path, model=model, out=report, index=index, run_id=run_id)
    write_predictions(out, found)
    left_out = f"; {failed} attempts failed and are left out" if failed else ""
    click.echo(f"{out}: {len(found)} predictions of {model}{left_out}")
    if done is not None:
        total, resolved = done.report["total_instances"], done.report["resolved_instances"]
        click.echo(f"resolved: {_share(resolved, total)} of all, as the official report counts", nl=False)
        click.echo(f"; {_share(resolved, total - failed)} without {failed} infrastructure failures" if failed else "")
        if done.without_log:
            click.echo(f"log not kept, so errors in the report: {', '.join(done.without_log)[:300]}")
        click.echo(f"run report: {done.path}")


@click.command()
@click.argument("source", metavar="TASKS")
@click.option("--size", type=click.IntRange(min=2), default=100, show_default=True, help="Tasks to draw.")
@click.option("--seed", type=int, required=True, help="Another seed, another sample.")
@click.option("--exclude", type=click.Path(path_type=Path),
              help="File with an instance id a line. Default: known unstable gold patches of SWE-bench.")  # fmt: skip
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The subset file; use it as subset:FILE.")
@one_line_errors
def subset(source: str, size: int, seed: int, exclude: Path | None, out: Path) -> None:
    """Draw a stratified sample (repository x difficulty) of TASKS, with weights for the whole."""
    from farm.errors import UsageError
    from farm.suites.subset import UNSTABLE_GOLD, draw, save
    from farm.tasks import load_tasks

    try:
        excluded = UNSTABLE_GOLD if exclude is None else tuple(exclude.read_text().split())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--exclude {exclude}: {getattr(error, 'strerror', None) or 'not text'}") from error
    drawn = draw(load_tasks(source, quarantined=True), source=source, size=size, seed=seed, excluded=excluded)
    save(drawn, out)
    population = sum(stratum.size for stratum in drawn.strata)
    click.echo(
        f"{len(drawn.tasks)} of {population} tasks in {len(drawn.strata)} strata, {len(drawn.excluded)} left out"
    )
    for stratum in drawn.strata:
        click.echo(f"  {stratum.drawn:4} of {stratum.size:4}  {stratum.name}")
    click.echo(f"{out}: use it as --tasks subset:{out}")


@click.command()
@click.argument("train")
@click.argument("bench")
@one_line_errors
def overlap(train: str, bench: str) -> None:
    """Say which repositories of TRAIN are in BENCH as well, by name, alias, fork, commit or content. Exit code 1 if
    any.

    Each is a task source, a .parquet, .jsonl or .json file (FILE#KEY for a list inside it), or a .txt list."""
    from rich.console import Console
    from rich.table import Table

    from farm.suites.overlap_refs import compare, load_refs

    found = compare(load_refs(train), load_refs(bench))
    click.echo(
        f"{found.train_repos} repositories ({found.train_tasks} tasks) against {found.bench_repos}: "
        f"{len({finding.bench for finding in found.findings}) or 'none'} in both"
    )
    if not found.findings:
        return
    shown = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("training", "benchmark", "how", "tasks", "seen"):
        shown.add_column(name, overflow="fold")
    for finding in found.findings:
        shown.add_row(finding.train, finding.bench, finding.reason, str(finding.tasks), finding.detail)
    Console(width=None if sys.stdout.isatty() else _WIDE).print(shown)
    sys.exit(1)


@click.command("make-tasks")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder; one that exists is added to.")
@click.option("--tasks", "count", type=click.IntRange(min=1), default=20, show_default=True, help="Per source.")
@click.option("--runs", type=click.IntRange(1, 20), default=3, show_default=True,
              help="How often each grading, and each test before that, is repeated.")  # fmt: skip
@click.option("--seed", type=int, default=20261129, show_default=True)
@click.option("--bench", metavar="TASKS", help="Refuse a source whose repository is in this benchmark.")
@one_line_errors
def make_tasks(sources: tuple[str, ...], out: Path, count: int, runs: int, seed: int, bench: str | None) -> None:
    """Make qualified training tasks from real code: one injected bug each, graded by the code's own tests.

    SOURCE is a source distribution, NAME==VERSION#sha256=HEX, or a git folder, PATH[@COMMIT]. Use the result as
    --tasks made:FOLDER."""
    from farm.suites.make import make_from

    made = make_from(sources, out=out, count=count, runs=runs, seed=seed, bench=bench, say=click.echo)
    click.echo(f"{made.qualified} of {made.tasks} tasks qualified: use them as --tasks made:{out}")
    if not made.qualified:
        sys.exit(1)


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} % ({count}/{total})" if total else "none"
