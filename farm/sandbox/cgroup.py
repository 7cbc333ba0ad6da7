"""Where this process may make control groups, and what a sandbox's limits mean there (cgroup v1 and v2).

Finding is done once per provider; making and removing the directories is the launcher's work, by the plain data of
:func:`plan`. Where a controller isn't writable its limit falls back to rlimits, and ``farm doctor`` says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_WANTED = ("memory", "pids", "cpu")
_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """``places``: writable controller -> the directory in which a sandbox's group is made (on v2 one for all).

    ``version`` 0: none at all.
    """

    version: int
    places: Mapping[str, str]

    @property
    def counts_memory(self) -> bool:
        return "memory" in self.places


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One directory to make below ``parent``, and the files to set in it."""

    parent: str
    settings: Mapping[str, str]


def find_cgroups(*, mountinfo: str | None = None, membership: str | None = None) -> Cgroups:
    """The controllers writable by this process; the arguments replace ``/proc/self/{mountinfo,cgroup}``."""
    mountinfo = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    membership = Path("/proc/self/cgroup").read_text() if membership is None else membership
    own = {}
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    places: dict[str, str] = {}
    unified: tuple[str, str] | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup":
            for name in set(options.split(",")) & set(_WANTED) & set(own):
                home = _below(point, root, own[name])
                if _writable(home):
                    places[name] = home
        elif kind == "cgroup2" and "" in own:
            unified = (point, _below(point, root, own[""]))
    if places:
        return Cgroups(version=1, places=places)
    return _find_v2(*unified) if unified else Cgroups(version=0, places={})


def plan(cgroups: Cgroups, *, memory_bytes: int, pids: int, cpus: float) -> list[GroupPlan]:
    """The groups that hold one sandbox to its limits."""
    quota = str(int(cpus * _PERIOD_US))
    if cgroups.version == 1:
        settings = {
            "memory": {"memory.limit_in_bytes": str(memory_bytes)},
            "pids": {"pids.max": str(pids)},
            "cpu": {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota},
        }
    else:
        settings = {
            "memory": {"memory.max": str(memory_bytes), "memory.swap.max": "0"},
            "pids": {"pids.max": str(pids)},
            "cpu": {"cpu.max": f"{quota} {_PERIOD_US}"},
        }
    merged: dict[str, GroupPlan] = {}
    for name, parent in cgroups.places.items():
        before = merged[parent].settings if parent in merged else {}
        merged[parent] = GroupPlan(parent=parent, settings={**before, **settings[name]})
    return list(merged.values())


def _find_v2(point: str, home: str) -> Cgroups:
    """Groups can be made where the controllers are handed down: below our own group, its parent, or the root."""
    for parent in dict.fromkeys((home, str(Path(home).parent), point)):
        if not parent.startswith(point) or not _writable(parent):
            continue
        control = Path(parent, "cgroup.subtree_control")
        handed_down = set(control.read_text().split()) & set(_WANTED) if control.exists() else set()
        if "memory" in handed_down:
            return Cgroups(version=2, places=dict.fromkeys(sorted(handed_down), parent))
    return Cgroups(version=0, places={})


def _below(point: str, root: str, path: str) -> str:
    """The directory of group ``path`` in a hierarchy whose subtree ``root`` is mounted at ``point``."""
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    return os.path.normpath(f"{point}/{inside}")


def _writable(directory: str) -> bool:
    return os.access(directory, os.W_OK) and os.access(f"{directory}/cgroup.procs", os.W_OK)
