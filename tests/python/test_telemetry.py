"""OpenTelemetry: metrics under the names of docs/metrics.md, and spans of caller and callee in one trace."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest
import tensorferry
from conftest import Agents
from tensorferry import telemetry

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("opentelemetry", "opentelemetry.sdk"))
needs_sdk = pytest.mark.skipif(not INSTALLED, reason="opentelemetry-sdk is not installed")
Pair = tuple[tensorferry.Agent, tensorferry.Agent]


def double(number: int) -> int:
    return 2 * number


@pytest.fixture
def without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides OpenTelemetry from this process."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


@pytest.mark.usefixtures("without_opentelemetry")
def test_without_opentelemetry_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match="pip install opentelemetry-api"):
        telemetry.traced(double)
    with pytest.raises(ImportError, match="pip install opentelemetry-api"):
        telemetry.export_metrics()


@pytest.mark.usefixtures("without_opentelemetry")
def test_a_callee_without_opentelemetry_runs_the_function_all_the_same(pair: Pair) -> None:
    call = telemetry.TracedCall(double, {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"})
    assert pair[0].rpc_sync("b", call, args=(4,)) == 8


@needs_sdk
def test_metrics_are_observed_with_their_labels(agents: Agents) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    a, _ = agents("a"), agents("b")
    reader = InMemoryMetricReader()
    telemetry.export_metrics(MeterProvider([reader]).get_meter("tested"))
    for _ in range(3):
        a.rpc_sync("b", os.getpid)
    data: Any = reader.get_metrics_data()
    found = {
        (metric.name, point.attributes["agent"], point.attributes.get("state")): (point.value, metric.unit)
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    assert found["tensorferry_calls_sent_total", "a", None] == (3, "1")
    assert found["tensorferry_call_seconds_count", "a", None] == (3, "1")
    assert found["tensorferry_call_seconds_sum", "a", None][1] == "s"
    assert found["tensorferry_links", "a", "up"] == (1, "1")


@needs_sdk
def test_the_callees_span_is_a_child_of_the_callers(pair: Pair) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("caller").start_as_current_span("step"):
        assert pair[0].rpc_sync("b", telemetry.traced(double), args=(4,)) == 8
    served, step = exporter.get_finished_spans()
    assert (served.name, step.name) == ("double", "step")
    assert served.context.trace_id == step.context.trace_id
    assert served.parent is not None and served.parent.span_id == step.context.span_id
    assert served.kind == trace.SpanKind.SERVER
