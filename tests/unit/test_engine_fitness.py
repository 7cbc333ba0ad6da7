"""What is checked of a server that somebody else runs, on one that answers as it is told to."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from farm.engine.fitness import check_server, tempered, tempers
from farm.errors import UsageError
from farm.types import SamplingParams

LOGITS = (1.0, 0.4, 0.3, -2.0)
CERTAIN = (50.0, 0.0, 0.0, 0.0)


def logprobs(logits: tuple[float, ...], temperature: float) -> list[float]:
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    total = top + math.log(sum(math.exp(x - top) for x in scaled))
    return [x - total for x in scaled]


class Server:
    def __init__(
        self,
        *,
        logits: tuple[float, ...] = LOGITS,
        own: bool = True,
        metrics: bool = True,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = ""
        self.asked = 0
        self._logits = logits
        self._own = own
        self._metrics = metrics
        self._model = model or {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/metrics":
            return (200, {}) if self._metrics else (404, {})
        if path == "/model_info":
            return 200, self._model
        if path != "/generate":
            return 200, {"max_req_input_len": 506, "context_length": 512}
        self.asked += 1
        if not self._logits:
            return 500, {}
        temperature = body["sampling_params"]["temperature"] or 1.0
        shown = logprobs(self._logits, 1.0 if self._own else temperature)
        return 200, {"meta_info": {"output_token_logprobs": [[shown[0], 0, None]]}}


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            status, value = server.answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as the base class names it
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join()


def check(server: Server, *, policy: Path = Path("nowhere"), prompt_tokens: int = 500, **sampling: Any) -> None:
    params = SamplingParams(**sampling)
    with serving(server) as url:
        check_server(url + "/", where="engine.urls", policy=policy, prompt_tokens=prompt_tokens, sampling=params)


def model_folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 571, **config}))
    return path


def test_a_fit_server_passes() -> None:
    check(Server(), temperature=0.5)
    check(Server(), prompt_tokens=506, top_p=0.9)


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 20}])
def test_tempered_log_probs_are_refused_where_they_would_be_trained_on(sampling: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        check(Server(own=False), **sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_sampled_from_the_policy_itself_needs_no_probe(temperature: float) -> None:
    server = Server(own=False)
    check(server, temperature=temperature)
    assert server.asked == 0


def test_a_certain_policy_says_nothing_and_is_not_refused() -> None:
    server = Server(own=False, logits=CERTAIN)
    check(server, temperature=0.5)
    assert server.asked > 2, "several prompts were tried"


def test_a_server_that_does_not_sample_is_not_refused() -> None:
    with serving(Server(logits=())) as url:
        assert not tempers(url)


def test_rounding_is_not_tempering() -> None:
    assert not tempered(-1.0, -0.98)
    assert tempered(-1.0, -0.01)


def test_a_server_of_another_model_is_refused(tmp_path: Path) -> None:
    policy = model_folder(tmp_path / "policy", hidden_size=128, rope_theta=1.0)
    large = {"model_path": "Qwen/Qwen3-30B-A3B", "architectures": ["Qwen3MoeForCausalLM"]}
    told = r"another model .*policy .*its architectures is Qwen3MoeForCausalLM, the policy's Qwen3ForCausalLM.*--policy"
    with pytest.raises(UsageError, match=told):
        check(Server(model=large), policy=policy)
    wider = model_folder(tmp_path / "wider", hidden_size=256)
    with pytest.raises(UsageError, match="its hidden_size is 256, the policy's 128"):
        check(Server(model={"model_path": str(wider), "architectures": ["Qwen3ForCausalLM"]}), policy=policy)
    with pytest.raises(UsageError, match="its model_type is llama, the policy's qwen3"):
        check(Server(model={"model_type": "llama"}), policy=model_folder(tmp_path / "typed", model_type="qwen3"))


def test_a_server_of_the_policys_model_or_of_one_that_can_not_be_read_here_passes(tmp_path: Path) -> None:
    policy = model_folder(tmp_path / "policy", hidden_size=128, rope_theta=1.0)
    trained = model_folder(tmp_path / "trained", hidden_size=128, rope_theta=2.0, transformers_version="5")
    for path in (str(trained), "/models/elsewhere", "Qwen/Qwen3-8B"):
        check(Server(model={"model_path": path, "architectures": ["Qwen3ForCausalLM"]}), policy=policy)


def test_a_server_without_counters_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has no /metrics .*--enable-metrics"):
        check(Server(metrics=False))


def test_a_server_with_too_short_a_context_is_refused() -> None:
    with pytest.raises(UsageError, match=r"prompts of 506 tokens, episodes may need 511; .*--context-length 517"):
        check(Server(), prompt_tokens=511)


@pytest.mark.parametrize(("url", "message"), [("x:1", "must start with http"), ("http://127.0.0.1:9", "no SGLang")])
def test_what_is_no_server_is_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_server(url, where="engine.urls", policy=Path("nowhere"), prompt_tokens=1, sampling=SamplingParams())
