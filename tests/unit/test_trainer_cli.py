"""The command line without torch: help is fast, bad input is one line and exit code 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.cli import main


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['trainer', '--help']; from trainer.cli import main\n"
        "try: main()\n"
        "finally: print('heavy:', sorted({'torch', 'megatron', 'pyarrow', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "heavy: []" in done.stdout
    assert "sft" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--run", "nowhere", "--wait", "0"], "nowhere"),
        (["train", "--run", "nowhere", "--set", "lrr=1"], "did you mean 'lr'"),
        (["sft", "--log", "nowhere", "--policy", "p", "--out", "o"], "nowhere"),
        (["export", "--run", "nowhere", "--out", "o"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
