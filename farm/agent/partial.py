"""What an agent had done when it broke off: kept on the exception that ended it, so that the turns are not lost."""

from __future__ import annotations

from farm.protocols import AgentRun

_ATTRIBUTE = "farm_agent_run"


def attach(error: BaseException, run: AgentRun) -> None:
    """Keep ``run`` with ``error`` while it travels up."""
    setattr(error, _ATTRIBUTE, run)


def partial_run(error: BaseException) -> AgentRun | None:
    """The run that ``error`` ended, itself or as the cancellation behind a time-out; None without one."""
    run = getattr(error, _ATTRIBUTE, None) or getattr(error.__cause__, _ATTRIBUTE, None)
    return run if isinstance(run, AgentRun) else None
