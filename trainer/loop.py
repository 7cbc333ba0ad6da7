"""``trainer train``: follow the trajectory log, one Megatron step per batch, one published policy per step.

Why a kill at any moment changes nothing. The weights after step *n* are a function of the policy at step 0, the
configuration and the log's order. For each step, in this order:

1. train in memory           — killed here: the last checkpoint is resumed and the step done again, to the same bytes;
2. checkpoint (by rename)    — killed after it: the resumed trainer publishes what the checkpoint holds, then goes on;
3. publish (by rename)       — killed after it: the resumed trainer publishes the same bytes again, which is a no-op;
4. push, where the run says so: send the weights to the farm's engines; what does not get there they load from disk;
5. append the metrics line   — the checkpoint holds the line as well and puts it back.

The checkpoint comes first, so the farm never sees a policy that the trainer could not continue from. With
``checkpoint_every`` above 1 a resumed trainer repeats steps that are published already: the log's order makes them
come out equal, and should they not (another machine, another torch), the policy log refuses them with an error.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farm.durable import REAL_DISK, Disk, FolderLock, write_json
from farm.errors import UsageError
from farm.farm_state import read_status
from farm.policy_log import PolicyLog
from farm.run_folder import RunFolder
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, PolicyVersion
from trainer.config import ONE_RANK, TrainerConfig, batch_rules, push_time
from trainer.group import Batch
from trainer.guard import within
from trainer.megatron.push import PushRules, push
from trainer.megatron.push_group import PushError
from trainer.megatron.ranks import Line
from trainer.metrics import MetricsFile
from trainer.start import first_policy
from trainer.steps import Steps
from trainer.tail import follow

_FREE_TO_CHANGE = {"checkpoint_every", "keep_checkpoints", "keep_policies", "save_timeout_s", "parallel", "push"}


class Trainer:
    """One run being trained. Makes or resumes everything on construction; :meth:`run` trains until told to stop."""

    def __init__(
        self,
        run: RunFolder,
        config: TrainerConfig,
        *,
        policy: Path | None = None,
        wait_s: float = 60.0,
        stop: threading.Event | None = None,
        disk: Disk = REAL_DISK,
        line: Line | None = None,
    ) -> None:
        """``policy`` is published as step 0 when the policy log is empty; without it the farm's step 0 is waited for,
        ``wait_s`` seconds. Once ``stop`` is set the step at hand is finished and no other begins. ``line`` leads to the
        other ranks, where there are any.

        Raises ``UsageError``: no policy, a malformed model, another configuration than the run was trained with, or
        another trainer at work on the run."""
        self._run = run
        self._config = config
        self._stop = stop or threading.Event()
        self._disk = disk
        self._line = line
        self._failed = False
        where = str(run.path / "config.json")
        self._rules = batch_rules(run.config(), where=where)
        self._push_s = push_time(run.config())
        if self._push_s is not None and line is not None and self._push_s >= config.parallel.timeout_s:
            raise UsageError(
                f"{where}: a push of weights may take {self._push_s:g} s (0.8 of engine.push_wait_s), and a rank waits "
                f"for {config.parallel.timeout_s:g} s only; set parallel.timeout_s to more"
            )
        run.trainer.mkdir(exist_ok=True)
        self._lock = FolderLock(run.trainer / "trainer.lock", "trainer")
        self._lock.acquire()
        try:
            _pin_config(run.trainer / "config.json", config)
            self._policies = PolicyLog(run.policies, disk=disk)
            self._log = DirectoryLog(run.trajectories)
            self._metrics = MetricsFile(run.metrics)
            self._start(first_policy(self._policies, policy, wait_s=wait_s, stop=self._stop))
        except BaseException:
            self._lock.release()
            raise

    def _start(self, first: PolicyVersion) -> None:
        self._source = Path(first.path)
        self._steps = Steps(self._source, self._config, self._rules, line=self._line)
        saved = self._steps.resume(self._run.checkpoints, self._log)
        if saved is None:
            self.step = self._saved_step = 0
            self._cursor = Cursor()
            self._metrics.resume(0, None)
            return
        self.step, loop = saved
        self._saved_step = self.step
        self._cursor = Cursor(shard=loop["cursor"][0], row=loop["cursor"][1])
        self._publish(self._steps.consumed_groups)
        self._metrics.resume(self.step, loop["metrics"])

    def close(self) -> None:
        try:
            if not self._failed:  # after a failure other ranks may not hear it; whoever started them ends them
                self._steps.learner.close()
        finally:
            self._lock.release()
            self._log.close()

    def run(
        self,
        *,
        steps: int | None = None,
        report: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> int:
        """Train until policy ``steps`` is published or it is told to stop; returns the step reached. ``report`` gets
        each metrics line."""
        try:
            return self._run_until(steps, report)
        except BaseException:
            self._failed = True
            raise

    def _run_until(self, steps: int | None, report: Callable[[Mapping[str, Any]], None]) -> int:
        if steps is not None and self.step >= steps:
            return self.step
        line: Mapping[str, Any] | None = None
        waiting_since = time.monotonic()
        for at, after, trajectory in follow(self._log, self._cursor, self._stop):
            self._cursor = after
            batch = self._steps.push(at, trajectory)
            if batch is None:
                continue
            line = self._do_step(batch, wait_s=time.monotonic() - waiting_since)
            report(line)
            if steps is not None and self.step >= steps:
                break
            waiting_since = time.monotonic()
        if self._saved_step < self.step and line is not None:
            # The cursor is past rows of the next batch, which the batcher remembers.
            self._save(line)
        return self.step

    # ------------------------------------------------------------------------------------------ a step

    def _do_step(self, batch: Batch, *, wait_s: float) -> Mapping[str, Any]:
        started = time.monotonic()
        line: dict[str, Any] = self._steps.train(batch)
        self.step = batch.step + 1
        line |= {
            "ended_at_s": time.time(),
            "wait_s": wait_s,
            "train_s": time.monotonic() - started,
            "checkpoint_s": 0.0,
            "publish_s": 0.0,
        }
        started = time.monotonic()
        if self.step % self._config.checkpoint_every == 0:
            self._save(line)
        line["checkpoint_s"] = time.monotonic() - started
        started = time.monotonic()
        version = self._publish(batch.consumed_groups)
        line |= {"publish_s": time.monotonic() - started, "ended_at_s": time.time()}
        if self._push_s is not None:
            line |= self._push(version, self._push_s)
        self._metrics.append(line)
        return line

    def _save(self, line: Mapping[str, Any]) -> None:
        loop = {
            "cursor": [self._cursor.shard, self._cursor.row],
            "batcher": self._steps.batcher_state(),
            "metrics": dict(line),
        }
        within(
            self._config.save_timeout_s,
            f"the checkpoint of step {self.step}",
            lambda: self._steps.learner.save(
                self._run.checkpoints,
                self.step,
                loop=loop,
                keep=self._config.keep_checkpoints,
                disk=self._disk,
            ),
        )
        self._saved_step = self.step

    def _publish(self, consumed_groups: int) -> PolicyVersion:
        def publish() -> PolicyVersion:
            version = self._policies.publish(
                self.step,
                lambda folder: self._steps.learner.write(folder, source=self._source),
                consumed_groups=consumed_groups,
            )
            self._policies.prune(keep=self._config.keep_policies)
            return version

        return within(self._config.save_timeout_s, f"publishing policy {self.step}", publish)

    def _push(self, version: PolicyVersion, timeout_s: float) -> dict[str, Any]:
        """Send what was just published to the farm's engines; how it went, for the metrics. Nothing depends on it."""
        config = self._config.push
        rules = PushRules(address=config.address, backend=config.backend, timeout_s=timeout_s)
        started = time.monotonic()
        buckets = self._steps.learner.outgoing(max_bytes=config.bucket_bytes)
        try:
            with contextlib.closing(buckets):
                pushed = push(_engines(self._run), buckets, version=version.pushed_name, rules=rules)
        except (PushError, UsageError) as error:
            return {"push_s": None, "push_paused_s": None, "push_error": str(error)[:500]}
        left_out = "; ".join(pushed.left_out.values())
        seconds = time.monotonic() - started
        return {"push_s": seconds, "push_paused_s": pushed.paused_s, "push_error": left_out[:500] or None}


