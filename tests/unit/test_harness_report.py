"""The report: claims as data, verdicts by rule, three columns, bytes that depend on content alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from farm.errors import UsageError
from harness import claims, cli, compare, document, experiments, figures, report, rules, sections, views
from harness.claims import Claim, Measurement
from harness.document import Row
from harness.gate import baseline
from harness.html import is_whole
from harness.lab import Lab
from harness.profiles import EMBEDDED, FULL, QUICK, profile
from harness.provenance import provenance
from harness.stats import Estimate
from harness.twin.predictions import NO_RANGE

CURVE = [{"step": s, "pass_rate": s / 10} for s in range(1, 6)]
ORIGIN = provenance("quick") | {"back_ends": dict(EMBEDDED)}
TOTALS = {"cpu_s": 60.0, "sandbox_s": 90.0, "prompt_tokens": 4000, "output_tokens": 800, "usd": None}
STAGES = {
    "eval-rl": {
        "commit": "c" * 40,
        "key": {"code": "a" * 16, "settings": "b" * 16, "data": "d" * 16},
        "wall_s": 12.5,
        "runs": {
            "run": {
                "config": "f" * 16,
                "seed": 0,
                "tasks": "micro:benchmark",
                "shards": ["e" * 64],
                "policies": 1,
                "trajectories": 400,
                "activity_s": {"generate": 1.25, "exec": 0.25},
                "cost": {
                    "trajectories": 400,
                    "graded": 400,
                    "failed": 0,
                    "solved": 124,
                    "sandbox": "bubblewrap",
                    "total": TOTALS,
                    "per_trajectory": {k: v and v / 400 for k, v in TOTALS.items()},
                    "per_solved": {k: v and v / 124 for k, v in TOTALS.items()},
                },
            }
        },
    }
}
TWIN = {"value": 3.1, "low": 2.5, "high": 3.6, "unit": "x", "text": "800 s to 260 s (3.1x)", "kind": "prediction",
        "agrees": True, "rule": "within a third", "detail": {"capped_step_s": 260.0}}  # fmt: skip


def measured(
    value: float = 31.0, *, points: float = 18.0, p: float = 0.001, tasks: float = 100, holds: bool | None = True
) -> Measurement:
    return Measurement(
        estimate=Estimate(value=value, low=value - 6, high=value + 6.5, n=400),
        unit="%",
        holds=holds,
        detail={
            "passed": 124,
            "gain_over_sft": {"points": points, "low": points - 5, "tasks": tasks},
            "infra_failures": 0,
            "p": p,
            "odd": float("nan"),
        },
        sources=("abc", "def"),
        figures={"learning_curve": CURVE},
    )


def made(value: float = 31.0, **settings: float) -> dict[str, object]:
    known = {claim.id: claim for claim in claims.load()}
    rows = [
        Row(claim=known["pass1-rl"], measurement=measured(value, **settings), stages=("eval-rl",)),
        Row(claim=Claim(id="later", statement="not <yet>", reported={"text": "10 | 99"}), measurement=None, twin=TWIN),
        Row(claim=known["disjoint"], measurement=None, problem="broke: ValueError: no"),
    ]
    return document.build(rows, version="1.0", provenance=ORIGIN, stages=STAGES)


# ------------------------------------------------------------------------------------------------ claims


def test_every_reported_figure_is_a_claim_and_every_experiment_exists() -> None:
    found = claims.load()
    assert len(found) == len({c.id for c in found})
    assert {"pass1-base", "steptime-cap", "throughput", "kv-thrash", "restart", "separation"} <= {c.id for c in found}
    for claim in found:
        assert "text" in claim.reported
        assert claim.metric
        assert claim.source
        assert set(claim.back_ends) <= set(EMBEDDED)
        if claim.experiment:
            assert callable(experiments.load(claim, FULL))
            assert claim.rule
            assert claim.experiment in experiments.STAGES
    assert experiments.load(Claim(id="x", statement="", reported={}), FULL) is None


def test_what_a_profile_leaves_out_says_why_and_needs_no_stage(tmp_path: Path) -> None:
    lab = Lab(folder=tmp_path, profile=QUICK, console=Console(quiet=True))
    left = [claim for claim in claims.load() if claim.experiment in QUICK.left_out]
    assert len(left) == len(QUICK.left_out) == 4
    for claim in left:
        assert experiments.stages(claim, QUICK) == ()
        assert experiments.stages(claim, FULL)
        experiment = experiments.load(claim, QUICK)
        assert experiment is not None
        row = document.build(
            [Row(claim=claim, measurement=experiment(lab))], version="1", provenance=ORIGIN, stages={}
        )["claims"][0]
        assert row["status"] == "not run"
        assert sections.here(row) == QUICK.left_out[claim.experiment or ""]
    assert not lab.used


def test_unknown_names_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pass9.*known: pass1-base"):
        claims.select(("pass9",))
    with pytest.raises(UsageError, match=r"known: quick, full, cluster"):
        profile("huge")
    text = claims.CLAIMS.read_text().replace('source = "reference"', 'source = "hearsay"', 1)
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(UsageError, match=r"pass1-base.*'hearsay'"):
        claims.load(tmp_path / "claims.toml")


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        ("here.low > 0", True),
        ("here.low > 1.5", False),
        ("measured.logged == measured.injected", True),
        ("measured.share_at_2.5x >= 0.1", False),
        ("measured.gain.low > 0", None),
        ("measured.nothing == 0", None),
        ("here.n >= 10", True),
    ],
)
def test_conditions_are_judged_on_published_figures(condition: str, answer: bool | None) -> None:
    shown = {
        "here": {"low": 1, "n": 10},
        "measured": {"logged": 3, "injected": 3, "share_at_2.5x": 0.05, "gain": {"low": None}},
    }
    parsed = rules.parse(condition)
    assert parsed.holds(shown) is answer
    assert str(parsed) == condition
    assert rules.judge([parsed, rules.parse("1 < 2")], shown) is answer
    assert rules.untold([parsed], shown) == ([condition] if answer is None else [])


def test_an_unreadable_condition_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is not readable"):
        rules.parse("here.low is large")


# ---------------------------------------------------------------------------------------------- document


def test_document_has_the_promised_shape() -> None:
    whole = made()
    first, second, third = whole["claims"]  # type: ignore[misc]
    assert first["status"] == "holds"
    assert first["here"] == {"value": 31.0, "low": 25.0, "high": 37.5, "n": 400, "unit": "%"}
    assert first["twin"] is None
    assert first["reported"]["text"].startswith("27.5 %")
    assert "reference report" in first["reported"]["source"]
    assert first["detail"]["measured"]["odd"] is None
    assert first["detail"]["sources"] == {"shards": 2, "sha256": document.combined(["abc", "def"])}
    assert (second["status"], second["here"], second["twin"]["value"]) == ("not built yet", None, 3.1)
    assert third["status"] == "not run"
    assert "broke" in third["detail"]["problem"]
    assert json.loads(document.text(whole)) == whole
    assert report.files(json.loads(document.text(whole))) == report.files(whole)


def test_the_verdict_follows_from_the_rule_not_from_the_experiment() -> None:
    def status(**settings: float) -> str:
        return str(made(**settings)["claims"][0]["status"])  # type: ignore[index]

    assert status(points=14.7) == "holds"
    assert status(points=14.6) == "differs"
    assert status(p=0.02) == "differs"
    assert status(p=float("nan")) == "not run"
    undecided = Row(claim=claims.select(("pass1-rl",))[0], measurement=measured(holds=None))
    built = document.build([undecided], version="1", provenance=ORIGIN, stages={})
    assert built["claims"][0]["status"] == "not run"


def _figures(claim: Claim, **measured: Any) -> dict[str, Any]:
    """The committed row of ``claim`` with other figures: a path below "measured", or "here", -> value."""
    newest = views.newest_folder()
    row: dict[str, Any] = next(r for r in document.read(newest)["claims"] if r["id"] == claim.id)
    for path, value in measured.items():
        at: Any = row if path.startswith("here") else row["detail"]["measured"]
        *before, last = path.split("__")
        for part in before:
            at = at[part]
        at[last] = value
    return row


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("pass1-base", {"here__n": 1}),
        ("pass1-base", {"infra_failures": 399}),
        ("pass1-sft", {"gain_over_base__tasks": 2}),
        ("pass1-rl", {"gain_over_sft__tasks": 2}),
        ("disjoint", {"here__n": 0}),
        ("steptime-cap", {"here__n": 1}),
        ("cap-harmless", {"here__n": 1}),
        ("async-step", {"here__n": 2}),
        ("throughput", {"here__n": 3}),
        ("throughput", {"fast__in_flight_at_most": 64}),
        ("sandbox-start", {"here__n": 2}),
        ("kv-headroom", {"here__n": 1}),
        ("kv-headroom", {"trajectories_in_flight_max": 1}),
        ("kv-thrash", {"here__n": 1}),
        ("length-spread", {"here__n": 3}),
        ("restart", {"steps": 8, "steps_with_equal_weights": 8, "steps_with_equal_batches": 8}),
        ("restart", {"distinct_weights": 1}),
        ("infra-errors", {"injected": 1, "logged_as_failed": 1, "by_boundary": {"farm": 1}}),
        ("infra-errors", {"training__failures": 0}),
        ("infra-errors", {"training__trained_episodes": 0}),
        ("separation", {"published_steps": 1, "live_everywhere_in_time": 1}),
    ],
)
def test_too_little_data_is_not_judged(name: str, changed: dict[str, Any]) -> None:
    (claim,) = claims.select((name,))
    assert document.verdict(claim, _figures(claim))[0] in ("holds", "differs")
    status, why = document.verdict(claim, _figures(claim, **changed))
    assert status == "not run"
    assert why.startswith("too little data: the rule is judged from ")


def test_every_rule_of_a_measurement_says_how_much_it_needs() -> None:
    without = {claim.id for claim in claims.load() if claim.require and not claim.enough}
    assert without == {"twin-check"}  # one figure


def test_too_little_data_stands_beside_the_figure() -> None:
    row = made(tasks=2)["claims"][0]  # type: ignore[index]
    assert row["status"] == "not run"
    assert sections.here(row) == "31 % [25, 37.5], n=400: too little data"
    text = report.markdown(made(tasks=2))
    assert "* problem: too little data: the rule is judged from measured.gain_over_sft.tasks >= 95 on" in text
    assert "* judged from: `here.n >= 380`, `measured.gain_over_sft.tasks >= 95`" in text
    assert "<dt>judged from</dt>" in report.files(made())["report.html"].decode()


@pytest.mark.parametrize("part", ["value", "low", "high"])
def test_an_interval_that_is_not_finite_is_not_judged(part: str) -> None:
    (claim,) = claims.select(("pass1-rl",))
    status, why = document.verdict(claim, _figures(claim, **{f"here__{part}": None}))
    assert (status, why) == ("not run", "the rule can't be judged: the figure or its interval is not finite")


def test_an_integer_beyond_any_float_satisfies_nothing() -> None:
    assert rules.parse("here.n > 0").holds({"here": {"n": 10**400}}) is None
    assert rules.number(True) == 1.0


# -------------------------------------------------------------------------------------------------- files


def test_same_content_same_bytes_and_no_leftovers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        report.write(tmp_path / name / "1.0", made())
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert [str(f) for f in files] == [
        "1.0/figures/activity.svg", "1.0/figures/learning_curve.svg", "1.0/report.html", "1.0/report.json",
        "1.0/report.md", "latest",
    ]  # fmt: skip
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    folder = tmp_path / "a" / "1.0"
    assert report.differing(folder, made()) == []
    (folder / "figures" / "old.svg").write_text("")
    (folder / "report.md").write_text("by hand")
    assert report.differing(folder, made()) == ["figures/old.svg", "report.md"]
    report.write(folder, made())
    assert report.differing(folder, made()) == []


def test_markdown_keeps_the_columns_apart() -> None:
    text = report.markdown(made())
    assert "| 31 % [25, 37.5], n=400 | – | 27.5 % (110/400), RL adds 14.7 points | holds |" in text
    assert "| not built yet | 800 s to 260 s (3.1x) [2.5, 3.6], agrees | 10 \\| 99 | not built yet |" in text
    assert "| eval-rl | 400 | 124 | 0.15 / 0.484 | 10 / 32.3 | 2 / 6.45 | bubblewrap is not priced |" in text
    assert "figures/learning_curve.svg" in text


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [named["id"] or ""] if "id" in named else []
        self.links += [named[key] or "" for key in ("href", "src") if key in named]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_whole_self_contained_and_escaped() -> None:
    text = report.files(made())["report.html"].decode()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert {"pass1-rl", "later", "disjoint"} == set(page.ids)
    assert all(link.startswith("data:") or link.removeprefix("#") in page.ids for link in page.links)
    assert "http" not in re.sub(r'"data:[^"]*"', "", text)
    assert "not &lt;yet&gt;" in text
    assert '<meta name="viewport"' in text
    assert "@media print" in text


def _changed(change: Callable[[dict[str, Any]], None]) -> str:
    whole: dict[str, Any] = json.loads(document.text(made()))
    change(whole)
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.pop("claims"), "claims: field required"),
        (lambda d: d["claims"][0].pop("here"), r"claims\.0\.here: field required"),
        (
            lambda d: d["claims"][0].update(here={"value": "31"}),
            r"claims\.0\.here\.value: input should be a valid number",
        ),
        (lambda d: d["claims"][0]["detail"].pop("statement"), r"claims\.0\.detail\.statement: field required"),
        (lambda d: d.update(claims={}), "claims: input should be a valid list"),
        (lambda d: d.update(provenance={}), r"provenance\.profile: field required"),
        (lambda d: d["claims"][1].update(twin={}), r"claims\.1\.twin\.text: field required"),
        (lambda d: d["claims"][1]["twin"].update(low="a"), r"claims\.1\.twin\.low: input should be a valid number"),
        (
            lambda d: d["claims"][0]["here"].update(low=40.0),
            r"claims\.0\.here: the interval's low end 40 is above its high end 37\.5",
        ),
    ],
)
def test_a_report_of_another_shape_is_a_usage_error(
    change: Callable[[dict[str, Any]], None], told: str, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(_changed(change))
    for command in ("check", "diff", "report"):
        arguments = [command, *[str(tmp_path)] * (2 if command == "diff" else 1)]
        raised = CliRunner().invoke(cli.cli, arguments).exception
        assert isinstance(raised, UsageError)
        assert re.search(rf"report\.json: {told}.*`harness report --rebuild`", str(raised))


def test_a_row_without_figures_was_not_run_whatever_it_says() -> None:
    claim = claims.select(("pass1-rl",))[0]
    row = {"here": None, "status": "holds", "detail": {}}
    assert document.verdict(claim, row)[0] == "not run"
    assert document.verdict(claim, row | {"detail": {"measured": {}}})[0] == "not run"
    assert document.verdict(claim, row | {"status": "not built yet"})[0] == "not built yet"
    told = {"here": {"value": 1.0}, "status": "holds", "detail": {"undecided": True}}
    assert document.verdict(claim, told)[0] == "not run"
    (judged,) = compare.check({"claims": [row | {"id": claim.id}]}, [claim])
    assert (judged.now, judged.lost) == ("not run", True)


@pytest.mark.parametrize(
    ("cell", "whole"),
    [
        ("40 / 0", True), ("steptime-cap", True), ("± 3.65 (29 %)", True), ("12.6 %", True), ("–", True),
        ("145 steps", False), ("2 cores of a processor", False), ("a-name-that-is-far-too-long-for-one-line", False),
    ],
)  # fmt: skip
def test_no_line_breaks_a_figure_or_a_name(cell: str, whole: bool) -> None:
    assert is_whole(cell) is whole


def test_in_print_only_words_that_fit_no_line_are_broken() -> None:
    page = report.files(made())["report.html"].decode()
    in_print = page[page.index("@media print") : page.index("</style>")]
    assert "anywhere" not in in_print
    assert '<td class="whole">0.15 / 0.484</td>' in page
    assert "<td>bubblewrap is not priced</td>" in page


def test_a_missing_range_of_the_twin_is_said() -> None:
    row = {"detail": {}, "twin": {**TWIN, "low": None, "high": None, "detail": {"range": NO_RANGE}}}
    assert sections.twin(row) == "800 s to 260 s (3.1x) (range not computed), agrees"
    assert sections.twin({"detail": {}, "twin": TWIN}) == "800 s to 260 s (3.1x) [2.5, 3.6], agrees"
    whole = sections.predicted(row)
    assert whole is not None
    assert ("range", NO_RANGE) in whole.rows


def test_another_schema_and_no_report_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such report"):
        document.read(tmp_path)
    (tmp_path / "report.json").write_text('{"schema": 1, "claims": []}')
    with pytest.raises(UsageError, match="schema 1, this program reads 2"):
        document.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "Expecting value"),
        ("[" * 200_000, "nested too deep"),
        ('{"p": NaN}', "NaN is no JSON number"),
        ('{"p": -Infinity}', "-Infinity is no JSON number"),
        ('{"p": 1e400}', "1e400 is not a finite number"),
        (f'{{"p": 1{"0" * 400}}}', "an integer of 401 digits"),
    ],
    ids=["truncated", "deep", "nan", "infinity", "huge", "huge integer"],
)
def test_what_is_no_json_is_a_usage_error(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UsageError, match=rf"report\.json: is not a readable report \({told}"):
        document.read(tmp_path)
    with pytest.raises(UsageError, match=rf"--baseline .*: not readable JSON \({told}"):
        baseline.load(tmp_path / "report.json")


# ------------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "lines", "series": {"a": [[0, 1], [1, 3]], "b": [[0, 2]]}, "x": "t", "y": "v"},
        {"kind": "distribution", "series": {"a": [3.0, 1.0, 2.0]}, "marks": {"reported": 2.5}},
        {"kind": "boxes", "series": {"a": [1.0, 2.0, 5.0], "b": [2.0]}},
        {"kind": "bars", "series": {"a": {"generate": 1.0, "exec": 2.0}, "b": {"other": 1.0}}},
        {"kind": "timeline", "rows": [[["exec", 0.0, 1.0]], [["trainer trains", 0.5, 2.0]]]},
    ],
    ids=lambda data: data["kind"],
)
def test_every_kind_of_figure_is_drawn_alike_twice(data: dict[str, object]) -> None:
    image = figures.svg("name", data)
    assert image == figures.svg("name", data)
    assert image.startswith(b"<?xml")


def test_named_figures_of_the_experiments_are_drawn() -> None:
    assert b"mean of 5" in figures.svg("learning_curve", CURVE)
    assert b"synchronous (n=2)" in figures.svg("step_time", {"sync": [2.0, 3.0], "async": [1.0, 1.5]})
    assert b"reported" in figures.svg("length_spread", {"tokens": [1.0, 2.0]})
    assert b"alone" in figures.svg("sandbox_start", {"alone": [10.0], "16 at once": [60.0]})
    assert b"step 7" in figures.svg("step_timeline", {"step": 7, "rows": [[["generate", 0, 1]]]})
    with pytest.raises(KeyError):
        figures.svg("unheard_of", [])


# ------------------------------------------------------------------------------------------ check and diff


def test_check_finds_a_row_that_no_longer_holds() -> None:
    chosen = claims.select(("pass1-rl", "disjoint"))
    assert [row.lost for row in compare.check(made(), chosen)] == [False, False]
    tampered = made(points=3.0)
    tampered["claims"][0]["status"] = "holds"  # type: ignore[index]
    (first, _) = compare.check(tampered, chosen)
    assert (first.recorded, first.now, first.lost) == ("holds", "differs", True)
    (against_newest, _) = compare.check(made(points=3.0), chosen, made())
    assert (against_newest.before, against_newest.lost) == ("holds", True)
    missing = compare.check(made(), claims.select(("separation",)))
    assert (missing[0].now, missing[0].lost) == ("missing", False)


def test_diff_knows_noise_from_change() -> None:
    word = {change.claim: change for change in compare.diff(made(), made())}
    assert word["pass1-rl"].word == "equal"
    assert not any(change.beyond_noise for change in word.values())
    near = compare.diff(made(), made(34.0))[0]
    assert (near.word, near.beyond_noise) == ("same within noise", False)
    far = compare.diff(made(), made(60.0))[0]
    assert far.word == "higher"
    assert far.p is not None
    assert far.p < 0.01
    assert far.beyond_noise
    assert compare.diff(made(60.0), made())[0].word == "lower"
    turned = compare.diff(made(), made(points=1.0))[0]
    assert (turned.word, turned.status_a, turned.status_b, turned.beyond_noise) == ("equal", "holds", "differs", True)
    lone = {change.claim: change.word for change in compare.diff(made(), {**made(), "claims": []})}
    assert lone["pass1-rl"] == "only in A"
    assert compare.differing_origins(made(), {**made(), "provenance": ORIGIN | {"profile": "full"}}) == ["profile"]


@pytest.mark.parametrize(
    ("value", "require", "word"),
    [
        (7.76, ["here.value <= 23"], "not tested"),  # a peak, without an interval
        (40.5, [], "not tested"),
        (145, [], "changed"),
        (0.0, ["here.value == 0"], "changed"),
    ],
)
def test_without_an_interval_only_counts_are_compared(value: float, require: list[str], word: str) -> None:
    def one(figure: float) -> dict[str, Any]:
        here = {"value": figure, "low": figure, "high": figure, "n": 5, "unit": "x"}
        return {"claims": [{"id": "a", "status": "holds", "here": here, "detail": {"require": require}}]}

    (same,) = compare.diff(one(value), one(value))
    (change,) = compare.diff(one(value), one(value * 1.001 + (1 if value == 0 else 0)))
    assert same.word == "equal"
    assert (change.word, change.p, change.beyond_noise) == (word, None, word == "changed")


def test_a_figure_that_is_not_finite_is_not_tested() -> None:
    def one(low: float | None) -> dict[str, Any]:
        here = {"value": 1.5 if low else None, "low": low, "high": 2.0, "n": 5, "unit": "x"}
        return {"claims": [{"id": "a", "status": "holds", "here": here, "detail": {}}]}

    assert compare.diff(one(1.0), one(None))[0].word == "not tested"


def test_each_row_names_the_code_and_the_machine_that_made_its_stages() -> None:
    stages = {
        "sft": {**STAGES["eval-rl"], "commit": "a" * 40, "dirty": False, "machine": "2 cores"},
        "rl": {**STAGES["eval-rl"], "commit": "b" * 40, "dirty": True, "machine": "2 cores"},
        "eval-rl": {**STAGES["eval-rl"], "commit": "a" * 40, "dirty": False, "machine": "2 cores"},
        "old": STAGES["eval-rl"],  # of before this was kept
    }
    claim = claims.select(("pass1-rl",))[0]
    row = Row(claim=claim, measurement=measured(), stages=tuple(stages))
    built = document.build([row], version="1", provenance=ORIGIN, stages=stages)
    made_by = built["claims"][0]["detail"]["made_by"]
    assert [(one["commit"][0], one["dirty"], one["stages"]) for one in made_by] == [
        ("a", False, ["sft", "eval-rl"]), ("b", True, ["rl"]), ("c", None, ["old"]),
    ]  # fmt: skip
    told = sections.what_was_run(built["claims"][0])
    assert "by aaaaaaaaaaaa (sft, eval-rl); bbbbbbbbbbbb with uncommitted changes (rl); cccccccccccc (" in told
    assert "(state not kept) (old)" in told
    table = sections.stages(built)
    assert [row[1:3] for row in table.rows][1] == ("bbbbbbbbbbbb with uncommitted changes", "2 cores")
    assert table.rows[3][2] == sections.NOTHING
    assert told in report.files(built)["report.html"].decode()


def test_small_tables_of_numbers_stand_on_one_line() -> None:
    rows = dict(sections.measured(made()["claims"][0]).rows)  # type: ignore[index, union-attr]
    assert rows["gain over sft"] == "points 18, low 13, tasks 100"
    assert rows["odd"] == sections.NOTHING
