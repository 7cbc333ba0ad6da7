"""PURE: which tokens stand for a conversation that a scaffold sends as messages (Rule 4).

A scaffold sends the whole conversation with every request. What was sampled in it is known here as tokens, so a request
is answered from the longest conversation on record that it begins with: its tokens, then the tokens of what is new.

Invariant: in every segment the ids of a turn's prompt are the context and output ids of all its turns so far, and a
sampled token is the output of exactly one turn. A request that goes on where the last turn of a segment ended is the
next turn of that segment. One that goes on from an earlier turn (the scaffold dropped or changed what came after)
begins a new segment, whose first context holds the shared tokens as they were sampled. One that begins with nothing on
record, or that puts words into the assistant's mouth, begins a new segment rendered from its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.render.messages import Message, MessageRenderer, tools_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """``ids`` is the whole prompt; ``context_ids`` its part that no earlier turn of the segment holds."""

    segment: int
    ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Where a turn ended: the conversation with the reply, and its tokens."""

    segment: int
    messages: tuple[Message, ...]
    tools: str
    ids: tuple[int, ...]
    output_ids: tuple[int, ...]


class Ledger:
    def __init__(self, renderer: MessageRenderer) -> None:
        self._renderer = renderer
        self._points: list[_Point] = []
        self._tips: list[_Point | None] = []  # the last turn of each segment, None while it has none

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """The tokens of ``messages``. Nothing is on record before :meth:`record`."""
        given, key = tuple(messages), tools_key(tools)
        point = self._longest(given, key)
        if point is None:
            ids = tuple(self._renderer.open_chat(given, tools))
            return Prompt(segment=len(self._tips), ids=ids, context_ids=ids, messages=given, tools=key)
        more = tuple(self._renderer.continue_chat(point.output_ids, given[len(point.messages) :]))
        ids = point.ids + more
        if self._tips[point.segment] is point:
            return Prompt(segment=point.segment, ids=ids, context_ids=more, messages=given, tools=key)
        return Prompt(segment=len(self._tips), ids=ids, context_ids=ids, messages=given, tools=key)

    def record(self, prompt: Prompt, output_ids: Sequence[int], reply: Message) -> None:
        """``reply`` is what the scaffold was told that ``output_ids`` mean."""
        point = _Point(
            segment=prompt.segment,
            messages=(*prompt.messages, reply),
            tools=prompt.tools,
            ids=prompt.ids + tuple(output_ids),
            output_ids=tuple(output_ids),
        )
        self._points.append(point)
        if prompt.segment == len(self._tips):
            self._tips.append(None)
        self._tips[prompt.segment] = point

    def _longest(self, messages: tuple[Message, ...], tools: str) -> _Point | None:
        """The longest conversation on record that ``messages`` begins with, nothing of the assistant coming after; of
        equal ones the latest."""
        found = None
        for point in self._points:
            length = len(point.messages)
            if (
                point.tools == tools
                and length < len(messages)
                and messages[:length] == point.messages
                and all(message.role != "assistant" for message in messages[length:])
                and (found is None or length >= len(found.messages))
            ):
                found = point
        return found
