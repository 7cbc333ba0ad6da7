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
    "cap.step_time": ("cap-without", "cap-with"),
    "cap.harmless": ("sft", "rl", "eval-rl-uncapped", "eval-rl-capped", "eval-rl"),
    "async_step.ratio": ("step-sync", "step-async"),
    "throughput.ratio": ("throughput-slow", "throughput-fast"),
    "sandbox_start.median": ("sandbox",),
    "kv.headroom": ("sft", "rl", "eval-rl"),
    "kv.thrash": ("kv-thrash",),
    "length_spread.ratio": ("sft", "rl"),
    "restart.survived": ("sft", "restart"),
    "infra_errors.rate": ("infra", "eval-base", "sft", "restart"),
    "separation.latency": ("sft", "rl"),
    "disjoint.overlaps": ("disjoint",),
    "twin_check.within": ("sft", "rl", "eval-base", "twin-check"),
}


def load(claim: Claim) -> Experiment | None:
    """The experiment of a claim, or None when there is none yet."""
    if claim.experiment is None:
        return None
    module, _, name = claim.experiment.partition(".")
    experiment: Experiment = getattr(import_module(f"harness.experiments.{module}"), name)
    return experiment
