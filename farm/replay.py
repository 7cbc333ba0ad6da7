"""``farm replay``: one landed trajectory, for people.

Looks in the sealed shards and, for the newest episodes, among the open files, and needs nothing but the run folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from farm.errors import UsageError
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import Dropped, Event, Failed, Graded, Trajectory, Turn, version_name

_BAR = 48  # characters of the timeline
_OBSERVATION_LINES = 40
_NEAR = 3


def render(run: Path, prefix: str) -> RenderableType:
    """The landed trajectory of ``run`` whose episode id starts with ``prefix``.

    Raises :class:`UsageError` when there is none or more than one, and names those that come near."""
    log = DirectoryLog(RunFolder.open(run).trajectories, create=False)
    trajectory = log.find(_resolve(log.landed(), prefix, run))
    if trajectory is None:
        raise UsageError(f"{run}: episode {prefix} was taken back just now; try again")
    return view(trajectory)


def _resolve(ids: frozenset[str], prefix: str, run: Path) -> str:
    if not ids:
        raise UsageError(f"{run}: no episode has landed yet; try again when the farm has run for a while")
    matches = [prefix] if prefix in ids else sorted(i for i in ids if i.startswith(prefix))
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(i[:12] for i in matches[:_NEAR]) + (", …" if len(matches) > _NEAR else "")
        raise UsageError(f"{run}: {len(matches)} episodes start with {prefix!r} ({shown}); give more characters")
    heads = {i[: max(len(prefix), 8)]: i for i in sorted(ids)}
    near = difflib.get_close_matches(prefix, list(heads), n=_NEAR, cutoff=0.5) or list(heads)[:_NEAR]
    shown = ", ".join(heads[head][:12] for head in near)
    raise UsageError(f"{run}: none of the {len(ids)} landed episodes starts with {prefix!r}; there are e.g. {shown}")


def view(trajectory: Trajectory) -> RenderableType:
    """A trajectory as rich text."""
    parts: list[RenderableType] = [_header(trajectory)]
    if trajectory.prior:
        parts.append(_prior(trajectory))
    for number, turn in enumerate(trajectory.turns, start=1):
        parts.append(_turn(number, turn))
    parts.append(_outcome(trajectory))
    if trajectory.timeline:
        parts.append(_timeline(trajectory.timeline))
    if trajectory.patch:
        parts.append(Panel(_text(trajectory.patch.rstrip()), title="patch", title_align="left"))
    return Group(*parts)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _header(t: Trajectory) -> RenderableType:
    steps = sorted({span.step for turn in t.turns for span in turn.spans})
    grid = _grid()
    for name, value in [
        ("task", f"{t.instance_id} · {t.repo} · {t.dataset}"),
        ("strata", ", ".join(f"{key}={value}" for key, value in sorted(t.strata.items())) or "-"),
        ("group", f"{t.group_id} · attempt {t.index + 1} of {t.group_size} · seed {t.seed} · {t.purpose}"),
        ("policy", ", ".join(version_name(step) for step in steps) or "nothing was sampled"),
        ("sampling", f"temperature {t.sampling.temperature:g}, top-p {t.sampling.top_p:g}, top-k {t.sampling.top_k}"),
        ("ran", f"try {t.attempt} on {t.worker or '-'}, engine {t.engine_url or '-'}"),
        ("when", f"{_clock(t.started_at_s)} to {_clock(t.ended_at_s)} UTC, {t.ended_at_s - t.started_at_s:.2f} s"),
        ("tokens", f"{t.output_tokens:,} sampled of {t.total_tokens:,}, {t.usage.cached_tokens:,} from the cache"),
        ("CPU", f"sandbox {t.usage.sandbox_cpu_s:.3f} s, worker {t.usage.worker_cpu_s:.3f} s"),
        ("end", f"{t.end_reason.value} after {len(t.turns)} turns"),
    ]:
        grid.add_row(name, _plain(value))
    return Panel(grid, title=f"episode {_plain(t.episode_id)}", title_align="left")


def _prior(t: Trajectory) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for tried in t.prior:
        took = tried.ended_at_s - tried.started_at_s
        what = f"{tried.boundary.value}/{tried.kind}: {tried.message}"
        grid.add_row(f"try {tried.attempt}", _plain(tried.worker), f"{took:.2f} s", _plain(what))
    return Panel(grid, title="tries that an infrastructure failure ended", title_align="left", border_style="yellow")


def _turn(number: int, turn: Turn) -> RenderableType:
    parts: list[RenderableType] = [Rule(f"turn {number}", align="left", style="dim"), Text(_tokens(turn), style="dim")]
    parts.append(_text(f"$ {turn.action}", style="bold cyan"))
    parts.extend(_text(line) for line in _clipped(turn.observation.splitlines()))
    if turn.exit_code:
        parts.append(Text(f"exit code {turn.exit_code}", style="red"))
    return Group(*parts)


def _tokens(turn: Turn) -> str:
    parts = [f"{len(turn.context_ids)} in", f"{len(turn.output_ids)} sampled ({turn.finish_reason})"]
    if turn.output_logprobs:
        mean = sum(turn.output_logprobs) / len(turn.output_logprobs)
        parts.append(f"log-prob mean {mean:.2f}, least {min(turn.output_logprobs):.2f}")
    parts.extend(f"{version_name(span.step)} [{span.start}, {span.end})" for span in turn.spans)
    parts.append(f"{turn.cached_tokens} cached")
    if turn.retractions:
        parts.append(f"{turn.retractions} retractions")
    if turn.segment:
        parts.append(f"segment {turn.segment}")
    return " · ".join(parts)


def _clipped(lines: Sequence[str]) -> Iterator[str]:
    if len(lines) <= _OBSERVATION_LINES:
        yield from lines
        return
    half = _OBSERVATION_LINES // 2
    yield from lines[:half]
    yield f"… {len(lines) - 2 * half} lines …"
    yield from lines[-half:]


def _outcome(t: Trajectory) -> RenderableType:
    outcome = t.outcome
    if isinstance(outcome, Failed):
        text = f"{outcome.boundary.value}/{outcome.kind}: {outcome.message}"
        title = "infrastructure failure, no reward"
        return Panel(_text(text), title=title, title_align="left", border_style="yellow")
    if isinstance(outcome, Dropped):
        return Panel(_text(outcome.reason), title="dropped, no reward", title_align="left", border_style="yellow")
    return _graded(outcome)


def _graded(outcome: Graded) -> RenderableType:
    evidence = outcome.evidence
    grid = _grid()
    grid.add_row("reward", f"{outcome.reward:g}")
    grid.add_row("patch", "applied" if evidence.patch_applied else "did not apply")
    grid.add_row("exit code", str(evidence.exit_code))
    for test, status in sorted(evidence.statuses.items()):
        grid.add_row(status, _plain(test), style="green" if status == "PASSED" else "red")
    title = "graded: resolved" if evidence.resolved else "graded: not resolved"
    shown: list[RenderableType] = [grid]
    if evidence.log_tail.strip():
        shown += [Rule("end of the grading log", align="left", style="dim"), _text(evidence.log_tail.rstrip())]
    return Panel(Group(*shown), title=title, title_align="left", border_style="green" if evidence.resolved else "red")


def _timeline(events: Sequence[Event]) -> RenderableType:
    start = min(event.start_at_s for event in events)
    whole = max(max(event.end_at_s for event in events) - start, 1e-9)
    grid = Table.grid(padding=(0, 2))
    for event in events:
        left = min(_BAR - 1, int(_BAR * (event.start_at_s - start) / whole))
        width = max(1, min(_BAR - left, round(_BAR * (event.end_at_s - event.start_at_s) / whole)))
        bar = Text(" " * left + "█" * width, style="cyan")
        grid.add_row(_plain(event.name), f"{1e3 * (event.end_at_s - event.start_at_s):,.1f} ms", bar)
    return Panel(grid, title=f"timeline, {whole:.2f} s", title_align="left")


def _text(text: str, *, style: str = "") -> Text:
    return Text(_visible(text), style=style)


def _plain(text: str) -> str:
    return escape(_visible(text))


def _visible(text: str) -> str:
    """Sandboxed programs wrote this: whatever could steer a terminal is shown, not sent."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= dict.fromkeys(range(0x7F, 0xA0), "\ufffd")


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
