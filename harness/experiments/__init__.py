"""One module per experiment: a function takes the :class:`harness.lab.Lab` and gives back a ``Measurement``.

Adding a figure is one function here and one row in ``harness/claims.toml``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from harness.claims import Claim, Measurement
from harness.lab import Lab
from harness.profiles import Profile

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
    "real_packages.rates": ("made-sample", "made-gold", "made-empty"),
    "disjoint.overlaps": ("disjoint",),
    "twin_check.within": ("sft", "rl", "eval-base", "twin-check"),
}


def stages(claim: Claim, profile: Profile) -> tuple[str, ...]:
    """Those that the claim's experiment needs in ``profile``."""
    name = claim.experiment or ""
    return () if name in profile.left_out else STAGES.get(name, ())


def load(claim: Claim, profile: Profile) -> Experiment | None:
    """The experiment of a claim, or None when there is none yet. One that the profile leaves out only says why."""
    if claim.experiment is None:
        return None
    if claim.experiment in profile.left_out:
        return partial(_left_out, profile.left_out[claim.experiment])
    module, _, name = claim.experiment.partition(".")
    experiment: Experiment = getattr(import_module(f"harness.experiments.{module}"), name)
    return experiment


def _left_out(why: str, lab: Lab) -> Measurement:
    del lab
    return Measurement(estimate=None, unit="", holds=None, detail={"not_compared": why})
