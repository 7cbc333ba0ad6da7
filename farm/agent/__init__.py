"""Agents: what drives an episode from the first prompt to its end."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from farm.errors import UsageError
from farm.protocols import Agent

AGENTS = {
    "bash": "farm.agent.bash:BashAgent",
    "external": "farm.agent.external:ExternalAgent",
    "oracle": "farm.agent.fixed:OracleAgent",
    "null": "farm.agent.fixed:NullAgent",
}


def make_agent(name: str, *, command: Sequence[str] = ()) -> Agent:
    """The agent called ``name``; ``command`` starts the scaffold of the agent "external". Raises UsageError on an
    unknown name, or a command that is missing or can't be run."""
    if name not in AGENTS:
        raise UsageError(f"agent {name!r} is unknown: choose one of {', '.join(sorted(AGENTS))}")
    module, _, cls = AGENTS[name].partition(":")
    made = getattr(import_module(module), cls)
    agent: Agent = made(command) if name == "external" else made()
    return agent
