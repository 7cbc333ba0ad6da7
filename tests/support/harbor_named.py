"""A Harbor environment whose machine is found by its session id alone, as those of Docker are. Needs ``harbor``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from farm.harbor.environment import FarmEnvironment

MACHINES = "ROLLOUT_FARM_TEST_MACHINES"  # names a folder: one file per machine, with the pid of it

_MACHINE = "setsid sleep 600 > /dev/null 2>&1 & echo $!"


class NamedEnvironment(FarmEnvironment):
    """A sandbox, and beside it a process that outlives whoever started it and only ``stop`` ends."""

    @property
    def _machine(self) -> Path:
        return Path(os.environ[MACHINES], self.session_id)

    async def start(self, force_build: bool) -> None:
        self._machine.write_bytes(_a_machine())
        await super().start(force_build)

    async def stop(self, delete: bool) -> None:
        await super().stop(delete)
        if self._machine.exists():
            os.kill(int(self._machine.read_text()), 9)
            self._machine.unlink()


def _a_machine() -> bytes:
    return subprocess.run(["bash", "-c", _MACHINE], stdout=subprocess.PIPE, check=True).stdout


OWNER = """
import asyncio, time
from farm.protocols import SandboxSpec
from farm.sandbox import make_provider

async def main():
    provider = make_provider("harbor", environment="harbor_named:NamedEnvironment", kwargs={"sandbox": "bubblewrap"})
    async with provider.open(SandboxSpec(owner="dead", deadline_at_s=time.time() + 600)):
        print("open", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def options() -> dict[str, Any]:
    """Of the provider that the program ``OWNER`` makes."""
    return {"environment": "harbor_named:NamedEnvironment", "kwargs": {"sandbox": "bubblewrap"}}
