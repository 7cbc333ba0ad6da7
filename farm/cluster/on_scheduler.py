"""What Dask is given to run on the scheduler."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState


class FarmPlugin(SchedulerPlugin):
    """Drain-aware planning inside the scheduler, where the state is consistent; reached by the RPC ``farm_plan``."""

    name = "farm"

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.draining: set[str] = set()
        scheduler.allowed_failures = 0
        scheduler.WORKER_SATURATION = 1.0
        scheduler.handlers["farm_plan"] = self.plan
        for worker in scheduler.workers.values():
            if worker.status == Status.closing_gracefully:  # drained by a farm that was killed before it closed it
                self._set_status(worker, Status.running)

    def _set_status(self, worker: WorkerState, status: Status) -> None:
        self.scheduler.handle_worker_status_change(status, worker, "farm-drain")
        message = {"op": "worker-status-change", "status": status.name, "stimulus_id": "farm-drain"}
        self.scheduler.stream_comms[worker.address].send(message)

    def plan(self, want: int | None = None, leaving: Collection[str] = ()) -> dict[str, Any]:
        """Drain or undrain towards ``want`` workers (None: leave as is), and drain those that are called ``leaving``;
        says which drained ones are empty. One that leaves is not: whoever takes it away closes it."""
        workers = self.scheduler.workers
        self.draining &= set(workers)
        going = {w.address for w in workers.values() if str(w.name) in leaving}
        for address in going - self.draining:
            if workers[address].status == Status.running:
                self._set_status(workers[address], Status.closing_gracefully)
                self.draining.add(address)
        live = [w for w in workers.values() if w.address not in self.draining and w.status == Status.running]
        if want is not None:
            # One that has been told to go meanwhile calls itself paused, and is not called back.
            kept = [workers[a] for a in self.draining - going if workers[a].status == Status.closing_gracefully]
            for worker in sorted(kept, key=lambda w: len(w.processing), reverse=True)[: max(0, want - len(live))]:
                self.draining.discard(worker.address)
                self._set_status(worker, Status.running)
                live.append(worker)
            for worker in sorted(live, key=lambda w: len(w.processing))[: max(0, len(live) - want)]:
                self._set_status(worker, Status.closing_gracefully)
                self.draining.add(worker.address)
                live.remove(worker)
        empty = [workers[a] for a in self.draining - going if not workers[a].processing]
        return {
            "live": [str(w.name) for w in live],
            "slots": sum(w.nthreads for w in live),
            # Or leaving by themselves; one that is just joining is on its way, and would be replaced if it stood here.
            "draining": [str(w.name) for w in workers.values() if w not in live and w.status != Status.init],
            "empty_names": [w.name for w in empty],
            "empty_addresses": [w.address for w in empty],
        }

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[WorkerState]) -> list[WorkerState]:
        """Whoever else scales this cluster (an operator, an adaptive) only gets idle workers."""
        return [w for w in workers if not w.processing]
