"""What an error of the E2B SDK means, and what to do next: a pure table over class names, status codes and words.

By name, not by class: so it is readable and testable without the SDK, and a class that a version lacks is no import
error. First match wins. A handler for ``SandboxException`` alone would miss 401 and 503: those classes are not below
it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Next(StrEnum):
    RETRY = "retry"  # the same call again: it may or may not have happened, and can be repeated
    BACK_OFF = "back_off"  # the account is at a limit: everybody waits, then the same call again
    NEW_SANDBOX = "new_sandbox"  # this one is gone: the attempt fails as an infrastructure failure and is issued again
    REFUSED = "refused"  # this call can't be done, the sandbox is fine: the caller's answer
    FATAL = "fatal"  # nobody can do it until a person has changed something


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``kind`` is the word that failures are counted by."""

    next: Next
    kind: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Matches an error one of whose classes is called ``name`` ("" any), at ``at`` ("" any: "create" or "use"), with
    ``word`` in its message (lower case) and one of ``statuses`` in it or on it (() any)."""

    name: str = ""
    at: str = ""
    word: str = ""
    statuses: tuple[int, ...] = ()
    verdict: Verdict


_KEY = "set E2B_API_KEY to a key of the account (e2b.dev/dashboard)"
_TEMPLATE = "build it with `farm images`, or name the right one in e2b.templates"
_LIMITS = "raise the account's limits, or lower e2b.concurrent and e2b.creates_per_s to them"

RULES: tuple[Rule, ...] = (
    Rule(name="AuthenticationException", verdict=Verdict(next=Next.FATAL, kind="key", advice=_KEY)),
    Rule(name="RateLimitException", verdict=Verdict(next=Next.BACK_OFF, kind="rate_limited", advice=_LIMITS)),
    Rule(name="ServiceBusyException", verdict=Verdict(next=Next.BACK_OFF, kind="busy")),
    Rule(name="TemplateException", verdict=Verdict(next=Next.FATAL, kind="template", advice=_TEMPLATE)),
    Rule(name="NotEnoughSpaceException", verdict=Verdict(next=Next.REFUSED, kind="disk_full")),
    Rule(name="GuestUnresponsiveException", verdict=Verdict(next=Next.NEW_SANDBOX, kind="unresponsive")),
    Rule(name="SandboxNotRunningException", verdict=Verdict(next=Next.NEW_SANDBOX, kind="lost")),
    Rule(name="SandboxNotFoundException", verdict=Verdict(next=Next.NEW_SANDBOX, kind="lost")),
    Rule(name="FileNotFoundException", verdict=Verdict(next=Next.REFUSED, kind="no_file")),
    Rule(name="InvalidArgumentException", at="use", verdict=Verdict(next=Next.REFUSED, kind="argument")),
    Rule(name="NotFoundException", at="create", verdict=Verdict(next=Next.FATAL, kind="template", advice=_TEMPLATE)),
    Rule(name="NotFoundException", at="use", verdict=Verdict(next=Next.REFUSED, kind="no_file")),
    Rule(at="create", word="timeout cannot be greater", verdict=Verdict(
        next=Next.FATAL, kind="lifetime",
        advice="the account allows shorter lives: lower limits.episode_s, or use a higher plan",
    )),
    Rule(at="create", statuses=(402,), verdict=Verdict(next=Next.FATAL, kind="quota", advice=_LIMITS)),
    Rule(at="create", word="quota", verdict=Verdict(next=Next.FATAL, kind="quota", advice=_LIMITS)),
    Rule(at="create", word="template", statuses=(400, 403, 404), verdict=Verdict(
        next=Next.FATAL, kind="template", advice=_TEMPLATE,
    )),
    Rule(at="create", statuses=(404,), verdict=Verdict(next=Next.FATAL, kind="template", advice=_TEMPLATE)),
    Rule(at="create", statuses=(403,), verdict=Verdict(next=Next.FATAL, kind="key", advice=_KEY)),
    Rule(at="create", statuses=(400,), verdict=Verdict(next=Next.FATAL, kind="request")),
    Rule(name="SandboxUnreachableException", verdict=Verdict(next=Next.RETRY, kind="unreachable")),
    Rule(name="TimeoutException", verdict=Verdict(next=Next.RETRY, kind="timeout")),
    Rule(statuses=(408, 500, 502, 503, 504), verdict=Verdict(next=Next.RETRY, kind="service")),
    Rule(name="SandboxException", at="use", verdict=Verdict(next=Next.RETRY, kind="service")),
    Rule(name="SandboxException", at="create", verdict=Verdict(next=Next.RETRY, kind="service")),
)  # fmt: skip

TRANSPORT = Verdict(next=Next.RETRY, kind="transport")  # whatever the HTTP client raises: severed, refused, reset


def verdict(names: Collection[str], *, at: str, message: str, status: int | None) -> Verdict:
    """``names``: of the error's class and the classes above it; ``at``: "create" or "use"; ``status``: the HTTP code,
    where it is known. What no rule names comes from the transport."""
    text = message.lower()
    for rule in RULES:
        if (
            (not rule.name or rule.name in names)
            and (not rule.at or rule.at == at)
            and rule.word in text
            and (not rule.statuses or _has_status(rule.statuses, status, text))
        ):
            return rule.verdict
    return TRANSPORT


def _has_status(statuses: Collection[int], status: int | None, text: str) -> bool:
    """The SDK's messages begin with the code where the exception has none."""
    return status in statuses if status is not None else text[:3] in {str(code) for code in statuses}
