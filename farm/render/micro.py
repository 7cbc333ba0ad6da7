"""The micro policy's prompt format: a few special tokens, one command a turn, append-only.

    <|task|> issue <|act|> command <|end|> <|obs|> what it printed <|act|> command <|end|> ...

The policy writes a command and ``<|end|>``; everything else is appended for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from farm.errors import UsageError
from farm.protocols import Action, ExecResult
from farm.render.micro_tokenizer import ACT, END, OBSERVATION, SPECIAL, TASK
from farm.types import Task

MAX_OBSERVATION_TOKENS = 220
MAX_ISSUE_TOKENS = 100
SUBMIT = "submit"
NO_COMMAND = "no command"


class MicroRenderer:
    """Renders episodes for the tokenizer in a model folder. Raises UsageError when that isn't a micro tokenizer."""

    def __init__(self, model_path: str | Path) -> None:
        path = Path(model_path) / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(f"{path} can't be read ({error}): the micro renderer needs a micro policy") from error
        self._setup(tokenizer, str(path))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MicroRenderer:
        """A renderer over a tokenizer at hand."""
        renderer = cls.__new__(cls)
        renderer._setup(tokenizer, "the tokenizer")
        return renderer

    def _setup(self, tokenizer: Tokenizer, where: str) -> None:
        missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
        if missing:
            raise UsageError(f"{where} lacks {', '.join(missing)}: the micro renderer needs a micro policy")
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # text is never a control token
        self._task, self._act, self._end, self._observation = (
            tokenizer.token_to_id(token) for token in (TASK, ACT, END, OBSERVATION)
        )
        self._special = frozenset(tokenizer.token_to_id(token) for token in SPECIAL)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self._end,)

    def start(self, task: Task) -> list[int]:
        return self.start_text(task.problem_statement)

    def start_text(self, issue: str) -> list[int]:
        """The first prompt of an issue text."""
        return [self._task, *self._encode(issue, MAX_ISSUE_TOKENS), self._act]

    def parse(self, output_ids: Sequence[int]) -> Action:
        body = list(output_ids)
        if body and body[-1] == self._end:
            body.pop()
        if any(token in self._special for token in body):
            return Action(command=None)
        command = self.decode(body).strip()
        if not command:
            return Action(command=None)
        return Action(command=command, submit=command == SUBMIT)

    def observe(self, output_ids: Sequence[int], result: ExecResult | None) -> list[int]:
        text = NO_COMMAND if result is None else result.output
        if result is not None and result.timed_out:
            text += "\ntimed out"
        return self.observe_text(output_ids, text)

    def observe_text(self, output_ids: Sequence[int], text: str) -> list[int]:
        """What follows ``output_ids`` when the command printed ``text``."""
        closing = [] if output_ids and output_ids[-1] == self._end else [self._end]
        body = self._encode(text.rstrip(), MAX_OBSERVATION_TOKENS)
        return [*closing, self._observation, *body, self._act]

    def command_ids(self, command: str) -> list[int]:
        """The ids a policy would write for ``command``, stop token included."""
        return [*self._encode(command, None), self._end]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _encode(self, text: str, limit: int | None) -> list[int]:
        """Ids of plain text (special tokens written out in it stay plain), at most ``limit``."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids[:limit]
