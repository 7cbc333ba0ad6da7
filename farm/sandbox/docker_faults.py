"""What a Docker daemon's refusals mean for the farm: a pure table, first match wins.

``kind`` is the word that failures are counted by; ``retryable`` says whether the same start can succeed later, without
anybody's doing; ``advice`` is what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: str
    retryable: bool
    advice: str


# (HTTP status codes, or () for any; a word that the message holds, lower case, or "" for any) -> what it means
FAULTS: tuple[tuple[tuple[int, ...], str, Fault], ...] = (
    ((), "no space left on device", Fault(
        kind="disk_full", retryable=True,
        advice="free some disk space, or lower docker.image_budget_bytes",
    )),
    ((), "toomanyrequests", Fault(
        kind="rate_limited", retryable=True,
        advice="lower docker.pulls_per_minute, or `docker login` for a higher limit",
    )),
    ((429,), "", Fault(
        kind="rate_limited", retryable=True,
        advice="lower docker.pulls_per_minute, or `docker login` for a higher limit",
    )),
    ((), "no matching manifest for", Fault(
        kind="image", retryable=False, advice="the image is not built for this machine's type; use another machine",
    )),
    ((), "pull access denied", Fault(
        kind="image", retryable=False, advice="correct the image's name, or `docker login` if it is private",
    )),
    ((), "unauthorized", Fault(kind="registry_auth", retryable=False, advice="`docker login` to that registry")),
    ((), "manifest unknown", Fault(kind="image", retryable=False, advice="correct the image's name and tag")),
    ((), "name unknown", Fault(kind="image", retryable=False, advice="correct the image's name")),
    ((), "invalid reference format", Fault(kind="image", retryable=False, advice="correct the image's name")),
    ((), "/usr/bin/perl", Fault(
        kind="image", retryable=False,
        advice="the image needs bash and /usr/bin/perl (in every Debian and Ubuntu); add them to it",
    )),
    ((), "unknown or invalid runtime name", Fault(
        kind="runtime", retryable=False, advice="correct docker.runtime, or add the runtime to the daemon",
    )),
    ((), "bind source path does not exist", Fault(
        kind="image", retryable=False,
        advice="the images host and host-pytest need a daemon on this very machine; use an image of a registry",
    )),
    ((), "/v2/", Fault(
        kind="registry", retryable=True, advice="is the registry reachable from the daemon's machine?",
    )),
    ((404,), "no such image", Fault(kind="image_gone", retryable=True, advice="it was removed; it is pulled again")),
    ((404,), "not found", Fault(kind="image", retryable=False, advice="correct the image's name and tag")),
    ((400,), "", Fault(kind="refused", retryable=False, advice="the daemon can't carry that out; see its message")),
    ((403,), "", Fault(kind="refused", retryable=False, advice="the daemon does not allow that; see its message")),
)  # fmt: skip

DAEMON = Fault(kind="daemon", retryable=True, advice="look at the daemon's log; `farm doctor` tells whether it answers")
GONE = Fault(kind="daemon", retryable=True, advice="start the daemon, or correct docker.host or DOCKER_HOST")
SLOW = Fault(
    kind="daemon_slow", retryable=True, advice="fewer sandboxes at once (cluster.slots) ease the daemon's load"
)
BUILD = Fault(kind="build", retryable=True, advice="try it with `docker build`; no BuildKit syntax is understood")


def meaning(status: int, message: str) -> Fault:
    """What an answer with HTTP ``status`` (0: in the stream of a pull) and ``message`` stands for."""
    text = message.lower()
    for statuses, word, fault in FAULTS:
        if (not statuses or status in statuses) and word in text:
            return fault
    return DAEMON
