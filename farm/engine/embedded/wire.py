"""SGLang's native HTTP bodies: read a ``/generate`` request, write its answer. Pure; field names as in SGLang
0.5.23."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from farm.engine.embedded.request import Request

DEFAULT_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6  # temperatures under this mean the most likely token, as in SGLang
MAX_STOPS = 16


class BadRequestError(ValueError):
    """The request can't be served as asked (HTTP 400)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBounds:
    """What a request is checked against."""

    vocab: int
    context_length: int
    max_total_tokens: int
    eos: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody:
    """A checked ``/generate`` body."""

    rid: str | None
    input_ids: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    return_logprob: bool
    logprob_start: int | None
    skip_special_tokens: bool
    no_stop_trim: bool


_KNOWN = {
    "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "top_logprobs_num",
    "token_ids_logprob", "return_text_in_logprobs", "text", "log_metrics",
}  # fmt: skip
_KNOWN_SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens", "sampling_seed", "ignore_eos", "n",
}  # fmt: skip


def read_generate(body: Any, bounds: ModelBounds) -> GenerateBody:
    """Check a decoded JSON body. Raises :class:`BadRequestError` with SGLang's wording where SGLang has one."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    unknown = body.keys() - _KNOWN
    if unknown:
        raise BadRequestError(f"unsupported field(s): {', '.join(sorted(unknown))}")
    for name in ("stream", "top_logprobs_num", "token_ids_logprob", "text"):
        if body.get(name):
            raise BadRequestError(f"{name} is not supported by the embedded engine; send input_ids")
    params = body.get("sampling_params") or {}
    unknown = params.keys() - _KNOWN_SAMPLING
    if unknown:
        raise BadRequestError(f"unsupported sampling parameter(s): {', '.join(sorted(unknown))}")
    if params.get("n", 1) != 1:
        raise BadRequestError("n must be 1")
    ids = _input_ids(body.get("input_ids"), bounds)
    max_new = _max_new_tokens(params.get("max_new_tokens"), len(ids), bounds)
    temperature = _number(params, "temperature", 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        raise BadRequestError(f"temperature must be a non-negative finite number, got {params['temperature']}.")
    top_p = _number(params, "top_p", 1.0)
    if not 0 < top_p <= 1:
        raise BadRequestError(f"top_p must be in (0, 1], got {params['top_p']}.")
    top_k = int(_number(params, "top_k", -1))
    if temperature < GREEDY_BELOW:
        top_k = 1  # as in SGLang, which does not look at what was given then
    elif top_k < 1 and top_k != -1:
        raise BadRequestError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    seed = params.get("sampling_seed")
    if seed is not None and (not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise BadRequestError(f"sampling_seed must be an integer in [-2**63, 2**63 - 1], got {seed}.")
    # With ignore_eos SGLang ends by length alone, whatever stop tokens are named.
    stops = () if params.get("ignore_eos") else (*(params.get("stop_token_ids") or ()), *bounds.eos)
    stops = tuple(dict.fromkeys(stops))
    if len(stops) > MAX_STOPS or not all(isinstance(stop, int) for stop in stops):
        raise BadRequestError(f"stop_token_ids must be at most {MAX_STOPS} token ids, the model's own included")
    start = body.get("logprob_start_len")
    return_logprob = bool(body.get("return_logprob"))
    if start is not None and (not isinstance(start, int) or start >= len(ids)):
        raise BadRequestError(f"logprob_start_len must be an integer below the input length {len(ids)}, got {start}")
    rid = body.get("rid")
    return GenerateBody(
        rid=None if rid is None else str(rid),
        input_ids=ids,
        max_new_tokens=max_new,
        stop_ids=stops,
        temperature=temperature,
        top_p=top_p,
        top_k=bounds.vocab if top_k == -1 else min(top_k, bounds.vocab),
        seed=seed,
        return_logprob=return_logprob,
        logprob_start=start if return_logprob and start is not None and start >= 0 else None,
        skip_special_tokens=bool(params.get("skip_special_tokens", True)),
        no_stop_trim=bool(params.get("no_stop_trim", False)),
    )


def _number(params: dict[str, Any], name: str, default: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise BadRequestError(f"{name} must be a number, got {value!r}")
    return float(value)


def _input_ids(value: Any, bounds: ModelBounds) -> list[int]:
    if value is None:
        raise BadRequestError("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(value, list) or not value:
        raise BadRequestError("input_ids must be a non-empty list of token ids")
    # One pass in C finds anything that is not an id of the vocabulary.
    if not all(map(int.__instancecheck__, value)) or min(value) < 0 or max(value) >= bounds.vocab:
        raise BadRequestError(f"input_ids must be integers in [0, {bounds.vocab - 1}]")
    count = len(value)
    if count >= bounds.context_length:
        raise BadRequestError(
            f"The input ({count} tokens) is longer than the model's context length ({bounds.context_length} tokens)."
        )
    if count >= bounds.max_total_tokens:
        raise BadRequestError(
            f"Input length ({count} tokens) exceeds the maximum allowed length ({bounds.max_total_tokens - 1} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    return value


def _max_new_tokens(value: Any, inputs: int, bounds: ModelBounds) -> int:
    if value is None:
        return min(DEFAULT_NEW_TOKENS, bounds.context_length - inputs, bounds.max_total_tokens - inputs)
    if not isinstance(value, int) or value < 0:
        raise BadRequestError(f"max_new_tokens must be at least 0, got {value}.")
    total = inputs + value
    if total > bounds.context_length:
        raise BadRequestError(
            f"Requested token count exceeds the model's maximum context length of {bounds.context_length} tokens. "
            f"You requested a total of {total} tokens: {inputs} tokens from the input messages and {value} tokens for "
            "the completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )
    return value


def make_request(
    body: GenerateBody, *, rid: str, seed: int, arrived_s: float, on_finish: Callable[[Request], None]
) -> Request:
    """The scheduler's request for a checked body; ``seed`` is used where the body has none."""
    chosen = seed if body.seed is None else body.seed
    return Request(
        rid=rid,
        tokens=np.array(body.input_ids, np.int32),
        max_new_tokens=body.max_new_tokens,
        stop_ids=body.stop_ids,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=chosen & (2**64 - 1),
        logprob_start=body.logprob_start,
        on_finish=on_finish,
        arrived_s=arrived_s,
    )


