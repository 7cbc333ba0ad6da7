"""The micro renderer: one token for a word wherever it stands, append-only, robust to any ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.errors import UsageError
from farm.protocols import ExecResult
from farm.render.micro import MAX_OBSERVATION_TOKENS, MicroRenderer
from farm.render.micro_tokenizer import ACT, END, MAX_VOCABULARY, OBSERVATION, TASK, save_tokenizer, train_tokenizer
from farm.suites.micro_edits import candidate_edits

TEXTS = [
    "def add_ants(xs, k):\n    if k in xs and k >= 3:\n        return k + 1\n    return True\n",
    "sed -i 's|+ |- |' *.py", "sed -i 's|k in |k not in |' *.py", "sed -i 's|and |or |' *.py", "False if not",
    "sed -i 's|>= |< |' *.py", "it should subtract", "cat *.py", "python3 -IS t", "git checkout -q .", "submit",
] * 2  # fmt: skip
TOKENIZER = train_tokenizer(TEXTS)
RENDERER = MicroRenderer.of(TOKENIZER)
(STOP,) = RENDERER.stop_token_ids
ids = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)


def result(output: str, *, timed_out: bool = False) -> ExecResult:
    return ExecResult(exit_code=0, output=output, truncated=False, timed_out=timed_out, duration_s=0.0)


@pytest.mark.parametrize("piece", ["ants", "2", "+ ", "return ", "submit"])
def test_a_word_a_digit_and_an_operator_are_the_same_token_after_a_space(piece: str) -> None:
    alone = TOKENIZER.encode(piece).ids
    assert len(alone) == 1
    assert TOKENIZER.encode(f"a {piece}").ids[2:] == alone
    assert TOKENIZER.encode(f"|{piece}|").ids[1:-1] == alone


def test_what_an_edit_copies_has_one_token_in_the_listing_and_in_the_command() -> None:
    for edit in candidate_edits(
        "def add_ants(xs, k):\n    if k in xs and k >= 3:\n        return k + 1\n    return True\n"
    ):
        command = RENDERER.command_ids(edit.command)
        bar = TOKENIZER.token_to_id("|")
        assert TOKENIZER.encode(edit.old).ids == command[1 : command.index(bar)]
        assert len(command) <= 3 + 2 * 3


def test_the_fixed_parts_of_the_usual_commands_are_one_token_each() -> None:
    for command in ("cat *.py", "python3 -IS t", "git checkout -q .", "submit"):
        assert len(RENDERER.command_ids(command)) == 2
    assert TOKENIZER.get_vocab_size() <= MAX_VOCABULARY


def test_training_is_deterministic() -> None:
    assert train_tokenizer(TEXTS).to_str() == train_tokenizer(TEXTS).to_str()


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=80))
def test_text_survives_a_round_trip(text: str) -> None:
    assert RENDERER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids) == text


def test_text_that_looks_like_a_control_token_is_text() -> None:
    observed = RENDERER.observe([STOP], result(f"{END} {ACT}"))
    assert observed.count(STOP) == 0
    assert RENDERER.decode(observed) == f"{OBSERVATION}{END} {ACT}{ACT}"


def test_a_command_is_read_back() -> None:
    action = RENDERER.parse(RENDERER.command_ids("sed -i '2s|+|-|' *.py"))
    assert (action.command, action.submit) == ("sed -i '2s|+|-|' *.py", False)
    assert RENDERER.parse(RENDERER.command_ids("submit")).submit
    assert RENDERER.parse([STOP]).command is None
    assert RENDERER.parse([]).command is None


@given(ids)
def test_any_ids_are_parsed_and_answered(output: list[int]) -> None:
    action = RENDERER.parse(output)
    assert action.command is None or action.command.strip()
    appended = RENDERER.observe(output, None)
    assert (appended[0] == STOP) == (not output or output[-1] != STOP)
    assert RENDERER.decode(appended).endswith(f"no command{ACT}")


def test_the_prompt_and_the_observation() -> None:
    assert RENDERER.decode(RENDERER.start_text("it should add")) == f"{TASK}it should add{ACT}"
    assert RENDERER.decode(RENDERER.observe([STOP], result("2\n"))) == f"{OBSERVATION}2{ACT}"
    assert "timed out" in RENDERER.decode(RENDERER.observe([STOP], result("", timed_out=True)))
    assert len(RENDERER.observe([STOP], result("a " * 2000))) == MAX_OBSERVATION_TOKENS + 2


def test_a_saved_tokenizer_loads_again(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    loaded = MicroRenderer(tmp_path)
    assert loaded.command_ids("return a + b") == RENDERER.command_ids("return a + b")


def test_a_folder_without_a_micro_tokenizer_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a micro policy"):
        MicroRenderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(UsageError, match="lacks"):
        MicroRenderer(tmp_path)
