"""What the twin predicts of each claim. A figure that went in is marked so and never counts as reproduced.

A prediction agrees with the reported figure within a third where it hangs on a configuration that was not published
(seconds, rates, their ratios), and within a tenth where data sheets determine it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.twin import calibration, scenarios
from harness.twin.calibration import Inputs
from harness.twin.result import Result
from harness.twin.scenario import Scenario
from harness.twin.sensitivity import Ranges
from harness.twin.simulate import simulate
from harness.twin.thrash import thrash

REPORTED = {
    "uncapped_step_s": 850.0,
    "capped_step_s": 284.0,
    "step_ratio": 3.0,
    "local_per_hour": 860.0,
    "cloud_per_hour": 3480.0,
    "throughput_ratio": 4.0,
    "kv_peak_percent": 23.0,
    "capacity_tokens": 1.5e6,
}
"""The reported figures that are predicted; used to judge, never as an input."""

WITHIN = 1 / 3
WITHIN_SHEET = 0.1

NO_RANGE = "not computed for this twin and these inputs; `python -m harness.twin sensitivity` does it"

_START_SLOWDOWN = 4.6  # of the host at the reference's load: a first guess
_START_TRIES = 5
_START_PRECISION = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinCell:
    """One prediction. ``low``, ``high``: over a fifth up and down of every input, where that was computed. ``kind``:
    "prediction", or "calibration" for a figure that went in. ``agrees``: by ``rule``; None when it can't be judged."""

    value: float
    unit: str
    text: str
    kind: str = "prediction"
    low: float | None = None
    high: float | None = None
    agrees: bool | None = None
    rule: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "value": _rounded(self.value),
            "low": None if self.low is None else _rounded(self.low),
            "high": None if self.high is None else _rounded(self.high),
            "unit": self.unit,
            "text": self.text,
            "kind": self.kind,
            "agrees": self.agrees,
            "rule": self.rule,
            "detail": dict(self.detail),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizons:
    """Simulated seconds, and of these how many fill the pipeline first: ``long_*`` without a cap, where one trajectory
    may take hours. ``SHORT`` is for the sensitivity."""

    cloud_s: float
    cloud_warm_s: float
    slow_s: float
    slow_warm_s: float
    long_s: float
    long_warm_s: float
    start_s: float


FULL = Horizons(
    cloud_s=9_000.0, cloud_warm_s=1_800.0, slow_s=18_000.0, slow_warm_s=4_500.0, long_s=43_200.0, long_warm_s=14_400.0,
    start_s=5_400.0,
)  # fmt: skip
SHORT = Horizons(
    cloud_s=3_000.0, cloud_warm_s=1_200.0, slow_s=6_600.0, slow_warm_s=2_400.0, long_s=18_000.0, long_warm_s=9_000.0,
    start_s=2_400.0,
)  # fmt: skip


class Runs:
    """The simulations behind the figures, each made when it is first asked for."""

    def __init__(self, inputs: Inputs, horizons: Horizons = FULL) -> None:
        self.inputs = inputs
        self._horizons = horizons
        self._start_work_s: float | None = None
        self._results: dict[str, Result] = {}

    def cloud(self) -> Result:
        """Capped, cloud sandboxes: the reference's final set-up."""
        return self._fast("cloud", scenarios.reference(self.inputs, name="cloud", horizon_s=self._horizons.cloud_s))

    def sync(self) -> Result:
        return self._slow("sync", mode="sync")

    def uncapped(self) -> Result:
        """Nothing but the model's context ends a trajectory's tokens, and nothing guards the engines."""
        return self._long("uncapped", guarded=False)

    def uncapped_guarded(self) -> Result:
        """The same work with the farm's admission and flight control."""
        return self._long("uncapped, guarded", guarded=True)

    def local(self) -> Result:
        """Capped, sandboxes on the inference node's own processors."""
        return self._slow("local", sandboxes="local", local_start_work_s=self.start_work_s())

    def start_work_s(self) -> float:
        """CPU work of one local start, such that its median under this load is the reported one (which went in)."""
        if self._start_work_s is None:
            wanted_s = self.inputs["local_start_s"]
            work_s = wanted_s / _START_SLOWDOWN
            for _ in range(_START_TRIES):
                scenario = scenarios.reference(
                    self.inputs,
                    name="start",
                    sandboxes="local",
                    local_start_work_s=work_s,
                    horizon_s=self._horizons.start_s,
                )
                found_s = simulate(scenario, warm_up_s=self._horizons.start_s / 3).start_s()
                work_s *= wanted_s / found_s
                if abs(found_s / wanted_s - 1.0) < _START_PRECISION:
                    break
            self._start_work_s = work_s
        return self._start_work_s

    def _slow(self, name: str, **settings: Any) -> Result:
        scenario = scenarios.reference(self.inputs, name=name, horizon_s=self._horizons.slow_s, **settings)
        return self._run(name, scenario, self._horizons.slow_warm_s)

    def _long(self, name: str, *, guarded: bool) -> Result:
        scenario = scenarios.reference(
            self.inputs, name=name, capped=False, guarded=guarded, horizon_s=self._horizons.long_s
        )
        return self._run(name, scenario, self._horizons.long_warm_s)

    def _fast(self, name: str, scenario: Scenario) -> Result:
        return self._run(name, scenario, self._horizons.cloud_warm_s)

    def _run(self, name: str, scenario: Scenario, warm_up_s: float) -> Result:
        if name not in self._results:
            self._results[name] = simulate(scenario, warm_up_s=warm_up_s)
        return self._results[name]


