"""What `harness list`, `show`, `check`, `diff` and `report` print; each returns an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from farm.errors import UsageError
from harness import claims, compare, document, experiments, report, reproduce, sections, shape
from harness.provenance import ROOT

REPORTS = ROOT / "reports"


def list_claims() -> int:
    newest = _newest()
    table = Table(box=None)
    table.add_column("claim", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("reported")
    for claim in claims.load():
        row = newest.get(claim.id)
        table.add_row(
            claim.id,
            row["status"] if row else "not run",
            sections.figure(row["here"]) if row and row["here"] else sections.NOTHING,
            claim.reported["text"],
        )
    console = Console()
    console.print(table, markup=False)
    console.print("`harness show CLAIM` says what each is, by which rule and from what", markup=False)
    return 0


def show_claim(name: str) -> int:
    """Everything that is known of one claim. Raises UsageError when it is unknown."""
    (claim,) = claims.select((name,))
    stages = experiments.STAGES.get(claim.experiment or "", ())
    lines = {
        "claim": claim.id,
        "statement": claim.statement,
        "reported": f"{claim.reported['text']} ({claim.source})",
        "metric": claim.metric,
        "experiment": claim.experiment or document.NOT_BUILT,
        "stages": ", ".join(stages),
        "needs": ", ".join(claim.back_ends),
        "rule": claim.rule,
        "conditions": "; ".join(map(str, claim.require)),
        "judged from": "; ".join(map(str, claim.enough)),
    }
    row = _newest().get(claim.id)
    if row:
        lines |= {
            "here": sections.here(row),
            "twin": sections.twin(row) + (f" ({claim.twin})" if claim.twin else ""),
            "verdict": row["status"],
            "run": sections.what_was_run(row),
        }
    console = Console(soft_wrap=True)
    for key, value in lines.items():
        if value:
            console.print(f"{key:<11} {value}", markup=False, highlight=False)
    for table in sections.parts(row) if row else ():
        console.print(f"\n{table.head[0]}", markup=False, highlight=False)
        for name_, value in table.rows:
            console.print(f"  {name_}: {value}", markup=False, highlight=False)
    return 0


def check(path: Path | None) -> int:
    """1 when a row that held, in this report or in the newest one, no longer does by its rule."""
    baseline = document.read(newest_folder()) if path is None or (REPORTS / report.LATEST).exists() else None
    made = document.read(path) if path else baseline
    assert made is not None
    judged = compare.check(made, claims.load(), baseline if path else None)
    table = Table("claim", "recorded", "by the rule", "held before", "", box=None)
    for row in judged:
        table.add_row(row.claim, row.recorded, row.now, row.before or "", row.why or ("LOST" if row.lost else ""))
    console = Console()
    console.print(table, markup=False)
    lost = [row.claim for row in judged if row.lost]
    console.print(f"no longer hold: {', '.join(lost)}" if lost else "every row that held still holds", markup=False)
    return int(bool(lost))


def diff(a: Path, b: Path) -> int:
    """1 when a row moved beyond noise or changed its verdict."""
    left, right = document.read(a), document.read(b)
    changes = compare.diff(left, right)
    table = Table("claim", "A", "B", "", "p", "verdict", box=None)
    for change in changes:
        status = change.status_a if change.status_a == change.status_b else f"{change.status_a} -> {change.status_b}"
        p = "" if change.p is None else f"{change.p:.2g}"
        table.add_row(change.claim, _cell(change.a), _cell(change.b), change.word, p, status)
    console = Console()
    console.print(table, markup=False)
    if others := compare.differing_origins(left, right):
        console.print(f"They differ in {', '.join(others)}: durations and rates do not compare.", markup=False)
    return int(any(change.beyond_noise for change in changes))


def show_report(folder: Path | None, *, rebuild: bool, verify: bool, stages: Path | None) -> int:
    """1 when ``verify`` finds files that are not what the kept logs give."""
    folder = folder or newest_folder()
    console, progress = Console(), Console(stderr=True)
    if not (rebuild or verify):
        reproduce.show(document.read(folder), console)
        return 0
    if rebuild:
        report.check_folder(folder)

    def say(text: str) -> None:
        progress.print(text, markup=False, highlight=False)

    made = reproduce.rebuild(folder, say=say) if stages is None else reproduce.rebuild_from(stages, folder, say=say)
    if rebuild:
        report.write(folder, made)
        reproduce.show(made, console)
        return 0
    wrong = report.differing(folder, made)
    for path in wrong:
        console.print(f"{folder / path}: is not what the kept logs give", markup=False, soft_wrap=True)
    if wrong:
        console.print(*_where(folder, made), sep="\n", markup=False, soft_wrap=True)
        console.print("`harness report --rebuild` makes it anew; then see what changed and commit it")
    return int(bool(wrong))


def newest_folder() -> Path:
    """The report that ``reports/latest`` names. Raises UsageError when there is none."""
    try:
        return REPORTS / (REPORTS / report.LATEST).read_text().strip()
    except FileNotFoundError:
        raise UsageError(f"{REPORTS}: holds no report yet; `harness reproduce --all` writes one") from None


def _where(folder: Path, made: dict[str, Any]) -> list[str]:
    """The claims and parts in which the report that is there differs."""
    try:
        there = shape.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        return ["report.json is missing or unreadable"]
    old, new = ({row["id"]: row for row in d.get("claims", ())} for d in (there, made))
    rows = [f"claim {name} differs" for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return rows + [
        f"{part} differs" for part in ("schema", "provenance", "stages") if there.get(part) != made.get(part)
    ]


def _newest() -> dict[str, Any]:
    """The rows of the newest report; none where there is no report yet. Raises UsageError when it is damaged."""
    if not (REPORTS / report.LATEST).exists():
        return {}
    return {row["id"]: row for row in document.read(newest_folder())["claims"]}


def _cell(cell: Any) -> str:
    if cell is None:
        return sections.NOTHING
    return f"{sections.number(cell['value'])} [{sections.number(cell['low'])}, {sections.number(cell['high'])}]"
