"""The command ``farm``. Nothing heavy is imported before the command line is parsed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from farm.config import FarmConfig
    from farm.engine_orders import Orders
    from farm.run_folder import RunFolder
    from farm.service import Farm

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN_LINE_S = 10.0
_TOP_S = 1.0
_SECOND_SIGNAL_S = 0.5  # two signals at once would be one
_DOWN_WAIT_S = 600.0
_SPECS = "micro:SPLIT, pypi, made:FOLDER, swebench:ROWS, subset:FILE, harbor:FOLDER"
_LOOK_S = 0.2


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Bad input: one line on stderr, exit code 2. The farm's own failure: one line, exit code 1."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from farm.errors import FarmError, UsageError

        try:
            return command(*args, **kwargs)
        except UsageError as error:
            click.echo(f"farm: {' '.join(str(error).split())}", err=True)
            sys.exit(2)
        except FarmError as error:
            click.echo(f"farm: {error.boundary.value}/{error.kind}: {' '.join(str(error).split())}", err=True)
            sys.exit(1)

    return run


# Commands that are found by name, only when asked for. ``plan`` lives above the farm (harness -> trainer -> farm).
_ELSEWHERE = {
    "export-atif": "farm.cli_harbor:export_atif",
    "export-harbor": "farm.cli_harbor:export_harbor",
    "grade": "farm.cli_tasks:grade",
    "make-tasks": "farm.cli_tasks:make_tasks",
    "manifests": "farm.cli_cluster:manifests",
    "overlap": "farm.cli_tasks:overlap",
    "plan": "harness.twin.command:plan",
    "predictions": "farm.cli_tasks:predictions",
    "subset": "farm.cli_tasks:subset",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, name = _ELSEWHERE[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="rollout-farm")
def main() -> None:
    """Tasks in, trajectories out: an elastic farm of agent episodes in sandboxes."""


_CLUSTER = click.option(
    "--cluster", metavar="KIND|ADDRESS",
    help="local, ssh, slurm, kubernetes, or the address of a scheduler (tls://HOST:PORT). Default: local.",
)  # fmt: skip


def _engine_options(command: Callable[P, R]) -> Callable[P, R]:
    """``--engines`` and ``--launch-engines``, for whatever starts a farm."""
    command = click.option(
        "--launch-engines", type=click.IntRange(min=1), metavar="N",
        help="Start N SGLang servers here, one GPU each (engine.command, engine.gpus_per_engine).",
    )(command)  # fmt: skip
    return click.option(
        "--engines", multiple=True, metavar="URL",
        help="Use the SGLang server at URL; repeatable. Default: one embedded CPU engine.",
    )(command)  # fmt: skip


@main.command()
@_CLUSTER
@click.option("--workers", metavar="N|MIN:MAX", help="Workers to keep, or the range to scale in. Default: 2.")
@click.option("--run", "run_path", type=click.Path(path_type=Path), default=Path("run"), show_default=True,
              help="Run folder; one that exists goes on.")  # fmt: skip
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--tasks", metavar="SPEC", help=f"{_SPECS}. Default: micro:rl.")
@click.option("--policy", type=click.Path(path_type=Path), help="Published as step 0. Default: the shipped one.")
@_engine_options
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one value; repeatable.")
@one_line_errors
def up(
    cluster: str | None,
    workers: str | None,
    run_path: Path,
    config_path: Path | None,
    tasks: str | None,
    policy: Path | None,
    engines: tuple[str, ...],
    launch_engines: int | None,
    sets: tuple[str, ...],
) -> None:
    """Keep a farm up: engines, workers and sandboxes that turn tasks into trajectories until Ctrl-C (which drains).

    Start a trainer on the same run folder to learn from them."""
    overrides: dict[str, dict[str, Any]] = {
        "cluster": _cluster(cluster, workers),
        "engine": _engines(engines, launch_engines),
        "policy": {"base": _absolute(policy)},
        "rollout": {"tasks": tasks},
    }
    config = _config(run_path, config_path, sets, overrides, resume=True)
    _run(run_path, config, show_results=config.rollout.purpose == "eval")


@main.command()
@click.option("--tasks", metavar="SPEC", required=True, help=f"{_SPECS}.")
@click.option("--attempts", type=click.IntRange(1, 1024), default=1, show_default=True, help="Attempts per task.")
@click.option("--policy", type=click.Path(path_type=Path), help="Hugging Face model folder. Default: the shipped one.")
@click.option("--agent", help="bash, external, oracle or null. Default: bash.")
@_CLUSTER
@click.option("--workers", metavar="N|MIN:MAX", help="Default: 2.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N tasks.")
@click.option("--run", "run_path", type=click.Path(path_type=Path), help="Run folder. Default: a new one under runs/.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="TOML file.")
@_engine_options
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one value; repeatable.")
@one_line_errors
def rollout(
    tasks: str,
    attempts: int,
    policy: Path | None,
    agent: str | None,
    cluster: str | None,
    workers: str | None,
    limit: int | None,
    run_path: Path | None,
    config_path: Path | None,
    engines: tuple[str, ...],
    launch_engines: int | None,
    sets: tuple[str, ...],
) -> None:
    """Run every task a fixed number of times and print what came out."""
    overrides: dict[str, dict[str, Any]] = {
        "cluster": _cluster(cluster, workers),
        "engine": _engines(engines, launch_engines),
        "agent": {"name": agent},
        "policy": {"base": _absolute(policy)},
        "rollout": {
            "tasks": tasks,
            "limit": limit,
            "purpose": "eval",
            "group_size": attempts,
        },
    }
    path = run_path or _new_run()
    _run(path, _config(path, config_path, sets, overrides, resume=False), show_results=True)


@main.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@one_line_errors
def status(run_path: Path) -> None:
    """Say what the farm on RUN is doing."""
    from rich.console import Console

    from farm.view import table

    _, record = _status(run_path)
    Console().print(table(record))


@main.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@one_line_errors
def top(run_path: Path) -> None:
    """Watch the farm on RUN until it ends or Ctrl-C."""
    import time

    from rich.live import Live

    from farm.farm_state import farm_process
    from farm.view import line, table

    _, record = _status(run_path)
    if not sys.stdout.isatty():
        click.echo(line(record))
        return
    try:
        with Live(table(record), refresh_per_second=2) as live:
            while farm_process(record) is not None:
                time.sleep(_TOP_S)
                _, record = _status(run_path)
                live.update(table(record))
    except KeyboardInterrupt:
        return


@main.group()
def engines() -> None:
    """Look at the engines of a running farm, take one out of service, replace one, add one.

    NAME is an engine's name or URL, as `farm engines list` shows it."""


