"""The registry and its exposition."""

from __future__ import annotations

import urllib.request

import pytest

from headrace.connectors.kafka_node import free_port
from headrace.pipeline.runtime.metrics import Registry, StageMetrics, serve_if_asked


def test_counters_add_and_gauges_are_set() -> None:
    registry = Registry()
    metrics = StageMetrics(registry, "assemble")
    metrics.count("dropped_total", topic="t", reason="late")
    metrics.count("dropped_total", 2, topic="t", reason="late")
    metrics.gauge("open_groups", 4)
    metrics.gauge("open_groups", 3)
    assert registry.value("dropped_total", stage="assemble", topic="t", reason="late") == 3
    assert registry.value("open_groups", stage="assemble") == 3


def test_nothing_is_served_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_METRICS_PORT", raising=False)
    assert not serve_if_asked(Registry())


def test_prometheus_reads_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("HEADRACE_METRICS_PORT", str(port))
    registry = Registry()
    StageMetrics(registry, "batch").count("records_total", 5)
    StageMetrics(registry, "batch").gauge("lag_records", 7)
    assert serve_if_asked(registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    assert 'headrace_records_total{stage="batch"} 5.0' in text
    assert 'headrace_lag_records{stage="batch"} 7.0' in text
