"""How Dask is set up in a farm: the same for the scheduler, the driver and every worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import dask
from distributed import Security

from farm.cluster.ticket import Credentials

_NOISY_LOGGERS = ("distributed", "distributed.scheduler", "distributed.nanny", "distributed.worker", "distributed.core")

SETTINGS: Mapping[str, Any] = {
    "distributed.scheduler.worker-saturation": 1.0,  # a worker holds only what it runs: a drain moves nothing
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.worker-ttl": "5 minutes",  # must exceed the TCP time-out
    "distributed.scheduler.unknown-task-duration": "5m",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.daemon": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.comm.timeouts.tcp": "30s",
    "distributed.comm.timeouts.connect": "30s",
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
}


def apply_settings() -> None:
    """In this process. Dask's loggers are silenced: losses are events here, and are told in the farm's own words."""
    dask.config.set(SETTINGS)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def security_of(credentials: Credentials) -> Security:
    """One certificate for every role; texts, so that nothing touches a disk."""
    roles = {f"tls_{role}_cert": credentials.cert for role in ("scheduler", "worker", "client")}
    roles |= {f"tls_{role}_key": credentials.key for role in ("scheduler", "worker", "client")}
    return Security(require_encryption=True, tls_ca_file=credentials.ca, **roles)
