"""Workers as jobs of Slurm: one job per worker, asked for with sbatch, watched with squeue, taken back with scancel.

dask-jobqueue does the same and is not used: it cancels a job that Slurm has requeued after 15 seconds, replaces no job
that was cancelled, and closes workers by its own choice, while here who starts, drains and ends is decided in one place
for every kind of cluster (:mod:`farm.cluster.roster`), and what is left of Slurm is four commands.

A preempted job keeps its name: it is drained while its grace time runs, ends its episodes on SIGTERM, waits in the
queue again, and joins again when it is restarted. A job whose farm is dead ends by itself within seconds (its scheduler
is gone), one that starts later ends as soon as it sees that; what is still queued is cancelled by the next farm on the
run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping

from farm.cluster.commands import Answer, last_line, run_command, tail
from farm.cluster.launcher import REFUSED, Launch, Phase, WorkerState, worker_command
from farm.cluster.slurm_jobs import QUEUE_FORMAT, Job, parse_queue, parse_site, parse_submitted, script, submission
from farm.errors import FarmError, UsageError

_COMMAND_S = 30.0
_LOOK_S = 2.0  # the controller serves the whole cluster: squeue is asked no more often
_END_S = 60.0
_MARGIN_S = 5.0  # between the end of leave_s and SIGKILL: sandboxes are closed, results are fetched

_log = logging.getLogger(__name__)


class SlurmLauncher:
    """Implements :class:`farm.cluster.launcher.WorkerLauncher`. ``clock`` is for how old the last look is."""

    def __init__(self, launch: Launch, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._launch = launch
        self._config = launch.config.slurm
        self._clock = clock
        self._ticket = launch.folder / "ticket.json"
        self._before: frozenset[int] = frozenset()  # jobs of a farm that was here before
        self._jobs: dict[str, Job] = {}
        self._withdrawn: set[str] = set()
        self._forgotten: set[int] = set()
        self._looked_at_s: float | None = None

    async def prepare(self) -> None:
        missing = [name for name in ("sbatch", "squeue", "scancel", "scontrol") if shutil.which(name) is None]
        if missing:
            raise UsageError(
                f"cluster.kind 'slurm': {missing[0]} is not on PATH; run the farm on a host with Slurm's commands "
                "(a login node), or choose another kind"
            )
        said = await run_command("scontrol", "show", "config", timeout_s=_COMMAND_S)
        if said.code:
            raise UsageError(
                f"cluster.kind 'slurm': Slurm's controller does not answer ({last_line(said.error)}); is SLURM_CONF "
                "right, and does `scontrol ping` say UP?"
            )
        self._check_site(said.out)
        left = [job for job in await self._queue() if self._worker_of(job) is not None]
        self._before = frozenset(job.id for job in left)
        await self._cancel(*(job.id for job in left if job.phase is not Phase.ENDED))
        self._ticket.touch(mode=0o600)
        self._ticket.write_text(self._launch.ticket.to_json())
        self._launch.logs.mkdir(parents=True, exist_ok=True)
        tried = await self._submit("check", "--test-only")
        if tried.code:
            raise UsageError(
                f"cluster.slurm: sbatch refuses a worker's job: {last_line(tried.error)}; correct partition, account, "
                "qos, time, cpus, memory or options"
            )

    def _check_site(self, text: str) -> None:
        site, leave_s = parse_site(text), self._launch.config.leave_s
        longest_s = max(site.kill_wait_s - _MARGIN_S, 0.0)
        if leave_s > longest_s:
            raise UsageError(
                f"cluster.leave_s {leave_s:g}: this Slurm kills {site.kill_wait_s:g} s after SIGTERM (KillWait), and a "
                f"worker needs {_MARGIN_S:g} s of that; set it to at most {longest_s:g}"
            )
        if leave_s and site.signals_all:
            raise UsageError(
                f"cluster.leave_s {leave_s:g}: this Slurm sends SIGTERM to sandboxes too (ProctrackType "
                "proctrack/linuxproc), so an episode that went on could get a wrong reward; set it to 0"
            )

    async def start(self, name: str) -> None:
        self._looked_at_s = None
        answer = await self._submit(name, "--parsable")
        number = parse_submitted(answer.out)
        if answer.code or number is None:
            raise FarmError(f"sbatch refused {name}: {last_line(answer.error)}", kind="no_job")
        self._jobs[name] = Job(id=number, state="PENDING", name=self._job_name(name), preempted=False, reason="None")
        _log.info("%s is job %d", name, number)
        with (self._launch.logs / "slurm-jobs.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"at_s": time.time(), "worker": name, "job": number}) + "\n")

    async def look(self) -> Mapping[str, WorkerState]:
        if self._looked_at_s is None or self._clock() - self._looked_at_s >= _LOOK_S:
            listed = {job.id: job for job in await self._queue()}
            self._looked_at_s = self._clock()
            for name, job in self._jobs.items():  # a job that ended some minutes ago is no longer listed
                now = listed.get(job.id)
                self._jobs[name] = now if now is not None else _gone(job)
            known = self._before | self._forgotten | {job.id for job in self._jobs.values()}
            for job in listed.values():  # one whose sbatch was not heard to its end
                unheard = self._worker_of(job)
                if unheard is not None and job.id not in known and unheard not in self._jobs:
                    self._jobs[unheard] = job
            for name in list(self._withdrawn & self._jobs.keys()):
                job = self._jobs[name]
                if job.phase is Phase.WAITING:
                    continue
                self._withdrawn.discard(name)
                if job.phase is Phase.ENDED and job.code is None:
                    await self.stop(name)  # it did not fail: it was taken back; how one ends that had begun counts
        return {name: self._state(job, name) for name, job in self._jobs.items()}

    async def withdraw(self, name: str) -> None:
        if (job := self._jobs.get(name)) is not None:
            self._looked_at_s = None
            self._withdrawn.add(name)
            await self._cancel(job.id, "--state=PENDING")

    async def stop(self, name: str) -> None:
        if (job := self._jobs.pop(name, None)) is not None:
            self._forgotten.add(job.id)
            if job.phase is not Phase.ENDED:
                await self._cancel(job.id)

    async def close(self) -> None:
        """What waits is taken back, what runs gets some time to end by itself and is then cancelled."""
        ids = {job.id for job in self._jobs.values() if job.phase is not Phase.ENDED}
        self._jobs.clear()
        if ids:
            await self._cancel(*ids, "--state=PENDING")
            if left := await self._until_ended(ids, _END_S / 4):
                await self._cancel(*left)
                left = await self._until_ended(left, _END_S)
            if left:
                _log.warning("Slurm has not ended the jobs %s yet", ", ".join(map(str, sorted(left))))
        self._ticket.unlink(missing_ok=True)

    async def _until_ended(self, ids: set[int], patience_s: float) -> set[int]:
        give_up_at_s = self._clock() + patience_s
        while True:
            with contextlib.suppress(FarmError):
                ids = {job.id for job in await self._queue() if job.id in ids and job.phase is not Phase.ENDED}
            if not ids or self._clock() > give_up_at_s:
                return ids
            await asyncio.sleep(0.5)

    # -- Slurm's commands -----------------------------------------------------------------------------

    async def _submit(self, name: str, option: str) -> Answer:
        launch = self._launch
        logs = str(launch.logs).replace("%", "%%")
        arguments = submission(
            self._config,
            name=self._job_name(name),
            output=f"{logs}/slurm-{name}-%j.log",
            folder=str(launch.logs),
            comment=f"rollout farm on {launch.logs.parent}",
            environment=os.environ,
        )
        command = worker_command(launch, ticket=str(self._ticket), name=name)
        text = script(command, self._config.setup, path=os.environ.get("PATH", os.defpath))
        return await run_command("sbatch", option, *arguments, given=text, timeout_s=_COMMAND_S)

    async def _queue(self) -> list[Job]:
        """This user's jobs. Raises ``FarmError`` when Slurm does not tell."""
        answer = await run_command(
            "squeue", "--noheader", f"--user={os.getuid()}", "--states=all", f"--Format={QUEUE_FORMAT}",
            timeout_s=_COMMAND_S,
        )  # fmt: skip
        if answer.code:
            raise FarmError(f"squeue: {last_line(answer.error)}", kind="no_queue")
        return parse_queue(answer.out)

    async def _cancel(self, *what: int | str) -> None:
        if what:
            answer = await run_command("scancel", "--quiet", *map(str, what), timeout_s=_COMMAND_S)
            if answer.code:  # the job has ended, or the controller is silent, and then the next look says so
                _log.debug("scancel: %s", answer.error)

    # -- names and states -----------------------------------------------------------------------------

    def _job_name(self, worker: str) -> str:
        return f"{self._launch.label}-{worker}"

    def _worker_of(self, job: Job) -> str | None:
        prefix = f"{self._launch.label}-"
        return job.name.removeprefix(prefix) if job.name.startswith(prefix) else None

    def _state(self, job: Job, name: str) -> WorkerState:
        where = f"job {job.id}"
        if job.phase is Phase.WAITING:
            told = f"{where} waits in Slurm's queue ({job.reason})"
            return WorkerState(
                phase=Phase.WAITING,
                where=where,
                message=f"{told}: {job.remedy}" if job.remedy else told,
                hopeless=bool(job.remedy),
            )
        if job.phase is Phase.RUNNING:
            return WorkerState(phase=Phase.RUNNING, where=where, leaving=job.preempted)
        line = last_line(tail(self._launch.logs / f"slurm-{name}-{job.id}.log"), "")
        if line.startswith("farm: "):
            return WorkerState(phase=Phase.ENDED, where=where, code=REFUSED, message=line.removeprefix("farm: "))
        return WorkerState(phase=Phase.ENDED, where=where, code=job.code, message=f"{job.state}: {line}".rstrip(": "))


def _gone(job: Job) -> Job:
    """No longer listed. How it ended is not known, so its last line must tell."""
    return Job(id=job.id, state="GONE", name=job.name, preempted=False, reason="")
