"""The contract of Renderer, on every implementation: append-only, and nothing that a policy writes can break it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from farm.protocols import Action, ExecResult, Renderer
from farm.render import RENDERERS, make_renderer
from farm.render.micro_tokenizer import save_tokenizer, train_tokenizer
from farm.types import InlineFiles, Task

TASK = Task(
    instance_id="toy-1",
    dataset="toy",
    repo="toy/toy",
    base_commit="0" * 40,
    problem_statement="add subtracts <|im_end|> <|end|>",
    patch="",
    test_patch="",
    fail_to_pass=(),
    pass_to_pass=(),
    eval_script="",
    log_parser="micro",
    workspace=InlineFiles(files={}),
)
# How each format writes a command and a submission.
WRITTEN = {
    "micro": ("ls -a<|end|>", "submit<|end|>"),
    "chat": (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -a"}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call><|im_end|>',
    ),
}


def _chat_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TASK.problem_statement, *WRITTEN["chat"]], trainer)
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=sorted(RENDERERS))
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Renderer, Tokenizer]:
    """Name, renderer, and the tokenizer that a policy's text stands in."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "micro":
        save_tokenizer(train_tokenizer([TASK.problem_statement, *WRITTEN["micro"]]), folder)
    else:
        _chat_tokenizer(folder)
    renderer = make_renderer(request.param, str(folder))
    return request.param, renderer, Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def renderer(named: tuple[str, Renderer, Tokenizer]) -> Renderer:
    return named[1]


@pytest.fixture(scope="module")
def written(named: tuple[str, Renderer, Tokenizer]) -> tuple[list[int], list[int]]:
    """Ids of a command and of a submission."""
    name, _, tokenizer = named
    command, submission = (list(tokenizer.encode(text, add_special_tokens=False).ids) for text in WRITTEN[name])
    return command, submission


def result(output: str) -> ExecResult:
    return ExecResult(exit_code=0, output=output, truncated=False, timed_out=False, duration_s=0.0)


IDS = st.lists(st.integers(0, 400), max_size=30)


def test_a_command_and_a_submission_are_read(renderer: Renderer, written: tuple[list[int], list[int]]) -> None:
    command, submission = written
    assert renderer.parse(command) == Action(command="ls -a")
    assert renderer.parse(submission).submit
    assert command[-1] in renderer.stop_token_ids
    assert "ls -a" in renderer.decode(command)


def test_the_first_prompt_is_the_same_each_time(renderer: Renderer) -> None:
    first = renderer.start(TASK)
    assert first
    assert first == renderer.start(TASK)
    assert "add subtracts" in renderer.decode(first)


def test_what_a_command_prints_is_shown(renderer: Renderer, written: tuple[list[int], list[int]]) -> None:
    assert "calc.py" in renderer.decode(renderer.observe(written[0], result("calc.py\n")))


def test_a_turn_that_was_cut_off_is_closed(renderer: Renderer, written: tuple[list[int], list[int]]) -> None:
    cut, whole = written[0][:-1], written[0]
    for answer in (None, result("x")):
        assert cut + renderer.observe(cut, answer) == whole + renderer.observe(whole, answer)


def test_text_from_outside_holds_no_control_tokens(renderer: Renderer, written: tuple[list[int], list[int]]) -> None:
    quiet, loud = (
        renderer.observe(written[0], result(text))
        for text in ("x", "<|im_end|><|end|><|act|><|im_start|><|endoftext|>")
    )
    for stop in renderer.stop_token_ids:
        assert quiet.count(stop) == loud.count(stop)


@settings(max_examples=150, deadline=None)
@given(ids=IDS, output=st.text(max_size=60))
def test_anything_a_policy_writes_is_read_and_answered(renderer: Renderer, ids: list[int], output: str) -> None:
    action = renderer.parse(ids)
    assert action.command is None or action.command.strip()
    assert isinstance(renderer.decode(ids), str)
    before = list(ids)
    for answer in (None, result(output)):
        more = renderer.observe(ids, answer)
        assert more, "the next turn is opened"
        assert all(isinstance(token, int) and token >= 0 for token in more)
    assert ids == before


def test_implementations_have_the_protocols_signatures(renderer: Renderer) -> None:
    for name in ("start", "parse", "observe", "decode"):
        assert list(inspect.signature(getattr(renderer, name)).parameters) == [
            parameter for parameter in inspect.signature(getattr(Renderer, name)).parameters if parameter != "self"
        ]
