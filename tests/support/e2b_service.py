"""An account on the local E2B double, in the environment that the real SDK reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2b_double import KEY, E2BDouble


@contextmanager
def service(double: E2BDouble | None = None, *, key: str = KEY) -> Iterator[E2BDouble]:
    """The double runs, and the environment points at it."""
    with (double or E2BDouble()).running() as running:
        names = {"E2B_API_KEY": key, "E2B_API_URL": running.url, "E2B_SANDBOX_URL": running.url}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield running
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextmanager
def local_account(**options: Any) -> Iterator[dict[str, Any]]:
    """Options of a provider on a double of its own, with limits that get in nobody's way."""
    with service(), tempfile.TemporaryDirectory() as ledger:
        yield {"ledger": ledger, "creates_per_s": 1000.0, "concurrent": 200, "user": "agent", **options}
