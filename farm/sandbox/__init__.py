"""Sandboxes: isolated machines for commands that a policy wrote."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher, which must start fast, imports this package too
    from farm.protocols import SandboxProvider

PROVIDERS: Mapping[str, str] = {
    "bubblewrap": "farm.sandbox.bubblewrap:BubblewrapProvider",
    "docker": "farm.sandbox.docker:DockerProvider",
    "e2b": "farm.sandbox.e2b:E2BProvider",
    "harbor": "farm.sandbox.harbor:HarborProvider",
    "fake": "farm.sandbox.fake:FakeProvider",
}


def make_provider(name: str, **options: Any) -> SandboxProvider:
    """The provider called ``name``. Raises ``UsageError`` for an unknown name or option, or where it can't work."""
    from farm.errors import UsageError

    if name not in PROVIDERS:
        raise UsageError(f"sandbox {name!r} is unknown; choose one of: {', '.join(sorted(PROVIDERS))}")
    module, _, attribute = PROVIDERS[name].partition(":")
    try:
        provider: SandboxProvider = getattr(importlib.import_module(module), attribute)(**options)
    except TypeError as error:
        raise UsageError(f"sandbox {name!r}: {error}") from error
    return provider
