"""What is kept of the stages beside a report, so that it can be made again from a clean clone.

Of each finished stage: its JSON and JSONL files and its derived logs (:mod:`harness.derived`). Not: raw shards,
weights, tokenizers, checkpoints, and what processes printed. So an experiment may read nothing else of a stage.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from farm.durable import storage_errors, temporary_name, write_json
from harness import derived
from harness.code_digest import short_digest
from harness.provenance import ROOT

_DONE = "done.json"
_KEPT_TYPES = frozenset({".json", ".jsonl"})
_NOT_KEPT = frozenset({"trajectories", "policies", "policy", "checkpoints", "demonstrations", "tokenizer.json"})


@contextmanager
def replaced(logs: Path) -> Iterator[Path]:
    """A copy of the folder ``logs`` (empty where there is none) to change, which takes its place when the body ends.
    When it does not end well, the copy is gone and ``logs`` is as it was.

    Raises FarmError when there is no space left."""
    beside, old = (logs.with_name("." + temporary_name(logs.name)) for _ in range(2))
    try:
        with storage_errors(f"{logs}: the logs can't be kept"):
            beside.mkdir(parents=True)
            if logs.exists():
                shutil.copytree(logs, beside, dirs_exist_ok=True)
            yield beside
            if logs.exists():
                logs.rename(old)
            beside.rename(logs)
    finally:
        if old.exists() and not logs.exists():
            old.rename(logs)
        for folder in (beside, old):
            shutil.rmtree(folder, ignore_errors=True)


def keep(stages: Iterable[Path], target: Path) -> None:
    """Put what a report needs of ``stages`` (finished stage folders) into ``target``, in place of what was there of
    them; what was kept of others stays."""
    for stage in stages:
        shutil.rmtree(target / stage.name, ignore_errors=True)
        for file in kept_files(stage):
            place = target / stage.name / file.relative_to(stage)
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix in _KEPT_TYPES:
                # Where the checkout lay says nothing, and is nobody's business.
                place.write_text(file.read_text(encoding="utf-8").replace(f"{ROOT}/", ""), encoding="utf-8")
            else:
                shutil.copyfile(file, place)
        done = target / stage.name / _DONE
        write_json(done, json.loads(done.read_text(encoding="utf-8")) | {"kept": digest(done.parent)})


def digest(kept: Path) -> str:
    """Of all files kept of a stage but its ``done.json``, which holds it: so that none is changed or exchanged
    unnoticed."""
    files = sorted(file for file in kept.rglob("*") if file.is_file() and file != kept / _DONE)
    found = [[str(f.relative_to(kept)), hashlib.sha256(f.read_bytes()).hexdigest()] for f in files]
    return short_digest(found)


def forget(target: Path, *, keep: Container[str]) -> None:
    """Remove the kept logs of all stages but those named."""
    for done in list(target.glob("*/done.json")):
        if done.parent.name not in keep:
            shutil.rmtree(done.parent)


def kept_files(stage: Path) -> Iterator[Path]:
    """The files of a finished stage that experiments may read, sorted."""
    for run in runs(stage):
        derived.trajectories(run)  # makes the derived log where it is not there yet
    for file in sorted(stage.rglob("*")):
        inside = file.relative_to(stage).parts
        is_derived = file.parent.name == derived.FOLDER
        if file.is_file() and (is_derived or (file.suffix in _KEPT_TYPES and _NOT_KEPT.isdisjoint(inside))):
            yield file


def runs(stage: Path) -> list[Path]:
    """The run folders in a stage, by name."""
    return sorted(marker.parent for marker in stage.rglob("run.json"))
