"""Engines: clients of inference servers, by kind."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from farm.errors import UsageError
from farm.protocols import Engine

ENGINES = {"sglang": "farm.engine.sglang:SGLangEngine"}


def make_engine(url: str, *, kind: str = "sglang") -> Engine:
    """The client for the engine at ``url`` (``http://host:port``); the embedded server speaks SGLang's API as well.

    Raises UsageError for an unknown kind or a URL that is none."""
    if kind not in ENGINES:
        raise UsageError(f"engine kind {kind!r} is unknown; allowed: {', '.join(sorted(ENGINES))}")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"engine url {url!r} must begin with http:// or https://; e.g. http://127.0.0.1:30000")
    module, _, name = ENGINES[kind].partition(":")
    return cast(Engine, getattr(import_module(module), name)(url))
