"""One hierarchy of errors, by the boundary that was crossed, and the one place that turns them into outcomes.

Code below an episode raises these; ``run_episode`` catches and calls :func:`classify`. Whatever is not one of these
is a defect of the farm itself (``Boundary.FARM``): it still never becomes a reward (Rule 3).
"""

from __future__ import annotations

from farm.types import Boundary, Failed


class FarmError(Exception):
    """Base class. ``kind`` is a short stable word for counting; ``retryable`` says whether a retry can help."""

    boundary = Boundary.FARM
    default_kind = "internal"
    retryable = True

    def __init__(self, message: str, *, kind: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.kind = kind or self.default_kind
        if retryable is not None:
            self.retryable = retryable


class SandboxStartError(FarmError):
    """The sandbox did not come up."""

    boundary = Boundary.SANDBOX_START
    default_kind = "start"


class SandboxLostError(FarmError):
    """A running sandbox went away (killed, out of memory as a whole, host lost). Not a failed command.

    ``by_own_limit``: the back end knows that what ran in it had reached the sandbox's own limit of memory or disk."""

    boundary = Boundary.SANDBOX_LOST
    default_kind = "lost"

    @property
    def by_own_limit(self) -> bool:
        return self.kind in ("oom", "disk_limit")


class EngineError(FarmError):
    """The engine did not answer, or answered something that can't be trusted."""

    boundary = Boundary.ENGINE
    default_kind = "engine"


class GraderError(FarmError):
    """Grading could not be carried out; says nothing about the patch."""

    boundary = Boundary.GRADER
    default_kind = "grader"


class AgentError(FarmError):
    """The agent's own code broke (not: the policy wrote nonsense)."""

    boundary = Boundary.AGENT
    default_kind = "agent"


class UsageError(FarmError):
    """Bad input from the person at the keyboard: one line (what, where, allowed, what to do), exit code 2 (Rule 11)."""

    default_kind = "usage"
    retryable = False


def classify(error: BaseException) -> Failed:
    """The outcome that ``error`` stands for. Unknown errors are the farm's own."""
    if isinstance(error, FarmError):
        return Failed(boundary=error.boundary, kind=error.kind, message=str(error)[:2000], retryable=error.retryable)
    name = type(error).__name__
    return Failed(boundary=Boundary.FARM, kind=name, message=f"{name}: {error}"[:2000])
