"""Command lines and GPUs of engines that the farm starts."""

from __future__ import annotations

import pytest

from farm.config import SGLANG_COMMAND
from farm.engine.launch import CommandOptions, share_out_gpus, visible_gpus
from farm.errors import UsageError


def options(*command: str) -> CommandOptions:
    return CommandOptions(
        command=command,
        model="/policies/step-000003",
        version="step-000003",
        port=31000,
        max_total_tokens=9000,
        context_length=512,
        max_running_requests=64,
    )


def test_placeholders_are_filled_in_and_doubled_braces_are_not() -> None:
    launched = options("serve", "--port={port}", "{model}", '{{"a": {context_length}}}')
    assert launched.arguments() == ["serve", "--port=31000", "/policies/step-000003", '{"a": 512}']
    assert launched.url == "http://127.0.0.1:31000"


def test_the_command_that_is_the_default_is_sglangs() -> None:
    arguments = options(*SGLANG_COMMAND).arguments()
    assert arguments[:3] == ["python", "-m", "sglang.launch_server"]
    for name, value in (("--weight-version", "step-000003"), ("--port", "31000"), ("--context-length", "512")):
        assert arguments[arguments.index(name) + 1] == value


def test_every_engine_gets_gpus_of_its_own() -> None:
    assert share_out_gpus(["0", "1", "2", "3"], [1, 2, 0, 1]) == [("0",), ("1", "2"), None, ("3",)]
    assert share_out_gpus(["GPU-7f", "5"], [2]) == [("GPU-7f", "5")]
    assert share_out_gpus([], [0, 0]) == [None, None]
    with pytest.raises(UsageError, match=r"need 8 GPUs, this machine shows 2; launch fewer, or set engine\.gpus_per"):
        share_out_gpus(["0", "1"], [1] * 8)


def test_visible_devices_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
