"""What the result of a stage depends on; a finished stage is kept as long as its key stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from harness.code_digest import ROOT, captured, plain, reached, short_digest, tree_digest
from harness.profiles import Profile
from harness.provenance import PACKAGES, machine

Key = Mapping[str, str]

_DATASETS = ROOT / "datasets"
_NOT_READ = ("qualification.jsonl", "README.md")  # records about the tasks, which no run reads
_DEFAULT_SUITE = "micro"  # what the commands use when no task source is named


def stage_key(work: Callable[[Path], None], profile: Profile) -> dict[str, str]:
    """Digests of the code that ``work`` reaches, the settings it was made with, the data and the back ends it uses, and
    of the machine: what was measured on another one is no figure of this one.

    Raises TypeError for a captured value that has no digest."""
    found = reached(work)
    values = {name: value for name, value in captured(work).items() if not hasattr(value, "stage")}  # not the lab
    used = {f.name: plain(getattr(profile, f.name)) for f in fields(profile) if f.name in found.names}
    paths = {name: plain(path) for name, path in found.paths.items() if not ROOT.is_relative_to(path)}
    return {
        "code": found.digest(),
        "settings": short_digest([plain(values), used, paths]),
        "data": short_digest(_data(found.names, runs_a_command=found.runs_a_command)),
        "back_ends": short_digest(plain(profile.back_ends)),
        "versions": short_digest({name: metadata.version(name) for name in PACKAGES}),
        "machine": short_digest({name: value for name, value in machine().items() if name != "system"}),
    }


def changed(old: Key | None, new: Key) -> list[str]:
    """Which parts differ; all of them when there is no old key."""
    return [part for part in new if old is None or old.get(part) != new[part]]


def _data(names: Iterable[str], *, runs_a_command: bool) -> dict[str, str | None]:
    suites = {name.partition(":")[0] for name in names} & {f.name for f in _DATASETS.iterdir() if f.is_dir()}
    if runs_a_command:
        suites.add(_DEFAULT_SUITE)
    return {
        f"{suite}/{file.name}": tree_digest(file)
        for suite in sorted(suites)
        for file in sorted((_DATASETS / suite).iterdir())
        if file.is_file() and file.name not in _NOT_READ
    }
