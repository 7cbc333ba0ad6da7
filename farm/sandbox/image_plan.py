"""PURE: which registry an image comes from, and which pulled images give way to the next. No clock and no I/O.

Invariants: only images of the ledger (those the farm itself pulled) are ever named; none that is in use, and none that
was used within ``keep_s``; the longest unused goes first; and no more go than the budget asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

DOCKER_HUB = "docker.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldImage:
    """An image that the farm pulled. ``bytes`` as the daemon counts them: shared layers are counted in each."""

    name: str
    bytes: int
    used_at_s: float


def registry_of(image: str) -> str:
    """The host (with port) that ``image`` is pulled from, by Docker's own rule for names."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else DOCKER_HUB


def full_name(image: str) -> str:
    """``image`` with its tag: ``latest`` is what Docker adds."""
    return image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"


def evictions(
    images: Iterable[HeldImage],
    *,
    budget_bytes: int,
    room_bytes: int,
    now_s: float,
    in_use: Collection[str],
    keep_s: float,
) -> tuple[str, ...]:
    """The names to remove, so that ``room_bytes`` more fit into ``budget_bytes``: as many as it takes, or all that may
    go when that is not enough."""
    known = sorted(images, key=lambda image: (image.used_at_s, image.name))
    excess = sum(image.bytes for image in known) + room_bytes - budget_bytes
    gone = []
    for image in known:
        if excess <= 0:
            break
        if image.name in in_use or now_s - image.used_at_s < keep_s:
            continue
        gone.append(image.name)
        excess -= image.bytes
    return tuple(gone)
