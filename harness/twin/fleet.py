"""The engines of a simulation behind the farm's own admission and the pool's own decisions.

The same moves as :class:`farm.pool.EnginePool`, in virtual time: an engine gets new episodes only while its own answer
names the wanted policy; to change it, it is paused, loaded, verified and resumed.
"""

from __future__ import annotations

from farm.admission import Admission, Ask, EngineCapacity, Grant
from farm.elastic import EngineView
from farm.pool import Move, next_move, serves
from farm.protocols import EngineInfo
from farm.types import PolicyVersion, version_name
from harness.twin.clock import Clock, Timeline
from harness.twin.engine import EngineModel
from harness.twin.scenario import Engines


def policy(step: int, *, published_at_s: float, consumed_groups: int) -> PolicyVersion:
    return PolicyVersion(
        step=step,
        path=f"/policies/{version_name(step)}",
        digest="",
        published_at_s=published_at_s,
        consumed_groups=consumed_groups,
    )


class FleetModel:
    """``live``: (step, seconds from its publication until it served) of each update of each engine."""

    def __init__(self, settings: Engines, clock: Clock, timeline: Timeline) -> None:
        self._settings = settings
        self._clock = clock
        self._timeline = timeline
        self._admission = Admission(overcommit=settings.overcommit)
        self.engines: dict[str, EngineModel] = {}
        self.live: list[tuple[int, float]] = []
        self._infos: dict[str, EngineInfo] = {}
        self._updating: set[str] = set()
        self._wanted = policy(0, published_at_s=0.0, consumed_groups=0)
        for number in range(settings.count):
            url = f"engine-{number}"
            self.engines[url] = EngineModel(
                timeline,
                settings.speed,
                settings.capacity_tokens,
                max_running=settings.max_running,
                shares_prefixes=not settings.shared_cpu,
            )
            self._infos[url] = self._info(self._wanted)
            self._serve(url)

    def place(self, key: str, *, group: str, tokens: int) -> Grant | None:
        return self._admission.place(Ask(key=key, group=group, tokens=tokens))

    def release(self, key: str) -> None:
        self._admission.release(key)

    def capacity(self, tokens: int) -> int:
        return sum(self._admission.capacity(url, tokens) for url in self.engines)

    def view(self) -> EngineView:
        engines = self.engines.values()
        return EngineView(
            queued=sum(engine.waiting for engine in engines),
            used_tokens=int(sum(engine.used_tokens for engine in engines)),
            max_total_tokens=self._settings.capacity_tokens * len(self.engines),
            retracted_total=sum(engine.totals.retracted for engine in engines),
        )

    def highest_use(self) -> float:
        """Of the fullest engine, as a share of its KV capacity."""
        return max(engine.used_tokens for engine in self.engines.values()) / self._settings.capacity_tokens

    # ------------------------------------------------------------------------------------- policies

    def want(self, version: PolicyVersion) -> None:
        if version.step <= self._wanted.step:
            return
        self._wanted = version
        for url in self.engines:
            self._visit(url)

    def _visit(self, url: str) -> None:
        if url in self._updating or next_move(self._infos[url], self._wanted) is not Move.UPDATE:
            return
        self._updating.add(url)
        self._admission.unverify(url)
        self.engines[url].pause()
        # An engine on the shared CPUs loads there; the load competes like everything else.
        self._timeline.at(self._timeline.now_s + self._settings.load_s, self._loaded, (url, self._wanted))

    def _loaded(self, update: tuple[str, PolicyVersion]) -> None:
        url, version = update
        self._infos[url] = self._info(version)
        assert serves(self._infos[url], version)
        self.engines[url].resume(version.step)
        self._updating.discard(url)
        self.live.append((version.step, self._clock.now_s - version.published_at_s))
        self._serve(url)
        self._visit(url)  # a newer one may be out by now

    def _serve(self, url: str) -> None:
        info = self._infos[url]
        capacity = EngineCapacity(
            budget_tokens=info.max_total_tokens, context_length=info.context_length, step=self.engines[url].step
        )
        self._admission.set_engine(url, capacity)

    def _info(self, version: PolicyVersion) -> EngineInfo:
        return EngineInfo(
            model_path=version.path,
            version=version.name,
            max_total_tokens=self._settings.capacity_tokens,
            context_length=self._settings.context_length,
            max_running_requests=self._settings.max_running,
        )
