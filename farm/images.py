"""Images made ready before a run (``farm images``), one after the other, at the pace of where they come from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from farm.config import FarmConfig
from farm.errors import FarmError, SandboxStartError, UsageError
from farm.protocols import ImageKeeper
from farm.sandbox import make_provider
from farm.tasks import load_tasks

_ONE_S = 3_600.0  # for one image, its turn included


async def prepare_images(config: FarmConfig, *, say: Callable[[str], None]) -> None:
    """The images of the configured tasks, the most wanted first. One that can't be had does not keep the others from
    being made ready. Raises ``UsageError`` where there is nothing to prepare, ``FarmError`` when some are missing."""
    provider = make_provider(config.sandbox.provider, **config.sandbox_options())
    if not isinstance(provider, ImageKeeper):
        raise UsageError(
            f"sandbox.provider {config.sandbox.provider!r} has nothing to prepare; this is for docker and e2b: "
            "--set sandbox.provider=docker"
        )
    tasks = load_tasks(config.rollout.tasks, limit=config.rollout.limit)
    wanted = Counter(task.image for task in tasks)
    missing: dict[str, str] = {}
    for number, (image, count) in enumerate(wanted.most_common(), start=1):
        started = time.monotonic()
        try:
            await provider.prepare(image, deadline_at_s=time.time() + _ONE_S)
        except SandboxStartError as error:
            missing[image] = str(error)
            say(f"{number}/{len(wanted)} {image}: {error}")
        else:
            say(f"{number}/{len(wanted)} {image}: ready after {time.monotonic() - started:.1f} s, for {count} tasks")
    if missing:
        first = next(iter(missing))
        raise FarmError(f"{len(missing)} of {len(wanted)} images are not ready, such as {first}: {missing[first]}")
