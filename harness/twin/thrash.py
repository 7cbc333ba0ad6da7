"""The thrash experiment at full size: endless generations on one engine, without a cap and with one (and admission).

Without: generations of the reported lengths fill the engine (how many that takes follows from its capacity) while the
other requests outstanding there come and go, turn after turn. Once the cache is full, whoever gets no token until the
time-out of one generation is blocked. With: the same share of runaways among the episodes of a whole farm around one
engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from farm.agent.caps import ENGINE_SHARE
from harness.twin import scenarios
from harness.twin.calibration import Inputs
from harness.twin.clock import Clock
from harness.twin.engine import EngineModel, Request
from harness.twin.simulate import simulate
from harness.twin.workload import ENDLESS

GUARDED_HORIZON_S = 3600.0
_GROUPS_PER_STEP = 8  # one engine feeds a smaller batch
_GROWN_TOKENS = 40_000  # what the endless ones still have to grow, when it begins, to the lengths that were reported
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thrash:
    """``filled``: endless generations of the reported lengths that the cache holds; of the ``others``, ``blocked`` got
    no token for ``timeout_s`` after it was full, which was ``full_at_s`` after the beginning. ``guarded_*``: the same
    share of runaways with the farm's cap and admission: the longest generation, and how many timed out."""

    filled: int
    others: int
    blocked: int
    timeout_s: float
    full_at_s: float
    retractions: int
    guarded_longest_s: float
    guarded_timeouts: int
    guarded_landed: int


def thrash(inputs: Inputs) -> Thrash:
    crowd = _Crowd(inputs)
    crowd.run()
    share = crowd.filled / inputs.count("outstanding")
    guarded = simulate(
        scenarios.reference(
            inputs.given(
                engines=1,
                concurrent=inputs["outstanding"],
                runaway=1.0 - (1.0 - share) ** (1.0 / inputs["turns_median"]),
                groups_per_step=_GROUPS_PER_STEP,
            ),
            name="thrash, guarded",
            horizon_s=GUARDED_HORIZON_S,
        )
    )
    return Thrash(
        filled=crowd.filled,
        others=len(crowd.last_token_s),
        blocked=crowd.blocked,
        timeout_s=crowd.timeout_s,
        full_at_s=crowd.full_at_s,
        retractions=crowd.engine.totals.retracted,
        guarded_longest_s=max((landing.engine_wait_s for landing in guarded.landings), default=float("nan")),
        guarded_timeouts=guarded.failures["engine/timeout"],
        guarded_landed=len(guarded.landings),
    )


class _Crowd:
    """Endless generations on one engine, and others that come back turn after turn."""

    def __init__(self, inputs: Inputs) -> None:
        self.clock = Clock()
        self.engine = EngineModel(self.clock, scenarios.speed(inputs), scenarios.kv_tokens(inputs))
        self.timeout_s = ENGINE_SHARE * inputs["agent_s"]
        self.full_at_s = float("inf")
        self.last_token_s: dict[str, float] = {}
        self.filled = 0
        self._inputs = inputs
        self._draw = np.random.default_rng(inputs.seed)
        self._turn_s = inputs["command_s"] + inputs["round_trip_s"]
        per_turn = inputs["output_tokens"] + inputs["observation_tokens"]
        self._context = inputs["prompt_tokens"] + inputs["turns_median"] / 2 * per_turn

    @property
    def blocked(self) -> int:
        """Others without a token since the cache was full."""
        return sum(at_s <= self.full_at_s for at_s in self.last_token_s.values())

    def run(self) -> None:
        inputs, engine = self._inputs, self.engine
        lengths: list[float] = []
        while sum(lengths) < engine.capacity_tokens:
            lengths.append(float(self._draw.uniform(inputs["runaway_tokens_low"], inputs["runaway_tokens_high"])))
        lengths.pop()  # the one that no longer fits
        self.filled = len(lengths)
        for number, tokens in enumerate(lengths):
            engine.submit(self._request(f"endless-{number}", tokens - _GROWN_TOKENS, ENDLESS))
        for number in range(inputs.count("outstanding") - self.filled):
            name = f"other-{number}"
            self.last_token_s[name] = 0.0
            self.clock.at(float(self._draw.uniform(0.0, self._turn_s)), self._ask, name)
        self.clock.at(_LOOK_S, self._look)
        self.clock.run(float("inf"))

    def _look(self, _: None) -> None:
        now_s = self.clock.now_s
        for request in self.engine.requests():
            if request.prefix in self.last_token_s and self.engine.sampled_by(request) > request.sampled:
                self.last_token_s[request.prefix] = now_s
        if self.full_at_s == float("inf") and self.engine.totals.retracted:
            self.full_at_s = now_s
        if now_s < self.full_at_s + self.timeout_s:
            self.clock.at(now_s + _LOOK_S, self._look)
        else:
            self.clock.stop()

    def _ask(self, name: str) -> None:
        self.engine.submit(self._request(name, self._context, self._inputs.count("output_tokens")))

    def _answered(self, request: Request) -> None:
        now_s = self.clock.now_s
        if request.prefix in self.last_token_s:
            self.last_token_s[request.prefix] = now_s
            self.clock.at(now_s + self._turn_s, self._ask, request.prefix)

    def _request(self, name: str, tokens: float, sample: int) -> Request:
        return Request(
            prefix=name,
            group=name,
            group_tokens=0,
            tokens=tokens,
            sample=sample,
            max_new_tokens=self._inputs.shape.context_length - int(tokens),
            on_done=self._answered,
        )
