"""What the SGLang client makes of answers: no server needed."""

from __future__ import annotations

from typing import Any

import pytest

from farm.engine.sglang import _generation, _kind, _message, _samples, _wire_rid
from farm.errors import EngineError


def answer(spans: list[tuple[str, int, int]] | None, tokens: int = 3, **meta: Any) -> dict[str, Any]:
    ids = list(range(tokens))
    info: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "step-000004",
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "num_retractions": 1,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    if spans is not None:
        info["weight_versions"] = [{"version": name, "start": start, "end": end} for name, start, end in spans]
    return {"text": "", "output_ids": ids, "meta_info": info | meta}


def test_spans_come_from_the_answer() -> None:
    generation = _generation(answer([("step-000004", 0, 1), ("step-000005", 1, 3)]))
    assert [(s.step, s.start, s.end) for s in generation.spans] == [(4, 0, 1), (5, 1, 3)]
    assert (generation.prompt_tokens, generation.cached_tokens, generation.retractions) == (5, 2, 1)
    assert (generation.queue_s, generation.e2e_s) == (0.0, 0.0), "absent without --enable-metrics"


def test_a_server_without_spans_names_one_version() -> None:
    assert [(s.step, s.start, s.end) for s in _generation(answer(None)).spans] == [(4, 0, 3)]
    assert _generation(answer(None, tokens=0)).spans == ()


@pytest.mark.parametrize(
    ("spans", "kind"),
    [
        ([("default", 0, 3)], "unverified_weights"),
        ([("step-000004", 0, 1), ("default", 1, 3)], "unverified_weights"),
        ([("step-000004", 0, 2)], "malformed"),
        ([("step-000004", 1, 3)], "malformed"),
        ([("step-000004", 0, 2), ("step-000005", 1, 3)], "malformed"),
        ([("step-000004", 0, 4)], "malformed"),
    ],
)
def test_spans_that_prove_nothing_are_refused(spans: list[tuple[str, int, int]], kind: str) -> None:
    with pytest.raises(EngineError) as caught:
        _generation(answer(spans))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"meta_info": {}},
        answer(None, finish_reason=None),
        answer(None, output_token_logprobs=[[-0.5, 7, None]]),
        answer(None, output_token_logprobs=None),
    ],
)
def test_what_is_no_generation_is_malformed(broken: dict[str, Any]) -> None:
    with pytest.raises(EngineError) as caught:
        _generation(broken)
    assert caught.value.kind == "malformed"


def test_kinds_of_refusals() -> None:
    assert _kind(503, "The request queue is full.") == "queue_full"
    assert _kind(500, "Out of memory even after retracting all other requests") == "out_of_memory"
    assert _kind(503, "starting") == "status_503"
    assert _message(b'{"error": {"message": "too long"}}') == "too long"
    assert _message(b'{"object": "error", "message": "full", "code": 503}') == "full"
    assert _message(b'{"detail": "Not Found"}') == "Not Found"
    assert _message(b"<html>") == "<html>"


def test_no_rid_begins_another() -> None:
    assert not _wire_rid("e-10").startswith(_wire_rid("e-1"))


def test_totals_are_summed_over_labels() -> None:
    text = (
        b"# TYPE sglang:generation_tokens_total counter\n"
        b'sglang:generation_tokens_total{model_name="m",tp_rank="0"} 5.0\n'
        b'sglang:generation_tokens_total{model_name="m",tp_rank="1"} 7.0\n'
        b'sglang:num_running_reqs{model_name="m"} 3.0\n'
    )
    assert _samples(text) == {"sglang:generation_tokens_total": 12.0}
