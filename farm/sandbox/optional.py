"""SDKs that only some back ends need: imported when one is chosen, at a version that is known to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from typing import Any

from farm.errors import UsageError


def sdk(name: str, *, oldest: tuple[int, int], below: int, least_python: tuple[int, int] = (3, 11)) -> Any:
    """The module ``name``, which the extra of that name installs, at least at version ``oldest`` and below the major
    version ``below``. Raises ``UsageError``."""
    advice = f"run `pip install 'rollout-farm[{name}]'`"
    try:
        module = importlib.import_module(name)
        version = importlib.metadata.version(name)
    except (ImportError, importlib.metadata.PackageNotFoundError):
        if sys.version_info < least_python:
            advice = f"it needs Python {'.'.join(map(str, least_python))}: run the farm by that, and {advice}"
        raise UsageError(f"sandbox {name!r}: the package {name} is not installed; {advice}") from None
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not oldest <= found < (below,):
        wanted = f"{'.'.join(map(str, oldest))} or newer, below {below}"
        raise UsageError(f"sandbox {name!r}: the package {name} is {version}, {wanted} is needed; {advice}")
    return module
