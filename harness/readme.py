"""Puts the newest report's claim table into the README, between its markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.provenance import ROOT

START, END = "<!-- claims -->", "<!-- /claims -->"


def claim_table(reports: Path = ROOT / "reports") -> str:
    """The short table of the newest report: claims that were measured here first, the others in one line."""
    version = (reports / "latest").read_text().strip()
    document = json.loads((reports / version / "report.json").read_text())
    measured = [c for c in document["claims"] if c["here"]]
    open_ = [f"`{c['id']}`" for c in document["claims"] if not c["here"]]
    lines = ["| claim | here | reported | verdict |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {c['detail']['statement']} | {_cell(c)} | {c['reported']['text']} | {c['status']} |" for c in measured
    ]
    if open_:
        lines.append(f"\nNot built yet: {', '.join(open_)}.")
    return "\n".join(lines)


def with_table(readme: str, table: str) -> str:
    """``readme`` with ``table`` between the markers. Raises ValueError when they are missing."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"README has no {START} ... {END}")
    return f"{before}{START}\n{table}\n{END}{after}"


def update(readme: Path = ROOT / "README.md") -> None:
    readme.write_text(with_table(readme.read_text(), claim_table()))


def _cell(claim: dict[str, Any]) -> str:
    here = claim["here"]
    unit, _, note = here["unit"].partition(" ")
    interval = f"{here['value']:.3g} {unit} [{here['low']:.3g}, {here['high']:.3g}]"
    return f"{interval} {note}, n={here['n']}".replace(" ,", ",")


if __name__ == "__main__":
    update()
