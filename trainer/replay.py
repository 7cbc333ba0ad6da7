"""``trainer replay``: train again from a run's log and compare, step by step, with what the run did.

A replay starts from the policy at step 0 and reads the log from its first row, without a stop: so it also shows that
the kills, restarts and waits which the live trainer went through left no trace. Two digests decide each step: that of
the batch (which episodes, with which advantages), from the run's metrics, and that of the weights, from its policy log,
which goes on to know it when the policy was pruned. Nothing in the run is changed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farm.errors import UsageError
from farm.policy_log import PolicyLog, weights_digest
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, PolicyVersion
from trainer.config import TrainerConfig, batch_rules
from trainer.megatron.ranks import Line
from trainer.metrics import read_metrics
from trainer.steps import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """Policy ``step`` as replayed, beside what the run recorded (None: it did not)."""

    step: int
    batch: str
    weights: str
    recorded_batch: str | None
    recorded_weights: str | None

    @property
    def same_batch(self) -> bool | None:
        """None when there is nothing to compare with."""
        return None if self.recorded_batch is None else self.batch == self.recorded_batch

    @property
    def same_weights(self) -> bool | None:
        """None when there is nothing to compare with."""
        return None if self.recorded_weights is None else self.weights == self.recorded_weights

    @property
    def same(self) -> bool:
        """Nothing differs, and the weights could be compared."""
        return self.same_weights is True and self.same_batch is not False


def replay(
    run: RunFolder,
    *,
    steps: int | None = None,
    report: Callable[[ReplayedStep], None] = lambda _: None,
    line: Line | None = None,
) -> list[ReplayedStep]:
    """Every step that the run has taken, or the first ``steps`` of them, trained again, on the layout that the run
    began with (``line`` leads to the other ranks).

    Raises ``UsageError`` when the run was not trained, or when what its first step needs is gone."""
    config = recorded_config(run)
    policies = PolicyLog(run.policies, create=False)
    recorded = {int(line["step"]): line for line in read_metrics(run.metrics)}
    last = max(recorded, default=0)
    if not last:
        raise UsageError(f"{run.metrics}: holds no training step; give the run of a trainer that took one")
    last = last if steps is None else min(last, steps)
    first = _first_policy(policies)
    published = {version.step: version.digest for version in policies.history()}
    rules = batch_rules(run.config(), where=str(run.path / "config.json"))
    trained = Steps(Path(first.path), config, rules, line=line)
    found: list[ReplayedStep] = []
    at = Cursor()
    for after, trajectory in DirectoryLog(run.trajectories, create=False).read(at):
        batch = trained.push(at, trajectory)
        at = after
        if batch is None:
            continue
        taken = trained.train(batch)
        found.append(
            ReplayedStep(
                step=taken["step"],
                batch=taken["batch_digest"],
                weights=_weights(trained, Path(first.path)),
                recorded_batch=recorded.get(taken["step"], {}).get("batch_digest"),
                recorded_weights=published.get(taken["step"]),
            )
        )
        report(found[-1])
        if taken["step"] == last:
            trained.learner.close()
            return found
    raise UsageError(
        f"{run.trajectories}: ends at step {len(found)} of {last}; give a run whose trajectories are all there"
    )


def recorded_config(run: RunFolder) -> TrainerConfig:
    """The configuration that the run was trained with. Raises ``UsageError``."""
    place = run.trainer / "config.json"
    try:
        return TrainerConfig.model_validate(json.loads(place.read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: unreadable ({error}); give the run folder that the trainer worked on") from None


def _first_policy(policies: PolicyLog) -> PolicyVersion:
    first = policies.get(0)
    if first is None:
        raise UsageError(f"{policies.path}: policy step 0 is gone, and a replay starts from it; put it back")
    if not policies.verify(first):
        raise UsageError(f"{first.path}: the weights are not those that were published; a replay can't start from them")
    return first


def _weights(trained: Steps, source: Path) -> str:
    """The digest that these weights have when they are published."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained.learner.write(folder, source=source)
        return weights_digest(folder)
