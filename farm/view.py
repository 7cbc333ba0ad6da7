"""What a running farm looks like: a live table on a terminal, a plain line everywhere else.

Everything is drawn from the status record (``farm.json``), so ``farm up``, ``farm top`` and ``farm status`` agree.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farm.results import Results

_STALE_S = 10.0
_STATE_STYLE = {"running": "green", "finished": "green", "starting": "cyan", "draining": "yellow", "failed": "red"}


def line(status: Mapping[str, Any]) -> str:
    """One line of plain text."""
    if "cluster" not in status:
        return str(status["state"])
    cluster, episodes, recent = status["cluster"], status["episodes"], status["recent"]
    parts = [
        f"{status['state']}",
        f"workers {cluster['workers']}/{cluster['target']}",
        f"in flight {episodes['in_flight']}/{cluster['in_flight_limit']}",
        f"landed {_landed(status)}",
        f"{recent['episodes_per_hour']:,.0f}/h",
        f"reward {_number(recent['reward_mean'], 3)}",
    ]
    if status["policy"] is not None:
        live = sorted({str(engine.get("version", "-")) for engine in status["engines"]})
        parts.append(f"policy {status['policy']['step']} (engines: {', '.join(live) or '-'})")
    if problems := _problems(status):
        parts.append(problems)
    if status.get("tripped"):
        parts.append(status["tripped"])
    return " | ".join(parts)


def table(status: Mapping[str, Any], *, now_s: float | None = None) -> RenderableType:
    """The live view."""
    now_s = time.time() if now_s is None else now_s
    state = str(status["state"])
    title = Text.assemble(("rollout farm ", "bold"), (state, _STATE_STYLE.get(state, "")))
    if "cluster" not in status:
        return title
    if state in {"running", "draining"} and now_s - status["updated_at_s"] > _STALE_S:
        title.append(f"  no news for {now_s - status['updated_at_s']:.0f} s", style="red")
    cluster, episodes, recent = status["cluster"], status["episodes"], status["recent"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("tasks", f"{status['tasks']}, agent {status['agent']}, groups of {status['group_size']}")
    grid.add_row(
        "workers",
        f"{cluster['workers']} up, {cluster['target']} wanted, {cluster['draining']} draining; "
        f"{cluster['slots']} slots",
    )
    if trouble := cluster.get("trouble"):
        grid.add_row("", Text(trouble, style="yellow"))
    grid.add_row(
        "episodes",
        f"{episodes['in_flight']} in flight (limit {cluster['in_flight_limit']}), {episodes['waiting']} waiting, "
        f"{_landed(status)} landed",
    )
    total = status["plan_groups"]
    groups = f"{episodes['closed_groups']} closed, {episodes['opened_groups']} opened"
    grid.add_row("groups", groups + (f" of {total}" if total is not None else ""))
    grid.add_row("rate", f"{recent['episodes_per_hour']:,.0f} episodes/h")
    grid.add_row(
        "last episodes",
        f"reward {_number(recent['reward_mean'], 3)}, {_number(recent['turns_mean'], 1)} turns, "
        f"{_number(recent['tokens_mean'], 0)} tokens, {_number(recent['seconds_mean'], 2)} s",
    )
    if status["policy"] is not None:
        policy = status["policy"]
        grid.add_row("policy", f"step {policy['step']} published, {policy['consumed_groups']} groups consumed")
    if problems := _problems(status):
        grid.add_row("failures", Text(problems, style="yellow"))
    if status.get("tripped"):
        grid.add_row("stopped", Text(status["tripped"], style="red"))
    return Group(title, grid, engine_table(status)) if status["engines"] else Group(title, grid)


def engine_table(status: Mapping[str, Any]) -> Table:
    """One row per engine. ``reserved``: the share of its KV that episodes have a claim on."""
    engines = Table(box=None, padding=(0, 2), header_style="dim")
    pools = {engine.get("pool") for engine in status["engines"]}
    shown = ("state", "policy", "running", "queued", "KV used", "reserved", "retracted", "restarts")
    engines.add_column("engine", no_wrap=True)
    for name in (*shown, *(["pool"] if len(pools) > 1 else [])):
        engines.add_column(name)
    for engine in status["engines"]:
        total = engine.get("max_total_tokens") or 0
        used = engine.get("used_tokens") or 0
        own = engine.get("name") not in (None, engine["url"])
        engines.add_row(
            f"{engine['name']} at {engine['url']}" if own else str(engine["url"]),
            _engine_state(engine),
            str(engine.get("version", "-")),
            str(engine.get("running", "-")),
            str(engine.get("queued", "-")),
            f"{used / total:.0%} of {total:,}" if total else "-",
            f"{engine.get('reserved_tokens', 0) / total:.0%}" if total else "-",
            str(engine.get("retracted", "-")),
            str(engine.get("restarts", "-")),
            *([str(engine.get("pool"))] if len(pools) > 1 else []),
        )
    return engines


def _engine_state(engine: Mapping[str, Any]) -> Text:
    state = str(engine["state"])
    if engine.get("draining"):
        state = "draining" if engine.get("reserved_tokens") else "drained"
    elif engine.get("circuit", "closed") != "closed":
        state = f"{state}, circuit {str(engine['circuit']).replace('_', ' ')}"
    style = {"up": "green", "down": "red", "failed": "red", "drained": "yellow", "draining": "yellow"}
    shown = Text(state, style=style.get(state.partition(",")[0], ""))
    if engine.get("error"):
        shown.append(f"  {engine['error']}"[:120], style="dim")
    return shown


def result_table(results: Results) -> Table:
    """The result of a finite rollout: both denominators side by side."""
    shown = Table(box=None, show_header=False, padding=(0, 2))
    shown.add_column(style="dim")
    shown.add_column()
    shown.add_row("tasks x attempts", f"{results.tasks} tasks, {results.attempts} episodes")
    shown.add_row("pass@1, failures count as unsolved", _rate(results.resolved, results.attempts))
    shown.add_row("pass@1, failures left out", _rate(results.resolved, results.graded))
    failures = f"{results.failed} failed, {results.dropped} dropped, {results.retries} attempts retried"
    shown.add_row("infrastructure", failures + _counts(results.failures))
    shown.add_row("ended by", _counts(results.end_reasons).removeprefix(": ") or "-")
    if results.output_tokens:
        shown.add_row(
            "per episode", f"{_number(results.turns_mean, 1)} turns, {_number(results.tokens_mean, 0)} tokens"
        )
    shown.add_row("time", f"{results.seconds:.1f} s, {_number(results.episodes_per_hour, 0)} episodes/h")
    return shown


def _rate(part: int, whole: int) -> str:
    return f"{part / whole:.1%} ({part}/{whole})" if whole else f"- ({part}/{whole})"


def _counts(counter: Mapping[str, int]) -> str:
    items = sorted(counter.items(), key=lambda item: -item[1])
    return ": " + ", ".join(f"{name} {count}" for name, count in items) if items else ""


def _landed(status: Mapping[str, Any]) -> int:
    episodes = status["episodes"]
    return int(episodes["landed"] + episodes["failed"] + episodes["dropped"] + episodes["landed_before"])


def _problems(status: Mapping[str, Any]) -> str:
    episodes = status["episodes"]
    parts = [f"{name} {episodes[name]}" for name in ("retried", "lost", "failed", "dropped") if episodes[name]]
    return ", ".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
