"""`harness gate`: check the input, run the looks, tell and keep what came out; and `--update-baseline`."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from farm.durable import FolderLock, write_json
from farm.errors import UsageError
from farm.policy_log import weights_digest
from farm.preflight import check_policy
from farm.tasks import load_tasks
from harness.gate import baseline as baselines
from harness.gate import trees
from harness.gate.baseline import Baseline, Run
from harness.gate.bench import LocalBench
from harness.gate.decide import EXIT_CODE, Answer, Finding
from harness.gate.design import DESIGN, PASS_AT_1, Design, Metric
from harness.gate.evidence import Missing, pass_reading, rate
from harness.gate.looks import BaseError, BenchError, Outcome, Side, look_until_decided
from harness.gate.trees import Tree
from harness.provenance import ROOT, machine

SCHEMA = 1
FOLDER = ROOT / "build" / "gate"
_WIDTH = 140  # of the table, also where the output is no terminal
# Seeds of the baseline's runs follow from how many there were; the candidate's are never among them.
_CANDIDATE_SEED = 10_000


def gate(path: Path, *, base: str | None, policy: Path | None, budget_minutes: float) -> int:
    """Compare this tree with the baseline at ``path`` and the code of commit ``base``. Returns the exit code."""
    console, design = Console(stderr=True), DESIGN
    baseline = baselines.load(path)
    baselines.check(baseline, path, margin=PASS_AT_1.margin)
    chosen = check_policy(policy or ROOT / baseline.policy).absolute()
    _check_tasks(baseline, path)
    commit = trees.resolve(ROOT, base or baseline.commit)
    signal.signal(signal.SIGTERM, _end)
    with _fresh(FOLDER) as folder, trees.worktree(ROOT, commit, folder / "base-tree") as base_tree:
        sides = {Side.BASE: base_tree, Side.CANDIDATE: Tree(name="this tree", path=ROOT)}
        for tree in sides.values():
            tree.check()
        bench = LocalBench(
            folder, sides, policy=chosen, tasks=baseline.tasks, limit=baseline.limit, steps=design.steps,
            seed=_CANDIDATE_SEED, say=lambda text: console.print(text, highlight=False),
        )  # fmt: skip
        try:
            outcome = look_until_decided(
                bench,
                design=design,
                base=baseline.counts,
                weights=baseline.weights,
                budget_s=60 * budget_minutes,
                clock=time.monotonic,
                say=lambda text: console.print(text, highlight=False),
            )
        except BaseError as error:
            raise UsageError(
                f"base {commit[:12]}: {error}; nothing can be compared with it, choose another --base"
            ) from None
    record = _record(outcome, design) | {
        "base": commit,
        "candidate": trees.head(ROOT),
        "dirty": not trees.is_clean(ROOT),
        "policy_digest": weights_digest(chosen),
        "machine": machine(),
    }
    write_json(folder / "gate.json", record)
    Console(width=_WIDTH).print(_table(outcome, design))
    answer = outcome.verdict.answer
    print(f"{answer.value}: {_told(outcome)}; details in {folder / 'gate.json'}")
    return EXIT_CODE[answer]


def update(path: Path, *, policy: Path | None, limit: int | None) -> int:
    """Measure one trusted run and put it into the baseline at ``path``. Raises UsageError when it can't be trusted."""
    console, design = Console(stderr=True), DESIGN
    known = baselines.load(path) if path.exists() else None
    chosen = check_policy(policy or (ROOT / known.policy if known else Tree(name="", path=ROOT).policy)).absolute()
    if not chosen.is_relative_to(ROOT):
        raise UsageError(f"--policy {policy}: must lie in {ROOT}, so that whoever checks it out can gate against it")
    if not trees.is_clean(ROOT):
        raise UsageError(f"{ROOT}: has uncommitted changes; commit them, a baseline is of a commit")
    if known and limit is None:
        limit = known.limit
    spec = known.tasks if known else "micro:benchmark"
    tasks = load_tasks(spec, limit=limit)
    seed = max((run.seed for run in known.runs), default=-1) + 1 if known else 0
    this = Tree(name="this tree", path=ROOT)
    this.check()
    signal.signal(signal.SIGTERM, _end)
    attempts = design.attempts[-1]
    with _fresh(FOLDER) as folder:
        bench = LocalBench(
            folder, {Side.CANDIDATE: this}, policy=chosen, tasks=spec, limit=limit, steps=design.steps, seed=seed,
            say=lambda text: console.print(text, highlight=False),
        )  # fmt: skip
        console.print(f"{attempts} attempts at each of {len(tasks)} tasks")
        try:
            counts = bench.rollouts(attempts, 0)
        except BenchError as error:
            raise UsageError(f"--update-baseline: nothing was measured: {error}") from None
    weights = {task.instance_id: task.weight for task in tasks}
    fresh = Baseline(
        commit=trees.head(ROOT),
        machine=baselines.machine_kind(),
        processor=str(machine()["processor"]),
        tasks=spec,
        dataset=tasks[0].dataset,
        limit=limit,
        policy=chosen.relative_to(ROOT).as_posix(),
        policy_digest=weights_digest(chosen),
        weights=weights,
        runs=(Run(commit=trees.head(ROOT), seed=seed, counts=counts),),
    )
    _check_trusted(known, fresh, path)
    updated = baselines.with_run(known, fresh)
    baselines.save(path, updated)
    score = rate(updated.counts, weights)
    print(f"{path}: pass@1 {100 * score:.2f} % over {updated.attempts:g} attempts at {len(weights)} tasks; commit it")
    return 0


