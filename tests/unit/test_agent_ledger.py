"""The ledger's invariant: whatever a scaffold does with its messages, prompts are made of tokens as they were
sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.agent.ledger import Ledger
from farm.protocols import Action, ExecResult
from farm.render.messages import Message
from farm.types import Task


class Letters:
    """One id per character. A reply's ids are not those of its text: a renderer that encoded it again would be
    caught."""

    stop_token_ids = (0,)

    def open_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return [1, *self._encode(messages), 2]

    def continue_chat(self, output_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [*([] if output_ids and output_ids[-1] == 0 else [0]), *self._encode(messages), 2]

    def reply(self, output_ids: Sequence[int]) -> Message:
        return Message(role="assistant", text="".join(chr(i - 1000) for i in output_ids if i >= 1000))

    def start(self, task: Task) -> list[int]:
        return []

    def parse(self, output_ids: Sequence[int]) -> Action:
        return Action(command=None)

    def observe(self, output_ids: Sequence[int], result: ExecResult | None) -> list[int]:
        return []

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    @staticmethod
    def _encode(messages: Sequence[Message]) -> list[int]:
        return [ord(c) for message in messages for c in message.role + message.text]


MOVES = ("continue", "drop", "retry", "edit", "restart")


def user(text: str) -> Message:
    return Message(role="user", text=text)


def sampled(text: str) -> tuple[int, ...]:
    return (*(1000 + ord(c) for c in text), 0)


class Play:
    """Samples whatever it is told to, and keeps every turn."""

    def __init__(self) -> None:
        self.renderer = Letters()
        self.ledger = Ledger(self.renderer)
        self.turns: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def turn(self, messages: Sequence[Message], text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        prompt = self.ledger.prompt(messages, tools)
        output = sampled(text)
        reply = self.renderer.reply(output)
        self.ledger.record(prompt, output, reply)
        self.turns.append((prompt.segment, prompt.ids, prompt.context_ids, output))
        return reply

    def check(self) -> None:
        held: dict[int, tuple[int, ...]] = {}
        for segment, ids, context, output in self.turns:
            assert held.get(segment, ()) + context == ids
            held[segment] = ids + output
        assert sorted(held) == list(range(len(held)))


def test_a_plain_conversation_is_one_segment() -> None:
    play = Play()
    chat = [user("issue")]
    for text in ("a", "b", "c"):
        chat += [play.turn(chat, text), user(f"ran {text}")]
    assert [segment for segment, *_ in play.turns] == [0, 0, 0]
    assert 1000 + ord("a") in play.turns[2][1], "the reply is in the prompt as it was sampled"
    play.check()


def test_a_dropped_reply_begins_a_segment_with_the_shared_tokens() -> None:
    play = Play()
    chat = [user("issue")]
    chat += [play.turn(chat, "first"), user("ok")]
    play.turn(chat, "badly formed")
    play.turn([*chat, user("write it properly")], "good")  # the bad reply is not in the messages
    segments = [segment for segment, *_ in play.turns]
    assert segments == [0, 0, 1]
    _, ids, context, _ = play.turns[2]
    assert context == ids
    assert ids[: len(play.turns[0][1])] == play.turns[0][1]
    assert 1000 + ord("f") in ids
    play.check()


def test_a_changed_history_is_rendered_from_its_text() -> None:
    play = Play()
    chat = [user("issue")]
    chat += [play.turn(chat, "abc"), user("ok")]
    play.turn([user("issue, in short"), Message(role="assistant", text="abc"), user("ok")], "d")
    assert [segment for segment, *_ in play.turns] == [0, 1]
    assert ord("a") in play.turns[1][1]
    assert 1000 + ord("a") not in play.turns[1][1]
    play.check()


def test_words_put_into_the_assistants_mouth_are_no_samples() -> None:
    play = Play()
    chat = [user("issue")]
    chat += [play.turn(chat, "abc"), user("ok"), Message(role="assistant", text="made up"), user("ok")]
    play.turn(chat, "d")
    assert [segment for segment, *_ in play.turns] == [0, 1]
    play.check()


def test_other_tools_are_another_conversation() -> None:
    play = Play()
    chat = [user("issue")]
    chat += [play.turn(chat, "a", tools=[{"name": "x"}]), user("ok")]
    play.turn(chat, "b", tools=[{"name": "y"}])
    play.turn(chat, "c", tools=[{"name": "x"}])
    assert [segment for segment, *_ in play.turns] == [0, 1, 0]
    play.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.text("ab", max_size=3)), max_size=12))
def test_any_scaffold(moves: list[tuple[str, str]]) -> None:
    play = Play()
    chat = [user("issue")]
    for move, text in moves:
        if move == "drop" and len(chat) > 2:
            chat = chat[:-2]
        elif move == "edit":
            chat = [*chat[:-1], user(chat[-1].text + text)]
        elif move == "restart":
            chat = [user("issue" + text)]
        reply = play.turn(chat, text)
        if move != "retry":
            chat = [*chat, reply, user("ran " + text)]
    play.check()