def _engines(run: RunFolder) -> list[str]:
    """Those of the run's farm that are to serve the newest policy, as it last said. Raises ``UsageError``."""
    status = read_status(run)
    return [] if status is None else [str(e["url"]) for e in status["engines"] if e["state"] in ("up", "updating")]


def _pin_config(place: Path, config: TrainerConfig) -> None:
    """A run is trained with one configuration; resuming with another would contradict its own past. How often and how
    patiently to save may change: it does not touch the weights. So may the layout on ranks: any layout loads the same
    weights, and goes on from them with its own rounding."""
    wanted = json.loads(config.model_dump_json(exclude=_FREE_TO_CHANGE))
    if config.parallel != ONE_RANK:
        wanted["parallel"] = config.parallel.model_dump()
    if not place.exists():
        write_json(place, wanted)
        return
    try:
        found = json.loads(place.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: unreadable ({error}); remove the folder {place.parent} to train anew") from None
    keys = (wanted | found).keys() - _FREE_TO_CHANGE
    differing = [f"{k}: {found.get(k)!r} -> {wanted.get(k)!r}" for k in keys if found.get(k) != wanted.get(k)]
    was = found.get("parallel", {}).get("precision", "float32")
    if was != config.parallel.precision:
        differing.append(f"parallel.precision: {was!r} -> {config.parallel.precision!r}")
    if differing:
        raise UsageError(
            f"{place}: the run was trained with another configuration ({'; '.join(differing[:5])}); "
            "use that one, or a new run folder"
        )