def text_ids(body: GenerateBody, request: Request) -> list[int]:
    """The ids that the answer's text is of: a stop token is not part of it unless that is asked for."""
    ids: list[int] = request.tokens[request.prompt_length :].tolist()
    return ids[:-1] if request.finish["type"] == "stop" and not body.no_stop_trim else ids


def write_answer(body: GenerateBody, request: Request, *, text: str, epoch_s: float) -> dict[str, Any]:
    """The ``/generate`` answer of a finished request. ``epoch_s`` is the time of day at 0 of the request's clock."""
    n = request.prompt_length
    output_ids = request.tokens[n:].tolist()
    admitted = request.admitted_s if request.admitted_s is not None else request.finished_s
    versions = request.versions
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "prompt_tokens": n,
        "completion_tokens": len(output_ids),
        "cached_tokens": request.cached_tokens,
        "cached_tokens_details": None,
        "reasoning_tokens": 0,
        "weight_version": versions[-1]["version"],
        "weight_versions": versions,
        "num_retractions": request.retractions,
        "queue_time": admitted - request.arrived_s,
        "e2e_latency": request.finished_s - request.arrived_s,
        "dp_rank": None,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "request_received_ts": epoch_s + request.arrived_s,
        "api_server_dispatch_finish_ts": epoch_s + request.arrived_s,
        "request_finished_ts": epoch_s + request.finished_s,
        "response_sent_to_client_ts": epoch_s + request.finished_s,
    }
    if request.admitted_s is not None:
        meta["forward_entry_time"] = epoch_s + request.admitted_s
    if request.first_token_s is not None:
        meta["prefill_finished_time"] = epoch_s + request.first_token_s
        meta["first_token_latency"] = request.first_token_s - request.arrived_s
        decoding = request.finished_s - request.first_token_s
        if len(output_ids) > 1 and decoding > 0:
            meta["decode_throughput"] = (len(output_ids) - 1) / decoding
    if body.return_logprob:
        logprobs = request.logprobs[n:].tolist()
        meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(logprobs, output_ids, strict=True)]
        meta["output_token_logprobs_length"] = len(output_ids)
        meta["input_token_logprobs"] = _input_logprobs(body, request)
    return {"text": text, "output_ids": output_ids, "meta_info": meta}


def _input_logprobs(body: GenerateBody, request: Request) -> list[list[Any]]:
    if body.logprob_start is None or request.admitted_s is None:
        return []
    start = body.logprob_start
    ids = request.tokens[start : request.prompt_length].tolist()
    logprobs = request.logprobs[start + 1 : request.prompt_length].tolist()
    return [[None, ids[0], None], *([p, t, None] for p, t in zip(logprobs, ids[1:], strict=True))]
