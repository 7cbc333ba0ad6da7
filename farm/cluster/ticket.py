"""What a worker on another host must know to join its farm: one JSON document.

It holds the private key of the farm's certificate, so it travels on a pipe or lies in a file that only its owner can
read, and is never logged (``repr`` leaves the key and the environment out).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from farm.errors import UsageError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """PEM texts. One certificate for every member of the farm: whoever holds it can run code in all of it."""

    ca: str
    cert: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the farm has and a worker's host must have too; see :mod:`farm.cluster.examine`.

    ``software``: name -> version. ``probe``: a file on the shared storage, ``probe_text`` what is in it. ``provider``
    and ``provider_options``: the sandboxes. ``engines``: URLs that episodes will use."""

    software: Mapping[str, str]
    probe: str
    probe_text: str
    provider: str
    provider_options: Mapping[str, Any]
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """``scheduler``: tls://HOST:PORT. ``slots``: episodes at once. ``environment``: variables for the worker.
    ``leave_s``: what running episodes get to end when it is told to go (SIGTERM), before they are given up."""

    scheduler: str
    slots: int
    credentials: Credentials
    expected: Expected
    leave_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Ticket:
        """Raises ``UsageError`` for one of another version, or something else."""
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("schema_version")
            if version != SCHEMA_VERSION:
                raise UsageError(
                    f"the farm's ticket has version {version}, this worker reads {SCHEMA_VERSION}; install the same "
                    "rollout-farm on both hosts"
                )
            expected = data.pop("expected")
            return cls(
                credentials=Credentials(**data.pop("credentials")),
                expected=Expected(**{**expected, "engines": tuple(expected["engines"])}),
                **data,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"not a farm's ticket ({type(error).__name__}); workers are started by their farm"
            ) from None
