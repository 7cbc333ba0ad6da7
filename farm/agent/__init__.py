"""Agents: what drives an episode from the first prompt to its end."""

from __future__ import annotations

from importlib import import_module

from farm.errors import UsageError
from farm.protocols import Agent

AGENTS = {
    "bash": "farm.agent.bash:BashAgent",
    "oracle": "farm.agent.fixed:OracleAgent",
    "null": "farm.agent.fixed:NullAgent",
}


def make_agent(name: str) -> Agent:
    """The agent called ``name``. Raises UsageError on an unknown one."""
    if name not in AGENTS:
        raise UsageError(f"agent {name!r} is unknown: choose one of {', '.join(sorted(AGENTS))}")
    module, _, cls = AGENTS[name].partition(":")
    agent: Agent = getattr(import_module(module), cls)()
    return agent
