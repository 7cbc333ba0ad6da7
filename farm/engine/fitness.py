"""Whether an SGLang server that somebody else runs is fit for a farm: asked by HTTP before anything starts.

Log-probs. Unless ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set, SGLang's are of the distribution that the temperature
leaves, not the policy's own, and nothing in its answers says so. A probe tells: the same prompt, once greedily (then
they are always the policy's own) and once at a temperature near 0, where a tempered log-prob is near 0 as well and the
policy's own is as before. Only a token that is not certain anyway says something, hence several prompts.
"""

from __future__ import annotations

import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from farm.errors import UsageError
from farm.types import SamplingParams

_PROBE_S = 5.0
_SAMPLE_S = 15.0
_COLD = 0.001
_UNCERTAIN = -0.2  # a log-prob above it is near 0 at any temperature
_PROMPTS = range(1, 9)  # single ids that any vocabulary has

_log = logging.getLogger(__name__)


def check_server(url: str, *, where: str, prompt_tokens: int, sampling: SamplingParams) -> None:
    """Raises ``UsageError`` when no SGLang server answers at ``url`` (given at ``where``), when it does not take
    prompts of ``prompt_tokens``, counts nothing, or would give log-probs of another distribution than the policy's
    under ``sampling``."""
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{where}: {url!r} must start with http:// or https://, for example http://127.0.0.1:30000")
    try:
        json.loads(_get(f"{url}/model_info"))
        info = json.loads(_get(f"{url}/server_info"))
        longest = int(info["max_req_input_len"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where}: {url}: no SGLang server answers there ({error}); start it, or correct the address"
        ) from None
    if longest < prompt_tokens:
        more = int(info.get("context_length") or longest) + prompt_tokens - longest
        raise UsageError(
            f"{where}: {url}: takes prompts of {longest} tokens, episodes may need {prompt_tokens}; start it with "
            f"--context-length {more} (and as much KV), or lower limits.max_context_tokens"
        )
    try:
        _get(f"{url}/metrics")
    except OSError as error:
        raise UsageError(f"{where}: {url}: has no /metrics ({error}); start it with --enable-metrics") from None
    if not _is_plain(sampling) and tempers(url):
        raise UsageError(
            f"{where}: {url}: its log-probs are not the policy's own at temperature {sampling.temperature:g} and top_p "
            f"{sampling.top_p:g}; start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment, or sample with "
            "rollout.temperature=1 and top_p=1"
        )


def tempered(own: float, cold: float) -> bool:
    """Whether ``cold``, the log-prob of a token near temperature 0, is another one than the policy's ``own``. Half-way
    is far beyond rounding (0.02 in bfloat16)."""
    return cold > own / 2


def _is_plain(sampling: SamplingParams) -> bool:
    """Whether what is sampled from is the policy itself, or nothing is drawn at all."""
    return sampling.temperature in (0.0, 1.0) and sampling.top_p == 1.0 and sampling.top_k == -1


def tempers(url: str) -> bool:
    """Whether the server's log-probs change with the temperature. False, and said in the log, when that can't be told:
    it is paused, say, and its pool will resume it."""
    try:
        for prompt in _PROMPTS:
            token, own = _sample(url, prompt, temperature=0.0)
            again, cold = _sample(url, prompt, temperature=_COLD)
            if token == again and own < _UNCERTAIN:
                return tempered(own, cold)
    except (OSError, ValueError, LookupError, TypeError) as error:
        _log.warning("%s: whether its log-probs are the policy's own could not be tested: %s", url, error)
        return False
    _log.warning("%s: its policy is certain of all it says; whether log-probs are its own could not be tested", url)
    return False


def _sample(url: str, prompt: int, *, temperature: float) -> tuple[int, float]:
    """One token and its log-prob."""
    params = {"temperature": temperature, "max_new_tokens": 1}
    body = {"input_ids": [prompt], "sampling_params": params, "return_logprob": True}
    answer = json.loads(_send(f"{url}/generate", body))
    logprob, token = answer["meta_info"]["output_token_logprobs"][0][:2]
    return int(token), float(logprob)


def _get(url: str) -> bytes:
    return _read(urllib.request.Request(url), _PROBE_S)


def _send(url: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return _read(urllib.request.Request(url, data, {"Content-Type": "application/json"}), _SAMPLE_S)


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            raw: bytes = answer.read()
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise OSError(f"HTTP {error.code} {error.reason}") from None
    return raw
