"""The report: claims as data, verdicts by rule, three columns, bytes that depend on content alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.errors import UsageError
from harness import claims, experiments, report
from harness.claims import Claim, Measurement
from harness.profiles import profile
from harness.provenance import provenance
from harness.stats import Estimate

CURVE = [{"step": s, "pass_rate": s / 10} for s in range(1, 6)]


def rows() -> list[report.Row]:
    measured = Measurement(
        estimate=Estimate(value=31.0, low=25.0, high=37.5, n=400),
        unit="%",
        holds=True,
        detail={"passed": 124},
        sources=("abc",),
        figures={"learning_curve": CURVE},
    )
    known = {claim.id: claim for claim in claims.load()}
    return [
        report.Row(claim=known["pass1-rl"], measurement=measured),
        report.Row(claim=known["kv-thrash"], measurement=None),
        report.Row(claim=known["disjoint"], measurement=None, problem="broke: ValueError: no"),
    ]


def test_every_reported_figure_is_a_claim_and_every_experiment_exists() -> None:
    found = claims.load()
    assert len(found) == len({c.id for c in found}) == 15
    for claim in found:
        assert "text" in claim.reported
        if claim.experiment:
            assert callable(experiments.load(claim))
            assert claim.rule
            assert claim.experiment in experiments.STAGES
    assert experiments.load(Claim(id="x", statement="", reported={})) is None


def test_report_has_the_promised_shape(tmp_path: Path) -> None:
    report.write(tmp_path / "1.0", rows(), provenance("quick"))
    document = json.loads((tmp_path / "1.0" / "report.json").read_text())
    first, second, third = document["claims"]
    assert first["status"] == "holds"
    assert first["here"] == {"value": 31.0, "low": 25.0, "high": 37.5, "n": 400, "unit": "%"}
    assert first["twin"] is None
    assert first["reported"]["text"].startswith("27.5 %")
    assert (second["status"], second["here"]) == ("not built yet", None)
    assert third["status"] == "not run"
    assert "broke" in third["detail"]["problem"]
    assert document["provenance"]["profile"] == "quick"
    assert (tmp_path / "latest").read_text() == "1.0\n"
    text = (tmp_path / "1.0" / "report.md").read_text()
    assert "31 % [25, 37.5], n=400" in text
    assert "figures/learning_curve.svg" in text
    assert (tmp_path / "1.0" / "figures" / "learning_curve.svg").read_text().startswith("<?xml")


def test_same_content_same_bytes(tmp_path: Path) -> None:
    origin = provenance("quick")
    for name in ("a", "b"):
        report.write(tmp_path / name / "1.0", rows(), origin)
    for file in ("report.json", "report.md", "figures/learning_curve.svg"):
        assert (tmp_path / "a/1.0" / file).read_bytes() == (tmp_path / "b/1.0" / file).read_bytes()


def test_unknown_names_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"pass9.*known: pass1-base"):
        claims.select(("pass9",))
    with pytest.raises(UsageError, match=r"known: quick, full"):
        profile("huge")
