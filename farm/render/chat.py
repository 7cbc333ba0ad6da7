"""The chat format of the Qwen3 family with tool calls, over token ids.

The first prompt is, token for token, what the model's own chat template gives for a system message, a user message and
two tools. From then on ids are only appended: the template is never run over the policy's text again, so a tool call
that was written in an unusual way stays as it was sampled.

Text between two control tokens is encoded in one piece, as the template's text would be. Control tokens inside issue
texts and command output are encoded as plain text: what a command prints can't open a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from farm.errors import UsageError
from farm.protocols import Action, ExecResult
from farm.render.messages import Message, ToolCall
from farm.types import Task

_START, _END, _END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_CALL, _CALL_END, _THOUGHT_END = "<tool_call>", "</tool_call>", "</think>"
_OUTPUT_CHARACTERS = 8_000  # of one command; what is longer loses its middle

SYSTEM = (
    "You fix issues in a software repository. You work in a bash shell inside a sandbox without network. "
    "Call one tool per turn. Find the cause, change the code, check your change, then call submit. "
    "Do not change tests."
)

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a bash command in the repository and return what it printed.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command to run."}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "Hand in the repository as it is now. Ends the task.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)

_TOOL_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOL_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_UNREADABLE = (
    "No readable tool call. Write <tool_call> with a JSON object that holds the name of a tool, bash or submit, and "
    "its arguments, then </tool_call>."
)
_ONE_CALL = "Not run: one call per turn."


def user_message(task: Task) -> str:
    """What the policy is told about ``task``."""
    return f"The repository is in {task.workdir}. Resolve this issue:\n\n{task.problem_statement}"


class ChatRenderer:
    """See ``farm.protocols.Renderer``. ``model_path`` is a Hugging Face model folder with a ``tokenizer.json``."""

    def __init__(self, model_path: str) -> None:
        """Raises UsageError when the tokenizer can't be read or lacks the control tokens."""
        path = Path(model_path) / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(
                f"renderer chat: {path} is not a readable tokenizer ({error}): give a model folder"
            ) from error
        self._tokenizer.encode_special_tokens = True  # in text; control tokens are placed by id
        self._start, self._end = self._control(_START, path), self._control(_END, path)
        end_of_text = self._tokenizer.token_to_id(_END_OF_TEXT)
        self._stops = (self._end,) if end_of_text is None else (self._end, end_of_text)
        self._size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._newline = self._encode("\n")
        self._opening = [*self._newline, self._start, *self._encode("assistant\n")]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    def start(self, task: Task) -> list[int]:
        first = (Message(role="system", text=SYSTEM), Message(role="user", text=user_message(task)))
        return self.open_chat(first, TOOLS)

    def open_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """See ``farm.render.messages.MessageRenderer``. Messages of the assistant are rendered from their text."""
        first = messages[0].text if messages and messages[0].role == "system" else None
        rest = messages if first is None else messages[1:]
        head = []
        if tools:
            listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
            head.append(("system", (f"{first}\n\n" if first is not None else "") + f"{_TOOL_HEAD}{listed}{_TOOL_FOOT}"))
        elif first is not None:
            head.append(("system", first))
        return self._joined([*head, *_blocks(rest)]) + self._opening

    def continue_chat(self, output_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See ``farm.render.messages.MessageRenderer``."""
        closing = [] if len(output_ids) and output_ids[-1] == self._end else [self._end]
        return [*closing, *self._newline, *self._joined(_blocks(messages)), *self._opening]

    def reply(self, output_ids: Sequence[int]) -> Message:
        """See ``farm.render.messages.MessageRenderer``. A tool call that can't be read stays in the text."""
        written = self._text(output_ids)
        thought, ended, spoken = written.rpartition(_THOUGHT_END)
        text, *parts = spoken.split(_CALL)
        calls = [_tool_call(body) for body, closed, _ in (part.partition(_CALL_END) for part in parts) if closed]
        if not parts or None in calls or len(calls) != len(parts):
            return Message(role="assistant", text=written)
        found = tuple(call for call in calls if call is not None)
        return Message(role="assistant", text=thought + ended + text.removesuffix("\n"), calls=found)

    def parse(self, output_ids: Sequence[int]) -> Action:
        calls = _calls(self._text(output_ids))
        return calls[0] if calls else Action(command=None)

    def observe(self, output_ids: Sequence[int], result: ExecResult | None) -> list[int]:
        answers = [] if result is None else [_answer(result)]
        answers += [_ONE_CALL] * (len(_calls(self._text(output_ids))) - 1 if answers else 0)
        content = "".join(f"\n<tool_response>\n{answer}\n</tool_response>" for answer in answers)
        closing = [] if len(output_ids) and output_ids[-1] == self._end else [self._end]
        message = self._message("user", content.removeprefix("\n") or _UNREADABLE)
        return [*closing, *self._newline, *message, *self._opening]

    def decode(self, ids: Sequence[int]) -> str:
        known = [i for i in ids if 0 <= i < self._size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=False)
        return text

    def _control(self, token: str, path: Path) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise UsageError(f"renderer chat: {path} has no token {token}: it is not of the Qwen3 family")
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _message(self, role: str, content: str) -> list[int]:
        return [self._start, *self._encode(f"{role}\n{content}"), self._end]

    def _joined(self, blocks: Sequence[tuple[str, str]]) -> list[int]:
        ids: list[int] = []
        for number, (role, content) in enumerate(blocks):
            ids += [*(self._newline if number else ()), *self._message(role, content)]
        return ids

    def _text(self, output_ids: Sequence[int]) -> str:
        """What was written up to the first stop token."""
        stops = [output_ids.index(stop) for stop in self._stops if stop in output_ids]
        return self.decode(output_ids[: min(stops)] if stops else output_ids)


def _blocks(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Roles and contents as the template has them: answers of tools that follow each other share a user's block."""
    blocks: list[tuple[str, str]] = []
    after_tool = False
    for message in messages:
        if message.role == "tool":
            answer = f"\n<tool_response>\n{message.text}\n</tool_response>"
            if after_tool:
                role, content = blocks.pop()
                blocks.append((role, content + answer))
            else:
                blocks.append(("user", answer.removeprefix("\n")))
        else:
            called = [_written(call) for call in message.calls]
            blocks.append((message.role, "\n".join(filter(None, (message.text, *called)))))
        after_tool = message.role == "tool"
    return blocks


def _written(call: ToolCall) -> str:
    return f'{_CALL}\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n{_CALL_END}'


def _tool_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _calls(text: str) -> list[Action]:
    """The tool calls in ``text``, without what was thought before; an unreadable one has no command."""
    found = []
    for part in text.rpartition(_THOUGHT_END)[2].split(_CALL)[1:]:
        body, closed, _ = part.partition(_CALL_END)
        found.append(_action(body) if closed else Action(command=None))
    return found


def _action(body: str) -> Action:
    """One call: ``{"name": "bash", "arguments": {"command": ...}}`` or ``{"name": "submit", ...}``."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return Action(command=None)
    if not isinstance(call, dict):
        return Action(command=None)
    if call.get("name") == "submit":
        return Action(command=None, submit=True)
    arguments = call.get("arguments")
    command = arguments.get("command") if call.get("name") == "bash" and isinstance(arguments, dict) else None
    return Action(command=command if isinstance(command, str) and _runnable(command) else None)


def _runnable(command: str) -> bool:
    """Whether a shell can be given ``command``: not blank, no NUL, no half of a surrogate pair."""
    return bool(command.strip()) and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in command)


def _answer(result: ExecResult) -> str:
    """The result as the policy sees it."""
    text = result.output.rstrip("\n")
    if len(text) > _OUTPUT_CHARACTERS:
        half = _OUTPUT_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    elif result.truncated:
        text += "\n[output cut off]"
    if result.timed_out:
        return f"{text}\n[stopped after {result.duration_s:.0f} s]"
    return f"{text}\n[exit code {result.exit_code}]" if result.exit_code else text
