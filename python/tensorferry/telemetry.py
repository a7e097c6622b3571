"""TensorFerry's metrics and calls in OpenTelemetry, for programs that use it: needs ``opentelemetry-api``.

:func:`export_metrics` gives an agent's metrics to a meter. :func:`traced` carries the caller's span to the callee, as a
W3C ``traceparent``, so that the spans of both are of one trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from . import metrics
from .agent import living

__all__ = ["TracedCall", "export_metrics", "traced"]


def _api() -> tuple[Any, Any, Any]:
    """Returns the modules of OpenTelemetry's API: metrics, trace, propagation.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics as api
        from opentelemetry import propagate, trace
    except ImportError as error:
        raise ImportError("tensorferry.telemetry needs OpenTelemetry: pip install opentelemetry-api") from error
    return api, trace, propagate


def _observe(metric: metrics.Metric, part: str, options: Any, observation: Any) -> Iterable[Any]:
    for agent in living():
        for sample in metrics.take(agent):
            if sample.metric != metric:
                continue
            labels = {"agent": agent.name, **dict(zip(metric.labels, sample.labels, strict=True))}
            value = sample.value
            if isinstance(value, metrics.Histogram):
                value = value.sum if part == "sum" else value.count
            yield observation(value, labels)


def export_metrics(meter: Any = None) -> None:
    """Gives all metrics of this process's agents to OpenTelemetry, under the names of docs/metrics.md.

    The instruments are observed when the program's exporter collects. OpenTelemetry has no histogram that can be
    observed, so a histogram becomes two counters, ``..._sum`` and ``..._count``. Call it once, after the sources of
    further metrics were added.

    Args:
        meter: OpenTelemetry's meter; None: that of the global provider.

    Raises:
        ImportError: opentelemetry-api is not installed.

    Example::

        from tensorferry import telemetry

        telemetry.export_metrics()
    """
    api, *_ = _api()
    if meter is None:
        meter = api.get_meter("tensorferry")
    units = {"bytes": "By", "seconds": "s", "": "1"}
    for metric in metrics.all_metrics():
        parts = ("sum", "count") if metric.kind == "histogram" else ("",)
        make = meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
        for part in parts:
            read = functools.partial(_observe, metric, part, observation=api.Observation)
            make(
                f"{metric.name}_{part}" if part else metric.name,
                [read],
                unit="1" if part == "count" else units[metric.unit],
                description=metric.help,
            )


class TracedCall:
    """A function with the trace context of its caller; :func:`traced` makes it. At the callee, it runs the function in
    a span of kind SERVER, a child of the caller's span."""

    def __init__(self, fn: Callable[..., Any], carrier: dict[str, str]) -> None:
        self.fn = fn
        self.carrier = carrier
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            _, trace, propagate = _api()
        except ImportError:  # the callee has none: the function runs without a span
            return self.fn(*args, **kwargs)
        tracer = trace.get_tracer("tensorferry")
        context = propagate.extract(self.carrier)
        about = {"rpc.system": "tensorferry", "rpc.method": self.__name__}
        with tracer.start_as_current_span(self.__name__, context=context, kind=trace.SpanKind.SERVER, attributes=about):
            return self.fn(*args, **kwargs)


def traced(fn: Callable[..., Any]) -> TracedCall:
    """Returns ``fn`` with the trace context of the current span, to be called at a peer in its place.

    The context goes as OpenTelemetry's propagators write it: by default as W3C ``traceparent`` and ``baggage``. The
    function is found at the peer by its module and name, as always. A peer with ``trust="registered"`` refuses the
    call. A peer without OpenTelemetry runs the function without a span.

    Args:
        fn: a function that the peer can import, which is no coroutine.

    Raises:
        ImportError: opentelemetry-api is not installed.

    Example::

        from tensorferry import telemetry

        with tracer.start_as_current_span("step"):
            loss = rpc.rpc_sync("worker1", telemetry.traced(compute_loss), args=(batch,))
    """
    *_, propagate = _api()
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return TracedCall(fn, carrier)
