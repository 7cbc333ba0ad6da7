"""Prometheus metrics under SGLang's names, read from the scheduler when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from farm.engine.embedded.request import Request

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """One server's metrics. ``gauges`` and ``counters`` are called at each scrape and return name -> (help, value)."""

    def __init__(
        self,
        *,
        model_name: str,
        gauges: Callable[[], dict[str, tuple[str, float]]],
        counters: Callable[[], dict[str, tuple[str, float]]],
    ) -> None:
        disable_created_metrics()  # SGLang has none
        self._labels = ["model_name"]
        self._model_name = model_name
        self._gauges = gauges
        self._counters = counters
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to first token")
        self._queue = self._histogram("queue_time_seconds", "Time in the waiting queue")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Request latency, end to end")

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(f"sglang:{name}", text, self._labels, registry=self._registry, buckets=_SECONDS)
        return histogram.labels(self._model_name)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        for name, (text, value) in self._gauges().items():
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=self._labels)
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (text, value) in self._counters().items():
            counter = CounterMetricFamily(f"sglang:{name}", text, labels=self._labels)
            counter.add_metric([self._model_name], value)
            yield counter

    def observe(self, request: Request) -> None:
        """Count a finished request's times."""
        self._e2e.observe(request.finished_s - request.arrived_s)
        if request.admitted_s is not None:
            self._queue.observe(request.admitted_s - request.arrived_s)
        if request.first_token_s is not None:
            self._first_token.observe(request.first_token_s - request.arrived_s)

    def text(self) -> bytes:
        """The exposition, format 0.0.4."""
        return generate_latest(self._registry)
