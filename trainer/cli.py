"""The ``trainer`` command. Heavy imports happen inside the commands, after the arguments are parsed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from farm.errors import FarmError, UsageError

if TYPE_CHECKING:
    from farm.run_folder import RunFolder
    from trainer.config import ParallelConfig, TrainerConfig
    from trainer.megatron.ranks import Line

SHIPPED_POLICY = Path(__file__).parents[1] / "datasets" / "micro" / "base-policy"

_FOLDER = click.Path(path_type=Path)


@click.group()
def cli() -> None:
    """Train a policy on the trajectory log of a run, or on demonstrations."""


@cli.command()
@click.option("--run", "run_path", type=_FOLDER, required=True, help="The run folder that the farm works on.")
@click.option("--config", "config_path", type=_FOLDER, help="TOML file with the settings, or a shipped profile's name.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="One setting, for example --set lr=2e-4.")
@click.option("--ranks", type=click.IntRange(min=1), help="Processes on this machine; same as --set parallel.ranks=N.")
@click.option("--policy", type=_FOLDER, help="Model folder to publish as step 0 when the run has no policy yet.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop once this policy step is published.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(min=0), default=60.0, show_default=True,
    help="Seconds to wait for a farm that is being started on the run.",
)  # fmt: skip
def train(
    run_path: Path,
    config_path: Path | None,
    sets: tuple[str, ...],
    ranks: int | None,
    policy: Path | None,
    steps: int | None,
    wait_s: float,
) -> None:
    """Follow a run's trajectories and publish a policy after every step. Resumes where it stopped.

    With more than one rank it starts itself on each; under torchrun it takes the place that it is given."""
    from trainer.start import await_run

    config = _ranked_config(config_path, sets, ranks)
    stop = _stop_on_signals()

    def wait() -> RunFolder:
        return await_run(run_path, wait_s=wait_s, stop=stop, say=_warn)

    line = _take_place(config.parallel, stop, before=wait)
    run = wait()
    from trainer.loop import Trainer

    trainer = Trainer(run, config, policy=policy, wait_s=wait_s, stop=stop, line=line)
    try:
        reached = trainer.run(steps=steps, report=_say_step)
    finally:
        trainer.close()
    click.echo(f"stopped at step {reached}; start again on {run_path} to go on")


@cli.command()
@click.option("--config", "config_path", type=_FOLDER, help="TOML file with the settings, or a shipped profile's name.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="One setting, as for trainer train.")
@click.option("--model", default="qwen3-30b-a3b", show_default=True, help="Model folder, or a published model's name.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs in all; same as --set parallel.ranks=N.")
@click.option("--gpu", default="h200", show_default=True, metavar="NAME|SIZE", help="For example mi355x, or 96GiB.")
def check(config_path: Path | None, sets: tuple[str, ...], model: str, gpus: int | None, gpu: str) -> None:
    """Say before a start whether a configuration fits on GPUs, and which part of memory takes how much.

    Exit code 0: it fits; 1: it does not; 2: the model can't lie so on the GPUs at all."""
    from trainer.check import check as check_fit
    from trainer.check import memory_bytes, model_config, remedies, table
    from trainer.config import load_config

    if gpus is not None:
        sets = (*sets, f"parallel.ranks={gpus}")
    config = load_config(config_path, sets=sets)
    memory = memory_bytes(gpu)
    hf = model_config(model)
    fit = check_fit(config, hf, memory=memory)
    click.echo("\n".join(table(fit, config)))
    if not fit.fits:
        click.echo(f"does not fit; what would help: {'; '.join(remedies(config, hf, memory=memory))}")
        sys.exit(1)
    click.echo("fits")


