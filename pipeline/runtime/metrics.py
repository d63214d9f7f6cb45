"""Counters and gauges of a process, in memory; shown by a log line and, when asked for, to Prometheus.

``HEADRACE_METRICS_PORT`` names the port of the exposition; without it nothing is loaded or opened. Names get the prefix
``headrace_``; every stage's metrics carry the label ``stage``.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any

from headrace.pipeline.runtime.stage import Metrics

__all__ = ("Registry", "StageMetrics", "serve_if_asked")

_PORT = "HEADRACE_METRICS_PORT"
Series = tuple[str, tuple[tuple[str, str], ...]]


class Registry:
    """Values of counters and gauges by name and labels; one per process, safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[Series, float] = {}
        self._gauges: dict[Series, float] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        series = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[series] = self._counters.get(series, 0.0) + value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[name, tuple(sorted(labels.items()))] = value

    def value(self, name: str, **labels: str) -> float:
        """The present value of a series, 0 when it does not exist."""
        series = (name, tuple(sorted(labels.items())))
        with self._lock:
            return self._counters.get(series, self._gauges.get(series, 0.0))

    def snapshot(self) -> tuple[dict[Series, float], dict[Series, float]]:
        """Copies of counters and gauges."""
        with self._lock:
            return dict(self._counters), dict(self._gauges)


class StageMetrics:
    """A registry seen by one stage: its series carry the label ``stage`` (stage.Metrics)."""

    def __init__(self, registry: Metrics, stage: str) -> None:
        self._registry = registry
        self._stage = stage

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self._registry.count(name, value, stage=self._stage, **labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._registry.gauge(name, value, stage=self._stage, **labels)


class _Exposition:
    """prometheus-client's view of a registry, made at every scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counters, gauges = self._registry.snapshot()
        for values, family in ((counters, CounterMetricFamily), (gauges, GaugeMetricFamily)):
            by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
            for (name, labels), value in values.items():
                by_name.setdefault(name, []).append((dict(labels), value))
            for name, series in sorted(by_name.items()):
                keys = sorted({key for labels, _ in series for key in labels})
                metric = family(f"headrace_{name}", name.replace("_", " "), labels=keys)
                for named, value in series:
                    metric.add_metric([named.get(key, "") for key in keys], value)
                yield metric


def serve_if_asked(registry: Registry) -> bool:
    """Expose the registry on the port in ``HEADRACE_METRICS_PORT``; False when the variable is not set."""
    port = os.environ.get(_PORT)
    if not port:
        return False
    from prometheus_client import CollectorRegistry, start_http_server

    exposed = CollectorRegistry()
    exposed.register(_Exposition(registry))
    start_http_server(int(port), registry=exposed)
    return True