_RUN = click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
_NAME = click.argument("name")
_WAIT = click.option(
    "--wait", "wait_s", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS",
    help="Wait until it is done, at most so long; exit code 1 when it is not.",
)  # fmt: skip


@engines.command("list")
@_RUN
@one_line_errors
def engines_list(run_path: Path) -> None:
    """Say how each engine is."""
    from rich.console import Console

    from farm.view import engine_table

    _, record = _status(run_path)
    Console().print(engine_table(record))


@engines.command("drain")
@_RUN
@_NAME
@_WAIT
@one_line_errors
def engines_drain(run_path: Path, name: str, wait_s: float) -> None:
    """Give an engine no new episodes. Those that run on it end there."""
    run, name = _engine(run_path, name)
    _order(run, lambda orders: orders.drain(name))
    _await(run, name, lambda engine: engine is None or (engine["draining"] and not engine["reserved_tokens"]), wait_s)


@engines.command("restore")
@_RUN
@_NAME
@one_line_errors
def engines_restore(run_path: Path, name: str) -> None:
    """Use a drained engine again."""
    run, name = _engine(run_path, name)
    _order(run, lambda orders: orders.restore(name))


@engines.command("remove")
@_RUN
@_NAME
@_WAIT
@one_line_errors
def engines_remove(run_path: Path, name: str, wait_s: float) -> None:
    """Drain an engine, then let it go. One that the farm started is ended."""
    run, name = _engine(run_path, name)
    _order(run, lambda orders: orders.remove(name))
    _await(run, name, lambda engine: engine is None, wait_s)


@engines.command("replace")
@_RUN
@_NAME
@_WAIT
@one_line_errors
def engines_replace(run_path: Path, name: str, wait_s: float) -> None:
    """Drain an engine that the farm started, end it, and start another one in its place."""
    from farm.errors import UsageError

    run, name = _engine(run_path, name)
    before = _engine_record(run, name)
    if before is None or before["process"] is None:
        raise UsageError(
            f"engine {name}: was not started by this farm; start its successor yourself, then `farm engines add` it "
            "and `farm engines remove` this one"
        )
    _order(run, lambda orders: orders.renew(name))
    pid = before["process"]["pid"]
    _await(
        run,
        name,
        lambda engine: engine is not None and engine["state"] == "up" and (engine["process"] or {}).get("pid") != pid,
        wait_s,
    )


