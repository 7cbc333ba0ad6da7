"""One module per experiment: a function takes the :class:`harness.lab.Lab` and gives back a ``Measurement``.

Adding a figure is one function here and one row in ``harness/claims.toml``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from harness.claims import Claim, Measurement
from harness.lab import Lab

Experiment = Callable[[Lab], Measurement]

# The stages each experiment needs, in the order they run; feeds the "time left" line.
STAGES = {
    "pass_rates.base": ("eval-base",),
    "pass_rates.sft": ("eval-base", "sft", "eval-sft"),
    "pass_rates.rl": ("sft", "eval-sft", "rl", "eval-rl"),
    "async_step.ratio": ("sft", "compare-sync", "compare-async"),
    "length_spread.ratio": ("sft", "rl"),
    "separation.latency": ("sft", "rl"),
    "infra_errors.rate": ("infra",),
    "sandbox_start.median": ("sandbox",),
    "disjoint.overlaps": ("disjoint",),
}


def load(claim: Claim) -> Experiment | None:
    """The experiment of a claim, or None when there is none yet."""
    if claim.experiment is None:
        return None
    module, _, name = claim.experiment.partition(".")
    experiment: Experiment = getattr(import_module(f"harness.experiments.{module}"), name)
    return experiment