@cli.command()
@click.option("--log", "log_path", type=_FOLDER, required=True, help="Trajectory log folder with the demonstrations.")
@click.option("--policy", type=_FOLDER, required=True, help="Hugging Face model folder to start from.")
@click.option("--out", type=_FOLDER, required=True, help="New folder for the trained model.")
@click.option("--loss", type=click.Choice(["outputs", "all"]), default="outputs", help="Ids that the loss is on.")
@click.option("--init", type=click.Choice(["policy", "random"]), default="policy", help="random: only its config.json.")
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Number of steps; wins over --epochs.")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=1e-3, show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences a step.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--config", "config_path", type=_FOLDER, help="File or profile; its parallel table and micro_batch_tokens."
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="One setting of those, as for trainer train.")
@click.option("--ranks", type=click.IntRange(min=1), help="Processes on this machine; same as --set parallel.ranks=N.")
def sft(
    log_path: Path,
    policy: Path,
    out: Path,
    loss: Literal["outputs", "all"],
    init: Literal["policy", "random"],
    epochs: int,
    steps: int | None,
    lr: float,
    batch: int,
    seed: int,
    config_path: Path | None,
    sets: tuple[str, ...],
    ranks: int | None,
) -> None:
    """Train on demonstrations: next-token loss on the sampled ids, or on all."""
    from farm.trajectory_log import DirectoryLog
    from farm.types import Cursor
    from trainer.sft import SftStep, train_sft

    def say(step: SftStep) -> None:
        if step.step == 1 or step.step == step.steps or step.step % 10 == 0:
            click.echo(
                f"step {step.step}/{step.steps}  loss {step.loss:.4f}  grad {step.grad_norm:.2f}  lr {step.lr:.1e}  "
                f"{step.tokens / step.seconds:,.0f} tokens/s"
            )

    config = _ranked_config(config_path, sets, ranks)
    log = DirectoryLog(log_path, create=False)
    line = _take_place(config.parallel, threading.Event())
    rows = (trajectory for _, trajectory in log.read(Cursor()))
    train_sft(
        rows, policy=policy, out=out, loss=loss, init=init, epochs=epochs, steps=steps, lr=lr, batch=batch, seed=seed,
        micro_batch_tokens=config.micro_batch_tokens, parallel=config.parallel, line=line, on_step=say,
    )  # fmt: skip
    click.echo(f"wrote {out}")


