"""Messages of a chat as a scaffold of its own sends them, in one form, and what turns them into tokens.

Scaffolds send a message back in other words than they got it: with keys that hold nothing, with text in parts. Two
messages are the same here when role, text and tool calls are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from farm.protocols import Renderer

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """``arguments`` is JSON text as the policy wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()


@runtime_checkable
class MessageRenderer(Renderer, Protocol):
    """A renderer that takes any messages, append-only like the rest of it."""

    def open_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a first prompt, up to where the policy begins to write."""
        ...

    def continue_chat(self, output_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The ids appended after ``output_ids`` (which may lack its stop token): what closes them, ``messages`` (none
        of the assistant), and the opening of the next turn."""
        ...

    def reply(self, output_ids: Sequence[int]) -> Message:
        """What the policy wrote, as a message of the assistant."""
        ...


def read_message(value: Any) -> Message:
    """From the JSON of a chat completion request. Raises ValueError with what is wrong."""
    if not isinstance(value, Mapping) or value.get("role") not in ROLES:
        raise ValueError(f"a message needs a role, one of {', '.join(ROLES)}")
    calls = value.get("tool_calls") or ()
    try:
        read = tuple(ToolCall(name=c["function"]["name"], arguments=c["function"]["arguments"]) for c in calls)
    except (KeyError, TypeError) as error:
        raise ValueError("a tool call needs function.name and function.arguments") from error
    return Message(role=value["role"], text=_text(value.get("content")), calls=read)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise ValueError("content must be text, or a list of parts that hold text")


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Equal for equal tools."""
    return json.dumps(list(tools), sort_keys=True)
