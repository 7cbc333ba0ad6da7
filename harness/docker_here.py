"""Whether Docker can be the slow sandbox back end of a comparison here, found by starting one of its sandboxes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from farm.errors import FarmError, UsageError
from farm.protocols import SandboxSpec
from farm.sandbox.docker import DockerProvider
from harness.lab import Lab
from harness.profiles import EMBEDDED

PROVIDER = "docker"
_START_S = 90.0  # once: the image is made of this machine's files


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Settings (``section.key=value``) of the two sandbox back ends of a comparison."""

    slow: tuple[str, ...]
    fast: tuple[str, ...]


def compared(lab: Lab, problem: Callable[[], str]) -> Compared:
    """On the embedded default: Docker against it where ``problem`` (:func:`docker_problem`) finds none, else itself
    with the start latencies of the reference. Other profiles name both themselves; an archive asks nobody."""
    profile = lab.profile
    own = Compared(slow=profile.slow_sandbox, fast=profile.fast_sandbox)
    if lab.archive or profile.back_ends["sandbox"] != EMBEDDED["sandbox"]:
        return own
    if why := problem():
        lab.console.print(f"the slow sandbox back end is simulated: {why}", markup=False)
        return own
    return Compared(slow=(f"sandbox.provider={PROVIDER}",), fast=(f"sandbox.provider={EMBEDDED['sandbox']}",))


def docker_problem() -> str:
    """Why no sandbox starts with Docker here; empty when one did. It is gone again, its image (made of this machine's
    files) stays. Takes a second where there is a daemon and nothing where there is none."""
    try:
        provider = DockerProvider()
    except UsageError as error:
        return str(error)

    async def start() -> int:
        spec = SandboxSpec(owner="harness", deadline_at_s=time.time() + _START_S)
        async with asyncio.timeout(_START_S), provider.open(spec) as sandbox:
            return (await sandbox.exec("true", timeout_s=_START_S)).exit_code

    try:
        code = asyncio.run(start())
    except (FarmError, OSError, TimeoutError) as error:
        return f"sandbox {PROVIDER!r}: none starts ({error or type(error).__name__})"
    finally:
        provider.close()
    return "" if code == 0 else f"sandbox {PROVIDER!r}: `true` ended with {code}"