@cli.command()
@click.option("--out", type=_FOLDER, required=True, help="New trajectory log folder.")
@click.option("--policy", type=_FOLDER, default=SHIPPED_POLICY, help="Model folder whose tokenizer is used.")
@click.option("--count", type=click.IntRange(min=1), default=600, show_default=True, help="Problems worked on.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def demonstrations(out: Path, policy: Path, count: int, seed: int) -> None:
    """Make demonstrations on the micro suite's sft split, for ``trainer sft --log``."""
    from farm.render.micro import MicroRenderer
    from trainer.demonstrations import DEMONSTRATION, transcripts, write_log

    if out.exists():
        raise UsageError(f"{out} exists; name a new folder")
    rows = transcripts(MicroRenderer(policy), "sft", count=count, habit=DEMONSTRATION, seed=seed)
    click.echo(f"wrote {write_log(rows, out)} demonstrations to {out}")


@cli.command("base-policy")
@click.option("--out", type=_FOLDER, default=Path("build/base-policy"), show_default=True, help="New model folder.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def base_policy(out: Path, seed: int) -> None:
    """Make the micro policy's base weights anew (about 11 minutes). The shipped ones stay as they are."""
    from trainer.base_policy import make_base_policy

    click.echo(json.dumps(make_base_policy(out, seed=seed, say=click.echo), indent=2))


@cli.command()
@click.option("--run", "run_path", type=_FOLDER, required=True, help="The run folder.")
@click.option("--step", type=click.IntRange(min=0), help="Policy step; default: the newest.")
@click.option("--out", type=_FOLDER, required=True, help="New folder for the model.")
def export(run_path: Path, step: int | None, out: Path) -> None:
    """Copy a published policy out of a run, as a Hugging Face safetensors folder."""
    from farm.policy_log import PolicyLog
    from farm.run_folder import RunFolder
    from trainer.publish import export as export_policy

    version = export_policy(PolicyLog(RunFolder.open(run_path).policies, create=False), out, step=step)
    click.echo(f"wrote {version.name} ({version.digest[:12]}) to {out}")


@cli.command()
@click.argument("run_path", metavar="RUN", type=_FOLDER)
@click.option("--steps", type=click.IntRange(min=1), help="Only the first N steps. Default: all that the run took.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the digests of every step as JSON.")
def replay(run_path: Path, steps: int | None, out: Path | None) -> None:
    """Train again from RUN's log and compare every step's batch and weights, bit by bit, with what RUN has.

    Exit code 0: all are the same; 1: one differs. RUN is not changed."""
    from dataclasses import asdict

    from farm.durable import write_json
    from farm.run_folder import RunFolder
    from trainer.replay import ReplayedStep, recorded_config
    from trainer.replay import replay as replay_run

    def say(step: ReplayedStep) -> None:
        if not step.same or step.step % 10 == 0:
            words = {True: "same", False: "DIFFERENT", None: "not recorded"}
            click.echo(f"step {step.step}  batch {words[step.same_batch]}  weights {words[step.same_weights]}")

    run = RunFolder.open(run_path)
    line = _take_place(recorded_config(run).parallel, _stop_on_signals())
    found = replay_run(run, steps=steps, report=say, line=line)
    if out is not None:
        write_json(out, {"steps": [asdict(step) for step in found]})
    same = sum(step.same for step in found)
    click.echo(f"{same} of {len(found)} steps came out the same")
    if same < len(found):
        sys.exit(1)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(as_json: bool) -> None:
    """Measure training throughput at the micro policy's size."""
    from trainer.bench import measure

    figures = measure()
    if as_json:
        click.echo(json.dumps(figures))
        return
    for name, figure in figures.items():
        click.echo(f"{name}  {figure['median']:,.0f} {figure['unit']}  (p95 {figure['p95']:,.0f}, n {figure['n']})")


def _say_step(line: Mapping[str, Any]) -> None:
    def number(key: str, form: str) -> str:
        return "-" if line[key] is None else format(line[key], form)

    click.echo(
        f"step {line['step']}  pass {number('pass_rate', '.3f')}  reward {number('reward_mean', '.3f')}  "
        f"episodes {line['trained_episodes']}/{line['episodes']}  tokens {line['tokens']}  "
        f"lag {number('staleness_mean', '.2f')}  clip {number('clip_fraction', '.3f')}  "
        f"grad {number('grad_norm', '.2f')}  wait {line['wait_s']:.1f} s  train {line['train_s']:.1f} s"
    )


def _warn(text: str) -> None:
    click.echo(text, err=True)


def _ranked_config(path: Path | None, sets: tuple[str, ...], ranks: int | None) -> TrainerConfig:
    """The configuration, with as many ranks as a launcher or ``--ranks`` says."""
    from trainer.config import load_config
    from trainer.ranks import seat

    place = seat(os.environ)
    count = place.ranks if place is not None else ranks
    return load_config(path, sets=sets if count is None else (*sets, f"parallel.ranks={count}"))


def _take_place(
    parallel: ParallelConfig, stop: threading.Event, *, before: Callable[[], object] = lambda: None
) -> Line | None:
    """On one rank None, on rank 0 of many the line to the others. Does not return in the process that starts the ranks
    (itself, once for each) nor on the other ranks. ``before``: what rank 0 waits for before it joins them."""
    from trainer.ranks import die_with_parent, run_ranks, seat

    place = seat(os.environ)
    if place is None and parallel.ranks > 1:
        sys.exit(run_ranks(sys.argv[1:], parallel.ranks, stop=stop))
    if place is None or place.ranks == 1:
        return None
    die_with_parent()
    if place.rank == 0:
        before()
    from trainer.megatron.ranks import join, serve

    line = join(place, parallel)
    if place.rank == 0:
        return line
    serve(line)
    sys.exit(0)


def _stop_on_signals() -> threading.Event:
    """Set by SIGTERM and SIGINT: the step at hand is finished, saved and published, then the command ends."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def main() -> None:
    """Entry point: bad input is one line and exit code 2, any other known error one line and exit code 1."""
    try:
        cli(standalone_mode=False)
    except UsageError as error:
        click.echo(f"trainer: {error}", err=True)
        sys.exit(2)
    except FarmError as error:
        click.echo(f"trainer: {error.kind}: {error}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()
