"""`farm plan`: the twin at the command line. Named by ``farm/cli.py``, which imports nothing from here by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from farm.cli import one_line_errors

if TYPE_CHECKING:
    from harness.twin.plan import Answer, Question


@click.command()
@click.option("--model", default="qwen3-30b-a3b", show_default=True, help="A model with a data sheet.")
@click.option("--gpu", default="mi355x", show_default=True, help="A GPU with a data sheet.")
@click.option("--engines", type=click.IntRange(1, 4096), default=8, show_default=True, help="Engines of one GPU each.")
@click.option("--sandbox", default="e2b", show_default=True, help="e2b, docker or local.")
@click.option("--concurrency", type=click.IntRange(1, 20_000), default=384, show_default=True, help="Episodes at once.")
@click.option("--cap", "cap_tokens", type=click.IntRange(min=256), help="Context cap of a trajectory. [default: 32768]")
@click.option("--cores", type=click.FloatRange(min=1), help="Cores for sandboxes that are not in the cloud.")
@click.option("--gpu-hour", type=click.FloatRange(min=0), help="Price of one GPU for an hour.")
@click.option("--sandbox-hour", type=click.FloatRange(min=0), help="Price of one sandbox for an hour.")
@click.option("--set", "sets", multiple=True, metavar="INPUT=VALUE", help="Another input of the twin; repeatable.")
@click.option("--inputs", "show_inputs", is_flag=True, help="List the inputs and where they come from, and end.")
@one_line_errors
def plan(
    model: str,
    gpu: str,
    engines: int,
    sandbox: str,
    concurrency: int,
    cap_tokens: int | None,
    cores: float | None,
    gpu_hour: float | None,
    sandbox_hour: float | None,
    sets: tuple[str, ...],
    show_inputs: bool,
) -> None:
    """Predict a set-up: how many sandboxes and engines, which cap, what a step takes and costs. Runs nothing."""
    if show_inputs:
        _print_inputs()
        return
    from harness.twin.plan import Question, answer

    question = Question(
        model=model,
        gpu=gpu,
        engines=engines,
        sandbox=sandbox,
        concurrency=concurrency,
        cap_tokens=cap_tokens,
        cores=cores,
        values=_values(sets),
        gpu_hour=gpu_hour,
        sandbox_hour=sandbox_hour,
    )
    click.echo("simulating two hours, at most a day when steps take longer ...", err=True)
    _print(question, answer(question))


def _values(sets: tuple[str, ...]) -> dict[str, float]:
    from farm.errors import UsageError

    found = {}
    for item in sets:
        name, equals, text = item.partition("=")
        try:
            found[name.strip()] = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError(f"--set {item!r}: must be INPUT=NUMBER, for example command_s=4; --inputs lists them")
    return found


def _print(question: Question, found: Answer) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2), show_header=False)
    rows = [
        ("KV cache of one engine", f"{found.capacity_tokens / 1e6:.2f} M tokens"),
        ("admitted at once", f"{found.admitted} at a cap of {found.cap_tokens} tokens (asked: {question.concurrency})"),
        ("cap that admits all", f"{found.cap_for_all} tokens"),
        ("engines for all at this cap", str(found.engines_needed)),
        ("sandboxes at once", str(found.sandboxes)),
        ("in flight, mean", f"{found.in_flight:.0f}"),
        ("trajectories per hour", f"{found.per_hour:,.0f}"),
        ("one trajectory, mean", _seconds(found.trajectory_s, found)),
        ("sandbox start, median", _seconds(found.start_s, found, ".2g")),
        ("training step, median", _step(found)),
        ("engines busy", f"{found.engine_busy:.0%}"),
        ("KV use, peak", f"{found.peak_use:.0%}; queue {found.peak_queued}"),
        ("bottleneck", found.bottleneck),
    ]
    if found.cost_step is not None:
        rows.append(("cost of a step", f"{found.cost_step:,.2f}"))
    if found.cost_thousand is not None:
        rows.append(("cost of 1,000 trajectories", f"{found.cost_thousand:,.2f}"))
    for name, value in rows:
        shown.add_row(name, value)
    console = Console()
    console.print(shown)
    console.print(
        "A prediction from data sheets and the inputs of `farm plan --inputs`, not a measurement.", style="dim"
    )


def _seconds(value: float | None, found: Answer, digits: str = ".0f") -> str:
    return f"none within {found.simulated_s / 3600:.1f} hours" if value is None else f"{value:{digits}} s"


def _step(found: Answer) -> str:
    own = "" if found.train_s is None else f" (of it the trainer's own {found.train_s:.0f} s)"
    return _seconds(found.step_s, found) + own


def _print_inputs() -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from harness.twin import calibration

    shown = Table(Column("input", no_wrap=True), "value", "unit", "allowed", "kind", "source", box=None)
    for entry in calibration.load().entries.values():
        shown.add_row(
            entry.name, f"{entry.value:g}", entry.unit, "{:g} to {:g}".format(*entry.allowed), entry.kind, entry.source
        )
    Console().print(shown)
