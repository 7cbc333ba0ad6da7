"""Pure statistics for pass rates, durations and their differences.

A benchmark score rests on tasks (clusters) with several attempts each; attempts at one task are correlated, so every
interval resamples tasks, not attempts (a binomial interval over attempts covers only 72-85 % where 95 % is asked for).
All functions take arrays indexed by task, are deterministic, and raise ``ValueError`` where a value is missing or not
finite: a missing measurement must not become a number.

``core`` records and checks; ``bootstrap`` means and medians; ``rates`` pass@k, pass^k and the score with both standard
errors; ``beta_binomial`` low rates; ``paired`` differences; ``strata`` subsets; ``power`` what can be detected;
``multiple`` Holm; ``series`` means of batches of measurements that hang together.
"""

from harness.stats.beta_binomial import BetaBinomial, fit, mean_interval
from harness.stats.bootstrap import mean_ratio, median, weighted_mean
from harness.stats.core import Estimate, Floats
from harness.stats.multiple import holm
from harness.stats.paired import paired_difference, sign_flip
from harness.stats.power import design_errors, minimal_detectable_effect
from harness.stats.rates import PassRate, pass_at_k, pass_hat_k, pass_rate, wilson
from harness.stats.series import FEWEST_IN_A_SERIES, batches_told, mean, series_ratio
from harness.stats.strata import StratifiedEstimate, stratified

__all__ = [
    "FEWEST_IN_A_SERIES",
    "BetaBinomial",
    "Estimate",
    "Floats",
    "PassRate",
    "StratifiedEstimate",
    "batches_told",
    "design_errors",
    "fit",
    "holm",
    "mean",
    "mean_interval",
    "mean_ratio",
    "median",
    "minimal_detectable_effect",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
    "pass_rate",
    "series_ratio",
    "sign_flip",
    "stratified",
    "weighted_mean",
    "wilson",
]