def _end(number: int, _frame: object) -> NoReturn:
    """A cancelled CI job: leave through every ``finally``, so that no farm and no checkout stays behind."""
    sys.exit(128 + number)


def _check_trusted(known: Baseline | None, fresh: Baseline, path: Path) -> None:
    """A run that failed, or lost to the baseline it would replace, does not become one by itself."""
    trial = pass_reading(fresh.counts, fresh.counts, fresh.weights, max_failures=DESIGN.max_failures)
    if isinstance(trial, Missing):
        raise UsageError(f"--update-baseline: the run can't be trusted: {trial.reason}; repair that and repeat")
    if known is None or not baselines.same_subject(known, fresh):
        return
    reading = pass_reading(known.counts, fresh.counts, fresh.weights, max_failures=DESIGN.max_failures)
    if isinstance(reading, Missing) or reading.harm > PASS_AT_1.margin:
        told = reading.reason if isinstance(reading, Missing) else f"{100 * reading.harm:.1f} points worse"
        raise UsageError(f"--update-baseline: {told} than the baseline; if that is meant, remove {path} and repeat")


def _check_tasks(baseline: Baseline, path: Path) -> None:
    """The tasks and weights are part of what is compared."""
    tasks = load_tasks(baseline.tasks, limit=baseline.limit)
    here = {task.instance_id: task.weight for task in tasks}
    same = here.keys() == baseline.weights.keys() and all(
        math.isclose(weight, baseline.weights[task], rel_tol=1e-9) for task, weight in here.items()
    )
    if not same or tasks[0].dataset != baseline.dataset:
        raise UsageError(
            f"--baseline {path}: made on {baseline.dataset}, here {baseline.tasks} is {tasks[0].dataset}; scores on "
            f"other tasks don't compare; remove it and make one with: harness gate --baseline {path} --update-baseline"
        )


@contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    """``folder``, emptied, for this gate alone. Raises UsageError while another runs in this checkout."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder.with_suffix(".lock"), "gate")
    lock.acquire()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    finally:
        lock.release()


def _record(outcome: Outcome, design: Design) -> dict[str, Any]:
    """The whole outcome as JSON: what a later reader needs to check the answer."""
    findings = {name: _plain(finding) for name, finding in outcome.verdict.findings.items()}
    return {
        "schema": SCHEMA,
        "answer": outcome.verdict.answer.value,
        "stopped": outcome.stopped,
        "looks": {source.value: looks for source, looks in outcome.looks.items()},
        "design": {
            "alpha": design.alpha,
            "attempts": design.attempts,
            "cycles": design.cycles,
            "steps": design.steps,
            "margins": {metric.name: metric.margin for metric in design.metrics},
        },
        "findings": findings,
        "counts": {
            "failures": outcome.counts.failures,
            "passed_of_graded": {t: f"{outcome.counts.passed.get(t, 0)}/{n}" for t, n in outcome.counts.graded.items()},
        },
        "pairs": [{"base": dict(base), "candidate": dict(new)} for base, new in outcome.pairs],
    }


def _plain(finding: Finding) -> dict[str, Any]:
    """``harm`` is on the tested scale: a difference of shares, or the logarithm of a ratio."""
    reading = finding.reading
    numbers: Mapping[str, float] = {} if reading is None else {
        "base": reading.base,
        "new": reading.new,
        "harm": reading.harm,
        "error": reading.error,
        "df": reading.df,
        "low": finding.low,
        "high": finding.high,
    }  # fmt: skip
    # JSON has no infinity: a bound that is not finite is none.
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {"answer": finding.answer.value, "look": finding.look, "reason": finding.reason, **finite}


def _table(outcome: Outcome, design: Design) -> Table:
    table = Table("metric", "base", "here", "worse by", "bounds", "margin", "look", "answer", box=None)
    colours = {Answer.PASS: "green", Answer.REGRESSION: "red", Answer.INCONCLUSIVE: "yellow"}
    for metric in design.metrics:
        finding = outcome.verdict.findings[metric.name]
        answer = f"[{colours[finding.answer]}]{finding.answer.value}[/]"
        if finding.reading is None:
            table.add_row(metric.name, "–", "–", finding.reason, "", "", str(finding.look), answer)
            continue
        reading = finding.reading
        table.add_row(
            metric.name,
            f"{reading.base:.4g} {metric.unit}",
            f"{reading.new:.4g} {metric.unit}",
            _worse(metric, reading.harm),
            f"{_worse(metric, finding.low)} to {_worse(metric, finding.high)}",
            _worse(metric, metric.harm_margin),
            str(finding.look),
            answer,
        )
    return table


def _worse(metric: Metric, harm: float) -> str:
    """Harm as people say it: points of pass@1, or percent of a ratio."""
    if metric.is_ratio:
        return f"{100 * (math.exp(harm) - 1):+.1f} %"
    return f"{100 * harm:+.1f} points"


def _told(outcome: Outcome) -> str:
    by_answer = {a: [n for n, f in outcome.verdict.findings.items() if f.answer is a] for a in Answer}
    if by_answer[Answer.REGRESSION]:
        return ", ".join(by_answer[Answer.REGRESSION])
    if by_answer[Answer.INCONCLUSIVE]:
        return f"{', '.join(by_answer[Answer.INCONCLUSIVE])} can't be told yet: {outcome.stopped}"
    return f"all {len(by_answer[Answer.PASS])} metrics within their margins"