@engines.command("add")
@_RUN
@click.argument("url")
@click.option("--pool", default="default", show_default=True, help="The pool that it is shown in.")
@_WAIT
@one_line_errors
def engines_add(run_path: Path, url: str, pool: str, wait_s: float) -> None:
    """Take in the SGLang server at URL. It is loaded with the newest policy and verified before it gets an episode."""
    from farm.config import parse_config
    from farm.policy_log import PolicyLog
    from farm.preflight import SHIPPED_POLICY, check_engine

    run, _ = _status(run_path)
    url = url.rstrip("/")
    config = parse_config(run.config(), where=str(run.path))
    settings = config.engine.named_pools.get(pool, config.engine)
    newest = PolicyLog(run.policies).latest()
    policy = Path(newest.path if newest else config.policy.base or SHIPPED_POLICY)
    check_engine(url, where="farm engines add", config=config, pool=settings, policy=policy)
    _order(run, lambda orders: orders.add(url, pool))
    _await(run, url, lambda engine: engine is not None and engine["state"] == "up", wait_s)


@main.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--now", is_flag=True, help="Give up what runs instead of draining it.")
@one_line_errors
def down(run_path: Path, now: bool) -> None:
    """End the farm on RUN: drain it, and wait until it is gone."""
    import signal
    import time

    from farm.farm_state import farm_process

    run, record = _status(run_path)
    process = farm_process(record)
    if process is None:
        click.echo(f"no farm is running on {run.path}")
        return
    process.send(signal.SIGTERM)
    if now:
        time.sleep(_SECOND_SIGNAL_S)
        process.send(signal.SIGTERM)
    give_up_at = time.monotonic() + _DOWN_WAIT_S
    while process.alive:
        if time.monotonic() > give_up_at:
            click.echo(f"farm: process {process.pid} is still draining; repeat with --now to end it", err=True)
            sys.exit(1)
        time.sleep(0.1)
    click.echo(f"farm on {run.path} ended")


@main.command()
@one_line_errors
def doctor() -> None:
    """Say what isolation this machine gives, and what is missing."""
    from rich.console import Console
    from rich.table import Table

    from farm.sandbox.doctor import checks

    found = checks()
    shown = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("check", "status", "detail", "advice"):
        shown.add_column(name)
    colours = {"ok": "green", "degraded": "yellow", "missing": "red"}
    for check in found:
        style = colours.get(check.status, "")
        shown.add_row(check.name, f"[{style}]{check.status}[/]" if style else check.status, check.detail, check.advice)
    Console().print(shown)
    sys.exit(1 if any(check.status == "missing" for check in found) else 0)


@main.command()
@click.option("--tasks", metavar="SPEC", required=True, help=f"{_SPECS}.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N tasks.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one value; repeatable.")
@one_line_errors
def images(tasks: str, limit: int | None, config_path: Path | None, sets: tuple[str, ...]) -> None:
    """Have the images of the tasks ready: pull them to the Docker daemon, build their E2B templates.

    Paced by the registry's rate. A run does without, but then its first episodes wait for it."""
    import asyncio

    from farm.config import load_config
    from farm.images import prepare_images

    config = load_config(config_path, sets=sets, overrides={"rollout": {"tasks": tasks, "limit": limit}})
    asyncio.run(prepare_images(config, say=click.echo))


@main.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("episode")
@one_line_errors
def replay(run_path: Path, episode: str) -> None:
    """Show one landed EPISODE of RUN turn by turn (the first characters of its id are enough)."""
    from rich.console import Console

    from farm.replay import render

    Console().print(render(run_path, episode))


def _config(
    run_path: Path,
    config_path: Path | None,
    sets: tuple[str, ...],
    overrides: dict[str, dict[str, Any]],
    *,
    resume: bool,
) -> FarmConfig:
    """From the file and the options; a folder that has a run already brings its own configuration."""
    from farm.config import load_config, parse_config, with_overrides

    if resume and config_path is None and (run_path / "config.json").exists():
        from farm.run_folder import RunFolder

        saved = RunFolder.open(run_path).config()
        return parse_config(with_overrides(saved, sets, overrides), where=str(run_path / "config.json"))
    return load_config(config_path, sets=sets, overrides=overrides)


