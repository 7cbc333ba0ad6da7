"""One generation request inside the server, from arrival to its finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What was asked for, and what the scheduler keeps about it. Times are ``time.perf_counter()`` seconds.

    ``tokens`` is the prompt followed by everything sampled so far, valid while the request is *not* running (a running
    request's tokens are in its row); ``logprobs`` runs along with it.
    """

    rid: str
    tokens: NDArray[np.int32]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    logprob_start: int | None  # input log-probs from this position on; None for none
    on_finish: Callable[[Request], None]
    arrived_s: float

    prompt_length: int = field(init=False)
    logprobs: NDArray[np.float32] = field(init=False)
    version_changes: list[tuple[str, int]] = field(
        default_factory=list
    )  # (version left, tokens sampled under it so far)
    retractions: int = 0
    cached_tokens: int = 0
    sequence: int = 0  # order of admission
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float = 0.0
    finish: dict[str, Any] = field(default_factory=dict)
    versions: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.logprobs = np.zeros(self.prompt_length, np.float32)

    @property
    def end(self) -> int:
        """The number of tokens, prompt included, at which the request is finished by length."""
        return self.prompt_length + self.max_new_tokens

    @property
    def scoring_from(self) -> int | None:
        """Where input log-probs are still to be computed from: once a token was sampled they are all there."""
        return self.logprob_start if len(self.tokens) == self.prompt_length else None


def version_spans(changes: list[tuple[str, int]], current: str, sampled: int) -> list[dict[str, Any]]:
    """SGLang's ``weight_versions``: which version sampled tokens [start, end), equal neighbours merged."""
    spans: list[dict[str, Any]] = []
    for version, end in [*changes, (current, sampled)]:
        end = min(end, sampled)
        if spans and end <= spans[-1]["end"]:
            continue
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = end
        else:
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
    return spans
