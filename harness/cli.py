"""`harness`: regenerate the reported figures, list them, measure the speed of the parts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from farm.errors import FarmError, UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Regenerates every reported figure into a versioned report."""


_PATH = click.Path(path_type=Path)


@cli.command("list")
def list_() -> None:
    """The claims, what was reported, and what the newest report says of them."""
    from harness import views

    sys.exit(views.list_claims())


@cli.command()
@click.argument("claim")
def show(claim: str) -> None:
    """Everything about one claim: source, metric, rule, what regenerates it, the newest result."""
    from harness import views

    sys.exit(views.show_claim(claim))


@cli.command()
@click.argument("claim_ids", metavar="[CLAIM]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every claim.")
@click.option("--profile", "profile_name", default="full", show_default=True, help="quick, full or cluster.")
@click.option("--out", type=_PATH, help="Report folder [default: reports/VERSION, full profile].")
def reproduce(claim_ids: tuple[str, ...], everything: bool, profile_name: str, out: Path | None) -> None:
    """Run what the claims need and write the report. What is done already and has not changed is not run again."""
    from harness import reproduce as work

    if everything == bool(claim_ids):
        raise UsageError("name the claims to reproduce, or give --all; `harness list` shows them")
    sys.exit(work.reproduce(claim_ids, profile_name=profile_name, out=out))


@cli.command()
@click.argument("folder", type=_PATH, required=False)
def check(folder: Path | None) -> None:
    """Judge a report (default: the newest) by the rules; runs nothing. Exit code 1: a row that held no longer does."""
    from harness import views

    sys.exit(views.check(folder))


@cli.command()
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
def diff(a: Path, b: Path) -> None:
    """Compare two reports row by row. Exit code 1: something moved beyond noise, or a verdict changed."""
    from harness import views

    sys.exit(views.diff(a, b))


@cli.command()
@click.argument("folder", type=_PATH, required=False)
@click.option("--rebuild", is_flag=True, help="Make it anew from its kept logs.")
@click.option("--verify", is_flag=True, help="Exit code 1 when it is not what its kept logs give.")
@click.option("--stages", type=_PATH, help="With --rebuild: keep the logs of these first (build/reproduce/full).")
def report(folder: Path | None, rebuild: bool, verify: bool, stages: Path | None) -> None:
    """Show a report (default: the newest), make it anew from the logs kept beside it, or hold it against them."""
    from harness import views

    if rebuild and verify:
        raise UsageError("--rebuild and --verify exclude each other: the first replaces what the second compares")
    if stages is not None and not rebuild:
        raise UsageError("--stages belongs to --rebuild: it replaces the logs that the report is made from")
    sys.exit(views.show_report(folder, rebuild=rebuild, verify=verify, stages=stages))


@cli.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/bench.json"), show_default=True)
def bench(out: Path) -> None:
    """Measure the speed of the parts: prints a table and writes it as JSON."""
    from harness.bench import bench as run

    run(out)


@cli.command()
@click.option(
    "--baseline", "path", type=click.Path(path_type=Path), default=Path("ci/baseline.json"), show_default=True
)
@click.option("--base", metavar="COMMIT", help="Code to time against. Default: the baseline's commit.")
@click.option(
    "--policy", type=click.Path(path_type=Path), help="Policy to judge. Default: the one at the baseline's path."
)
@click.option("--budget-minutes", type=click.FloatRange(min=0), default=75.0, show_default=True,
              help="No further look is begun that would end after it.")  # fmt: skip
@click.option("--update-baseline", is_flag=True, help="Measure this commit and put the run into the baseline instead.")
@click.option("--limit", type=click.IntRange(min=2), help="With --update-baseline: only the first N tasks.")
def gate(
    path: Path, base: str | None, policy: Path | None, budget_minutes: float, update_baseline: bool, limit: int | None
) -> None:
    """Compare pass@1 and speed with the baseline. Exit code 0: pass, 1: regression, 3: inconclusive, 2: bad input."""
    if limit is not None and not update_baseline:
        raise UsageError("--limit belongs to --update-baseline; the gate measures the tasks that the baseline has")
    if base is not None and update_baseline:
        raise UsageError("--base has no meaning with --update-baseline, which measures this commit alone")
    from harness.gate import run

    if update_baseline:
        sys.exit(run.update(path, policy=policy, limit=limit))
    sys.exit(run.gate(path, base=base, policy=policy, budget_minutes=budget_minutes))


@cli.command()
@click.argument("dataset")
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Gradings of each patch.")
@click.option("--concurrency", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--provider", help="Sandbox to grade in. Default: the one of the suite's rollouts.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="As for farm rollout, such as docker.host=…")
def qualify(dataset: str, runs: int, concurrency: int, provider: str | None, sets: tuple[str, ...]) -> None:
    """Qualify the tasks of DATASET, such as micro:rl: the gold patch must pass every run, the empty one fail every run.

    Graded as in a rollout of the same tasks: the suite's grader, sandbox and limits. What does not qualify is
    quarantined with its reason: no rollout is given it. Exit code 1 when there is any."""
    from farm.suites.qualify import qualify_source

    found = qualify_source(dataset, runs=runs, provider=provider, sets=sets, concurrency=concurrency, say=click.echo)
    click.echo(
        f"gold {runs}/{runs} and empty 0/{runs}: {found.qualified} of {found.tasks} tasks; results: {found.path}"
    )
    for one in found.quarantined:
        click.echo(f"quarantined {one.instance_id}: gold {one.gold_passed}/{one.runs}: {one.reason}")
    sys.exit(1 if found.quarantined else 0)


@cli.command()
@click.argument("run_path", metavar="RUN", type=_PATH)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N graded episodes.")
@click.option("--concurrency", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--out", type=_PATH, help="Write every episode, then and now, as JSON.")
def regrade(run_path: Path, limit: int | None, concurrency: int, out: Path | None) -> None:
    """Grade the patches that RUN's trajectories hold anew, without generating, and compare test by test.

    Exit code 0: all came out as they did then; 1: one did not."""
    from dataclasses import asdict

    from farm.durable import write_json
    from farm.run_folder import RunFolder
    from harness.regrade import regrade as grade_anew

    found = grade_anew(RunFolder.open(run_path), limit=limit, concurrency=concurrency, say=click.echo)
    if out is not None:
        write_json(out, asdict(found))
    differing = [one for one in found.episodes if not one.same]
    for one in differing:
        now = one.why or f"resolved {one.before} -> {one.after}; tests that differ: {', '.join(one.tests) or 'none'}"
        click.echo(f"{one.episode_id[:12]} {one.instance_id}: {now}")
    click.echo(
        f"{len(found.episodes) - len(differing)} of {len(found.episodes)} episodes graded alike ({found.gradings} "
        f"gradings); without tests {found.without_tests}, of tasks that changed since {found.other_tasks}"
    )
    sys.exit(1 if differing else 0)


def main() -> None:
    """Entry point: a usage error is one line and exit code 2, and so is what could not be done, as on a full disk."""
    try:
        cli(standalone_mode=False)
    except FarmError as error:
        click.echo(f"harness: {error}", err=True)
        sys.exit(2)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("harness: interrupted; run it again to go on", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