FIGURES: Mapping[str, Callable[[Runs], float]] = {
    "capacity_tokens": lambda runs: float(scenarios.kv_tokens(runs.inputs)),
    "push_s": lambda runs: runs.inputs.shape.weight_bytes / runs.inputs["push_bytes_per_s"],
    "cloud_per_hour": lambda runs: runs.cloud().per_hour(),
    "capped_step_s": lambda runs: runs.cloud().step_s(),
    "kv_peak_percent": lambda runs: 100.0 * runs.cloud().peak_seen(),
    "local_per_hour": lambda runs: runs.local().per_hour(),
    "throughput_ratio": lambda runs: runs.cloud().per_hour() / runs.local().per_hour(),
    "uncapped_step_s": lambda runs: runs.uncapped().step_s(),
    "step_ratio": lambda runs: runs.uncapped().step_s() / runs.cloud().step_s(),
}
"""The headline figures: functions of the inputs alone, so that the sensitivity can ask for them again."""


def predictions(
    inputs: Inputs | None = None, *, ranges: Ranges | None = None, horizons: Horizons = FULL
) -> dict[str, TwinCell]:
    """Claim id -> prediction, at the reference's scale. ``ranges``: from :mod:`harness.twin.sensitivity`."""
    inputs = inputs or calibration.load()
    runs = Runs(inputs, horizons)
    make = _Maker(runs, ranges)
    return {
        "steptime-cap": make.step_time(),
        "cap-harmless": make.cap_harmless(),
        "async-step": make.async_step(),
        "throughput": make.throughput(),
        "sandbox-start": make.sandbox_start(),
        "kv-headroom": make.kv_headroom(),
        "kv-thrash": make.kv_thrash(),
        "separation": make.separation(),
    }


