"""Whether an SGLang server that somebody else runs is fit for a farm: asked by HTTP before anything starts.

Log-probs. Unless ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set, SGLang's are of the distribution that the temperature
leaves, not the policy's own, and nothing in its answers says so. A probe tells: the same prompt, once greedily (then
they are always the policy's own) and once at a temperature near 0, where a tempered log-prob is near 0 as well and the
policy's own is as before. Only a token that is not certain anyway says something, hence several prompts.

The model. A server takes only weights of the model that it was started with. It names its architecture and the folder
of its model; what that folder says of sizes is compared where it can be read from here. What is left (a model known to
the server alone, of the same architecture and another size) shows when it is loaded, which :mod:`farm.fleet` waits for.
"""

from __future__ import annotations

import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.types import SamplingParams

_PROBE_S = 5.0
_SAMPLE_S = 15.0
_COLD = 0.001
_UNCERTAIN = -0.2  # a log-prob above it is near 0 at any temperature
_PROMPTS = range(1, 9)  # single ids that any vocabulary has

# Of config.json: what the shapes of the weights follow from.
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "num_experts", "num_local_experts", "moe_intermediate_size",
)  # fmt: skip

_log = logging.getLogger(__name__)


def check_server(url: str, *, where: str, policy: Path, prompt_tokens: int, sampling: SamplingParams) -> None:
    """Raises ``UsageError`` when no SGLang server answers at ``url`` (given at ``where``), when it serves another model
    than that of the Hugging Face folder ``policy``, does not take prompts of ``prompt_tokens``, counts nothing, or
    would give log-probs of another distribution than the policy's under ``sampling``."""
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{where}: {url!r} must start with http:// or https://, for example http://127.0.0.1:30000")
    try:
        model = dict(json.loads(_get(f"{url}/model_info")))
        info = json.loads(_get(f"{url}/server_info"))
        longest = int(info["max_req_input_len"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where}: {url}: no SGLang server answers there ({error}); start it, or correct the address"
        ) from None
    if difference := other_model(model, policy):
        raise UsageError(
            f"{where}: {url}: serves another model than the policy {policy} ({difference}), so it can't load it; "
            f"start it with --model-path {policy}, or name the policy that it is to serve with --policy"
        )
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


def other_model(info: Mapping[str, Any], policy: Path) -> str:
    """What tells the model of a server, by its ``/model_info``, from the one in the folder ``policy``; empty: nothing
    that can be seen from here."""
    ours = _config(policy)
    theirs = {key: info.get(key) for key in ("architectures", "model_type")}
    theirs |= {key: value for key, value in _config(Path(str(info.get("model_path")))).items() if key in _SIZES}
    for key, value in theirs.items():
        wanted = ours.get(key)
        if None not in (value, wanted) and value != wanted:
            return f"its {key} is {_short(value)}, the policy's {_short(wanted)}"
    return ""


def _config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model; empty where it can't be read, as that of a model on another host."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


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
