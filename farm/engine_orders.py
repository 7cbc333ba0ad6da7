"""``engines.json`` in the run folder: what people want of the engines of a running farm, and how it is carried out.

The file says how things should be, not what to do: the farm reads it a few times a second and moves there, so an order
given twice is one order, and a farm that is started again finds it. Written under a lock, by rename.

:func:`next_steps` decides, purely; :mod:`farm.fleet` carries out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farm.durable import FolderLock, write_json
from farm.errors import UsageError
from farm.run_folder import RunFolder

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Engines by name (an engine of somebody else's has its URL for a name). ``added``: URL -> pool; ``replaced``: how
    often an engine of the farm's own was ordered to be replaced by a new process."""

    added: Mapping[str, str] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    replaced: Mapping[str, int] = field(default_factory=dict)

    def add(self, url: str, pool: str) -> Orders:
        return replace(
            self, added={**self.added, url: pool}, drained=self.drained - {url}, removed=self.removed - {url}
        )

    def drain(self, name: str) -> Orders:
        return replace(self, drained=self.drained | {name})

    def restore(self, name: str) -> Orders:
        """Use it again."""
        return replace(self, drained=self.drained - {name}, removed=self.removed - {name})

    def remove(self, name: str) -> Orders:
        return replace(self, removed=self.removed | {name}, drained=self.drained - {name})

    def renew(self, name: str) -> Orders:
        """Replace it by a new process."""
        return replace(self, replaced={**self.replaced, name: self.replaced.get(name, 0) + 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An engine of a running farm. ``replaced``: the last order to replace it that was carried out."""

    name: str
    draining: bool
    reserved_tokens: int
    own: bool
    replaced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``do``: add, drain, undrain, remove, replace."""

    do: str
    name: str


def next_steps(orders: Orders, members: Iterable[Member]) -> list[Step]:
    """What to do now. An engine is removed or replaced once no episode has a reservation on it."""
    steps = []
    present = set()
    for member in members:
        present.add(member.name)
        replacing = member.own and orders.replaced.get(member.name, 0) > member.replaced
        removing = member.name in orders.removed
        if not (removing or replacing or member.name in orders.drained):
            steps += [Step(do="undrain", name=member.name)] if member.draining else []
        elif not member.draining:
            steps.append(Step(do="drain", name=member.name))
        elif member.reserved_tokens == 0 and removing:
            steps.append(Step(do="remove", name=member.name))
        elif member.reserved_tokens == 0 and replacing:
            steps.append(Step(do="replace", name=member.name))
    steps += [Step(do="add", name=url) for url in orders.added if url not in present | orders.removed]
    return steps


def read_orders(run: RunFolder) -> Orders:
    """No orders when there is no file. Raises ``UsageError`` for one that can't be read."""
    path = _path(run)
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if raw["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {raw['schema_version']}, this program reads {SCHEMA_VERSION}")
        return Orders(
            added={str(url): str(pool) for url, pool in raw["added"].items()},
            drained=frozenset(raw["drained"]),
            removed=frozenset(raw["removed"]),
            replaced={str(name): int(times) for name, times in raw["replaced"].items()},
        )
    except FileNotFoundError:
        return Orders()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: unreadable ({error}); remove it, or correct it") from None


def change_orders(run: RunFolder, change: Callable[[Orders], Orders]) -> Orders:
    """Read, change, write. Raises ``UsageError`` when somebody else is at it or the file can't be read."""
    lock = FolderLock(run.path / "engines.lock", "writer of engines.json")
    lock.acquire()
    try:
        orders = change(read_orders(run))
        write_json(
            _path(run),
            {
                "schema_version": SCHEMA_VERSION,
                "added": dict(orders.added),
                "drained": sorted(orders.drained),
                "removed": sorted(orders.removed),
                "replaced": dict(orders.replaced),
            },
        )
        return orders
    finally:
        lock.release()


def _path(run: RunFolder) -> Path:
    return run.path / "engines.json"
