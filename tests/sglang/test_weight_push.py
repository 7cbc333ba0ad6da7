"""Weights from the trainer's side into a real SGLang over a gloo process group."""

from __future__ import annotations

from collections.abc import Callable

import push_cases
import pytest


@pytest.mark.parametrize("case", push_cases.CASES, ids=lambda case: case.__name__)
def test_a_push(case: Callable[[str, tuple[str, str]], None], sglang_server: tuple[str, tuple[str, str]]) -> None:
    case(*sglang_server)
