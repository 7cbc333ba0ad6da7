"""Puts the newest report's claim table into the README, between its markers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import document, sections
from harness.provenance import ROOT

START, END = "<!-- claims -->", "<!-- /claims -->"


def claim_table(reports: Path = ROOT / "reports") -> str:
    """The short table of the newest report: claims with a figure, measured or predicted; the others in one line."""
    version = (reports / "latest").read_text().strip()
    rows = document.read(reports / version)["claims"]
    told = [row for row in rows if row["here"] or row["twin"]]
    lines = ["| claim | here | twin | reported | verdict |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {row['detail']['statement']} | {_here(row)} | {_twin(row)} | {row['reported']['text']} | {row['status']} |"
        for row in told
    ]
    others = [row for row in rows if row not in told]
    for status in dict.fromkeys(row["status"] for row in others):
        names = ", ".join(f"`{row['id']}`" for row in others if row["status"] == status)
        lines.append(f"\n{status.capitalize()}: {names}.")
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


def _here(row: Mapping[str, Any]) -> str:
    return sections.here(row) if row["here"] else row["status"]


def _twin(row: Mapping[str, Any]) -> str:
    return sections.twin(row) if row["twin"] else sections.NOTHING


if __name__ == "__main__":
    update()