@dataclass(frozen=True, slots=True)
class _Maker:
    runs: Runs
    ranges: Ranges | None

    def step_time(self) -> TwinCell:
        ratio, capped, uncapped = (self._value(n) for n in ("step_ratio", "capped_step_s", "uncapped_step_s"))
        agree = {name: _near(name, value, WITHIN) for name, value in
                 (("uncapped_step_s", uncapped), ("capped_step_s", capped), ("step_ratio", ratio))}  # fmt: skip
        guarded = self.runs.uncapped_guarded()
        run = self.runs.uncapped()
        return self._cell(
            "step_ratio",
            unit="x",
            text=f"{uncapped:.0f} s to {capped:.0f} s ({ratio:.1f}x)",
            agrees=all(agree.values()),
            rule="agrees when both step times and their ratio are within a third of the reported ones",
            detail={
                "uncapped_step_s": self._range("uncapped_step_s", uncapped),
                "capped_step_s": self._range("capped_step_s", capped),
                "agree": agree,
                "uncapped_generation_timeouts": run.failures["engine/timeout"],
                "uncapped_retractions": sum(engine.retracted for engine in run.engines),
                "uncapped_peak_use_percent": _rounded(100 * run.peak_use()),
                "uncapped_with_the_farms_admission_step_s": _rounded(guarded.step_s()),
                "steps": {"uncapped": len(run.steps), "capped": len(self.runs.cloud().steps)},
            },
        )

    def cap_harmless(self) -> TwinCell:
        cap = self.runs.inputs["cap_tokens"]
        passed = [landing for landing in self.runs.uncapped().landings if landing.reward > 0]
        beyond = 100.0 * sum(landing.tokens > cap for landing in passed) / max(1, len(passed))
        return TwinCell(
            value=beyond,
            unit="% of successes beyond the cap",
            text=f"{beyond:.1f} % of successes are longer than {cap:.0f} tokens",
            rule="not judged: in the twin a success does not depend on its length, in reality long ones succeed less",
            detail={"successes": len(passed)},
        )

    def async_step(self) -> TwinCell:
        slow, fast = self.runs.sync().step_s(), self.runs.cloud().step_s()
        return TwinCell(
            value=slow / fast,
            unit="x",
            text=f"{slow:.0f} s synchronous, {fast:.0f} s asynchronous ({slow / fast:.1f}x)",
            agrees=slow > fast,
            rule="agrees when the synchronous step takes longer",
        )

    def throughput(self) -> TwinCell:
        ratio, local, cloud = (self._value(n) for n in ("throughput_ratio", "local_per_hour", "cloud_per_hour"))
        agree = {name: _near(name, value, WITHIN) for name, value in
                 (("local_per_hour", local), ("cloud_per_hour", cloud), ("throughput_ratio", ratio))}  # fmt: skip
        return self._cell(
            "throughput_ratio",
            unit="x",
            text=f"{local:,.0f} to {cloud:,.0f} per hour ({ratio:.1f}x)",
            agrees=all(agree.values()),
            rule="agrees when both rates and their ratio are within a third of the reported ones",
            detail={
                "local_per_hour": self._range("local_per_hour", local),
                "cloud_per_hour": self._range("cloud_per_hour", cloud),
                "agree": agree,
                "mean_trajectory_s": {
                    "local": _rounded(self.runs.local().trajectory_s()),
                    "cloud": _rounded(self.runs.cloud().trajectory_s()),
                },
                "local_start_work_s": _rounded(self.runs.start_work_s()),
            },
        )

    def sandbox_start(self) -> TwinCell:
        inputs = self.runs.inputs
        return TwinCell(
            value=inputs["cloud_start_s"],
            unit="s",
            kind="calibration",
            text=f"went in: {inputs['cloud_start_s']:g} s against {inputs['local_start_s']:g} s",
            rule="went in, so it can't be reproduced",
            detail={
                "came_out_s": {
                    "cloud": _rounded(self.runs.cloud().start_s()),
                    "local": _rounded(self.runs.local().start_s()),
                }
            },
        )

    def kv_headroom(self) -> TwinCell:
        peak, capacity = self._value("kv_peak_percent"), self._value("capacity_tokens")
        run = self.runs.cloud()
        queue = sum(e.queue_s for e in run.engines) / (len(run.engines) * (run.ended_at_s - run.warm_up_s))
        agree = {
            "kv_peak_percent": round(peak) <= REPORTED["kv_peak_percent"],
            "queue": run.peak_queued() == 0,
            "capacity_tokens": _near("capacity_tokens", capacity, WITHIN_SHEET),
        }
        return self._cell(
            "kv_peak_percent",
            unit="%",
            text=f"peak {peak:.1f} % of {capacity / 1e6:.2f} M tokens, queue {run.peak_queued()}",
            agrees=all(agree.values()),
            rule="agrees when the peak seen is, in whole percent, at most 23, the queue empty and the capacity within "
            "a tenth of 1.5 M",
            detail={
                "capacity_tokens": self._range("capacity_tokens", capacity),
                "kv_bytes_per_token": self.runs.inputs.shape.kv_bytes_per_token,
                "weight_bytes": self.runs.inputs.shape.weight_bytes,
                "mean_use_percent": _rounded(100 * run.mean_use()),
                "momentary_peak_percent": _rounded(100 * run.peak_use()),
                "peak": "the highest of the engines' metrics every 5 s; right after a weight update, which drops all "
                "prefixes, it is higher for a moment",
                "mean_queue": _rounded(queue),
                "agree": agree,
            },
        )

    def kv_thrash(self) -> TwinCell:
        found = thrash(self.runs.inputs)
        agrees = abs(found.filled - 10) <= 1 and found.blocked >= 0.9 * found.others and not found.guarded_timeouts
        return TwinCell(
            value=float(found.filled),
            unit="generations",
            text=f"{found.filled} block {found.blocked} of {found.others}",
            agrees=agrees,
            rule="agrees when 9 to 11 generations fill the cache, nine tenths of the others get no token before they "
            "time out, and with the farm's cap and admission nothing times out",
            detail={
                "timeout_s": found.timeout_s,
                "retractions": found.retractions,
                "with_cap_and_admission": {
                    "longest_generation_s": _rounded(found.guarded_longest_s),
                    "timeouts": found.guarded_timeouts,
                    "landed": found.guarded_landed,
                },
                "went_in": "the lengths (113K to 186K tokens) and the number of requests (109)",
            },
        )

    def separation(self) -> TwinCell:
        push_s = self._value("push_s")
        return self._cell(
            "push_s",
            unit="s",
            text=f"{push_s:.0f} s for {self.runs.inputs.shape.weight_bytes / 1e9:.0f} GB to every engine",
            rule="not judged: nothing was reported",
        )

    # ------------------------------------------------------------------------------------- inside

    def _value(self, name: str) -> float:
        return FIGURES[name](self.runs)

    def _cell(self, name: str, **settings: Any) -> TwinCell:
        value = self._value(name)
        cell = TwinCell(value=value, **settings)
        if self.ranges is None or name not in self.ranges.spans:
            return replace(cell, detail={**cell.detail, "range": NO_RANGE})
        low, high = self.ranges.around(name, value)
        detail = {**cell.detail, "moves_it_most": self.ranges.strongest(name)}
        return replace(cell, low=low, high=high, detail=detail)

    def _range(self, name: str, value: float) -> dict[str, Any]:
        found: dict[str, Any] = {"value": _rounded(value), "reported": REPORTED.get(name)}
        if self.ranges is not None and name in self.ranges.spans:
            low, high = self.ranges.around(name, value)
            found |= {"low": _rounded(low), "high": _rounded(high), "moves_it_most": self.ranges.strongest(name)}
        return found


def _near(name: str, value: float, share: float) -> bool:
    """Within ``share`` of the reported figure, as a factor in either direction."""
    factor = value / REPORTED[name]
    return 1.0 / (1.0 + share) <= factor <= 1.0 + share


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
