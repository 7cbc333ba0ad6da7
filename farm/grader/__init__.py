"""Graders: a patch in, evidence out."""

from __future__ import annotations

from importlib import import_module

from farm.errors import UsageError
from farm.protocols import Grader, SandboxSpec
from farm.types import Limits, Task

GRADERS = {
    "tests": "farm.grader.tests:TestGrader",
    "swebench": "farm.grader.swebench:SwebenchGrader",  # needs the extra of the same name
    "harbor": "farm.grader.harbor:HarborGrader",
}

MAX_LOG_BYTES = 4 << 20


def make_grader(name: str) -> Grader:
    """The grader called ``name``. Raises UsageError on an unknown one, or when the package it needs is missing."""
    if name not in GRADERS:
        raise UsageError(f"grader {name!r} is unknown: choose one of {', '.join(sorted(GRADERS))}")
    module, _, cls = GRADERS[name].partition(":")
    grader: Grader = getattr(import_module(module), cls)()
    return grader


def grading_spec(task: Task, *, limits: Limits, owner: str, deadline_at_s: float) -> SandboxSpec:
    """The sandbox to grade ``task`` in: like the agent's, with room for a whole test log."""
    return SandboxSpec(
        owner=owner,
        deadline_at_s=deadline_at_s,
        image=task.image,
        memory_bytes=limits.memory_bytes,
        disk_bytes=limits.disk_bytes,
        pids=limits.pids,
        output_bytes=max(limits.output_bytes, MAX_LOG_BYTES),
        workdir=task.workdir,
        machine=task.machine,
    )
