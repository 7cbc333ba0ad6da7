"""The report as one HTML file that needs nothing beside it: opens offline, on a phone, and prints."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from harness import sections

TEMPLATE = "report.html.j2"
_WHOLE_CHARACTERS = 24
_FIGURE = re.compile(r"[\d.,±–/()$-]+( ([\d.,±–/()$-]+|%\)?|x|s))*")


def html(document: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    """The page. ``images``: figure name -> SVG."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["words"] = _words
    environment.filters["is_whole"] = is_whole
    owners = {name: owner for name, (owner, _) in sections.figures(document).items()}
    return environment.get_template(TEMPLATE).render(
        version=document["version"],
        provenance=document["provenance"],
        counts=sections.counts(document),
        reading=sections.READING,
        suite=sections.SUITE,
        intervals=sections.INTERVALS,
        table=sections.claims(document),
        claims=[_claim(claim, owners) for claim in document["claims"]],
        overall_figures=[name for name, owner in owners.items() if not owner],
        noise=sections.noise(document),
        costs=sections.costs(document),
        stages=sections.stages(document),
        provenance_table=sections.provenance(document),
        runs=list(sections.runs(document)),
        images={name: base64.b64encode(image).decode() for name, image in images.items()},
    )


def _claim(claim: Mapping[str, Any], owners: Mapping[str, str]) -> dict[str, Any]:
    detail = claim["detail"]
    return {
        "id": claim["id"],
        "status": claim["status"],
        "statement": detail["statement"],
        "here": sections.here(claim),
        "twin": sections.twin(claim),
        "reported": sections.reported(claim),
        "source": claim["reported"]["source"],
        "metric": detail["metric"],
        "rule": detail["rule"],
        "require": detail["require"],
        "enough": detail["enough"],
        "no_twin": detail.get("no_twin", ""),
        "run": sections.what_was_run(claim),
        "problem": detail.get("problem", ""),
        "figures": [name for name, owner in owners.items() if owner == claim["id"]],
        "parts": sections.parts(claim),
    }


def is_whole(cell: str) -> bool:
    """Whether a cell is one figure ("40 / 0", "± 3.1 (24 %)") or one name, which no line may break."""
    return len(cell) <= _WHOLE_CHARACTERS and (" " not in cell or _FIGURE.fullmatch(cell) is not None)


def _words(text: str) -> Markup:
    """The two marks that the sections' own words use."""
    safe = str(escape(text))
    safe = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", safe)
    return Markup(re.sub(r"\*(.+?)\*", r"<em>\1</em>", safe))
