"""What the errors of Docker and of the E2B SDK mean: the tables, and what the SDK can make of a cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from farm.errors import UsageError
from farm.sandbox import docker_faults, e2b
from farm.sandbox.e2b_faults import Next, verdict
from farm.sandbox.optional import sdk


@pytest.mark.parametrize(
    ("status", "message", "kind", "retryable"),
    [
        (0, "toomanyrequests: You have reached your pull rate limit.", "rate_limited", True),
        (429, "Too Many Requests", "rate_limited", True),
        (500, "write /var/lib/docker/x: no space left on device", "disk_full", True),
        (404, "manifest for a/b:latest not found: manifest unknown: manifest unknown", "image", False),
        (404, "pull access denied for a/b, repository does not exist or may require 'docker login'", "image", False),
        (0, "no matching manifest for linux/arm64/v8 in the manifest list entries", "image", False),
        (500, "Get https://r/v2/: unauthorized: authentication required", "registry_auth", False),
        (400, 'OCI runtime create failed: exec: "/usr/bin/perl": stat /usr/bin/perl: no such file', "image", False),
        (404, "No such image: a/b:latest", "image_gone", True),
        (400, "invalid mount config", "refused", False),
        (500, "something broke", "daemon", True),
        (500, 'Get "https://registry.example/v2/": dial tcp: lookup: no such host', "registry", True),
        (0, "received unexpected HTTP status: 503 Service Unavailable", "daemon", True),
    ],
)
def test_what_docker_means(status: int, message: str, kind: str, retryable: bool) -> None:
    fault = docker_faults.meaning(status, message)
    assert (fault.kind, fault.retryable) == (kind, retryable)
    assert fault.advice


@pytest.mark.parametrize(
    ("names", "at", "message", "status", "following", "kind"),
    [
        (["AuthenticationException"], "create", "401: Unauthorized", None, Next.FATAL, "key"),
        (["RateLimitException", "SandboxException"], "create", "429: slow down", None, Next.BACK_OFF, "rate_limited"),
        (["ServiceBusyException"], "create", "503: busy", None, Next.BACK_OFF, "busy"),
        (["SandboxException"], "create", "404: template 'x' not found", None, Next.FATAL, "template"),
        (["NotFoundException", "SandboxException"], "create", "no template", None, Next.FATAL, "template"),
        (["SandboxException"], "create", "400: Timeout cannot be greater than 1 hours", None, Next.FATAL, "lifetime"),
        (["SandboxException"], "create", "402: payment required", None, Next.FATAL, "quota"),
        (["SandboxException"], "create", "500: internal", 500, Next.RETRY, "service"),
        (["TimeoutException", "SandboxException"], "create", "timed out", None, Next.RETRY, "timeout"),
        (["SandboxNotFoundException", "NotFoundException"], "use", "gone", None, Next.NEW_SANDBOX, "lost"),
        (["SandboxNotRunningException", "TimeoutException"], "use", "gone", None, Next.NEW_SANDBOX, "lost"),
        (["SandboxUnreachableException", "TimeoutException"], "use", "502", None, Next.RETRY, "unreachable"),
        (["GuestUnresponsiveException"], "use", "409", None, Next.NEW_SANDBOX, "unresponsive"),
        (["NotEnoughSpaceException"], "use", "507: full", None, Next.REFUSED, "disk_full"),
        (["FileNotFoundException", "NotFoundException"], "use", "no file", None, Next.REFUSED, "no_file"),
        (["InvalidArgumentException"], "use", "is a directory", None, Next.REFUSED, "argument"),
        (["ReadError", "ConnectionError"], "use", "reset", None, Next.RETRY, "transport"),
    ],
)
def test_what_e2b_means(
    names: list[str], at: str, message: str, status: int | None, following: Next, kind: str
) -> None:
    found = verdict(names, at=at, message=message, status=status)
    assert (found.next, found.kind) == (following, kind)
    assert found.advice or found.next is not Next.FATAL or kind == "request"


def test_an_sdk_that_is_missing_or_of_another_version() -> None:
    with pytest.raises(UsageError, match=r"pip install 'rollout-farm\[nothing_of_the_kind\]'"):
        sdk("nothing_of_the_kind", oldest=(1, 0), below=2)
    with pytest.raises(UsageError, match=r"99\.0 or newer, below 100"):
        sdk("pytest", oldest=(99, 0), below=100)
    with pytest.raises(UsageError, match="below 1"):
        sdk("pytest", oldest=(0, 1), below=1)
    assert sdk("pytest", oldest=(7, 0), below=1000) is pytest


@pytest.mark.parametrize("loses_it", [False, True])
def test_a_cancellation_that_the_sdk_hides_stays_one(loses_it: bool) -> None:
    """Tried again, or taken for an answer, it would leave the command running until its sandbox's deadline."""
    calls = []

    async def hides_it() -> None:
        calls.append(1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not loses_it:
                raise ConnectionError("Request was cancelled") from None

    async def run() -> None:
        task = asyncio.create_task(e2b._tried(hides_it))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls == [1]
        with contextlib.nullcontext() if loses_it else pytest.raises(ConnectionError):
            await e2b._once(hides_it, 0.01)  # its own time-out is no cancellation

    asyncio.run(run())