def _run(run_path: Path, config: FarmConfig, *, show_results: bool) -> None:
    import asyncio

    from farm.preflight import prepare

    prepared = prepare(config)
    from farm.start import open_run, run_farm  # imports Dask

    run = open_run(run_path, config)
    click.echo(f"run folder: {run.path}")
    watch = _watch_live if sys.stdout.isatty() else _watch_plain
    try:
        with _logging_to(run):
            farm = asyncio.run(run_farm(run, config, prepared, progress=click.echo, watch=watch))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("farm: ended while starting; nothing is left running", err=True)
        sys.exit(130)
    if show_results:
        _print_results(run)
    if farm.tripped is not None:
        click.echo(f"farm: {farm.tripped}", err=True)
        sys.exit(1)
    if not farm.finished:
        click.echo(f"ended before everything was done; the same command with --run {run.path} goes on")


@contextmanager
def _logging_to(run: RunFolder) -> Iterator[None]:
    import logging

    handler = logging.FileHandler(run.logs / "farm.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("farm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        handler.close()


async def _watch_live(farm: Farm) -> None:
    import asyncio

    from rich.live import Live

    from farm.view import table

    with Live(table(farm.status()), refresh_per_second=2) as live:
        while True:
            await asyncio.sleep(0.5)
            live.update(table(farm.status()))


async def _watch_plain(farm: Farm) -> None:
    import asyncio

    from farm.view import line

    while True:
        await asyncio.sleep(_PLAIN_LINE_S)
        click.echo(line(farm.status()))


def _print_results(run: RunFolder) -> None:
    from rich.console import Console

    from farm.results import summarize
    from farm.trajectory_log import DirectoryLog
    from farm.types import Cursor
    from farm.view import result_table

    log = DirectoryLog(run.trajectories, create=False)
    Console().print(result_table(summarize(row for _, row in log.read(Cursor()))))


def _status(run_path: Path) -> tuple[RunFolder, dict[str, Any]]:
    from farm.errors import UsageError
    from farm.farm_state import farm_process, read_status
    from farm.run_folder import RunFolder

    run = RunFolder.open(run_path)
    record = read_status(run)
    if record is None:
        raise UsageError(f"{run.path}: no farm has run here yet; start one with: farm up --run {run_path}")
    if record["state"] in {"starting", "running", "draining", "stopping"} and farm_process(record) is None:
        record["state"] = "dead"
    return run, record


def _cluster(text: str | None, workers: str | None) -> dict[str, Any]:
    """What the options say of the cluster."""
    from farm.config import cluster_overrides

    return {**cluster_overrides(text), "workers": workers}


def _engines(urls: tuple[str, ...], launch: int | None) -> dict[str, Any]:
    """What the options say of the engines."""
    from farm.errors import UsageError

    if urls and launch is not None:
        raise UsageError("--engines and --launch-engines: give one of them; for both kinds, name pools in --config")
    if urls:
        return {"kind": "sglang", "urls": [url.rstrip("/") for url in urls], "count": 1}
    return {} if launch is None else {"kind": "launch", "count": launch, "urls": []}


def _engine(run_path: Path, name: str) -> tuple[RunFolder, str]:
    """The run and the engine's name. Raises ``UsageError`` when there is no such engine."""
    from farm.errors import UsageError

    run, record = _status(run_path)
    for engine in record["engines"]:
        if name.rstrip("/") in (engine["name"], engine["url"]):
            return run, str(engine["name"])
    there = ", ".join(engine["name"] for engine in record["engines"]) or "none"
    raise UsageError(f"engine {name!r}: not one of this farm's; there are: {there}")


def _engine_record(run: RunFolder, name: str) -> dict[str, Any] | None:
    _, record = _status(run.path)
    return next((dict(engine) for engine in record["engines"] if engine["name"] == name), None)


def _order(run: RunFolder, change: Callable[[Orders], Orders]) -> None:
    from farm.engine_orders import change_orders
    from farm.farm_state import farm_process, read_status

    change_orders(run, change)
    record = read_status(run)
    if record is None or farm_process(record) is None:
        click.echo("ordered; no farm is running here, the next one will do it")


def _await(run: RunFolder, name: str, done: Callable[[dict[str, Any] | None], bool], wait_s: float) -> None:
    import time

    if not wait_s:
        return
    give_up_at = time.monotonic() + wait_s
    while not done(_engine_record(run, name)):
        if time.monotonic() > give_up_at:
            click.echo(f"farm: engine {name}: not done within {wait_s:g} s; the order stands", err=True)
            sys.exit(1)
        time.sleep(_LOOK_S)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _new_run() -> Path:
    import time

    return Path("runs") / time.strftime("rollout-%Y%m%d-%H%M%S")


if __name__ == "__main__":
    main()
