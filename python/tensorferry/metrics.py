"""Metrics of an agent: what is counted, under which names, and as the text that Prometheus reads.

:func:`tensorferry.rpc.metrics` takes them once; ``metrics_port=`` and ``metrics_file=`` of an agent export them
(docs/metrics.md). :func:`add_source` adds further ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["Histogram", "Metric", "Metrics", "Sample", "add_source", "all_metrics", "text_of"]


@dataclass(frozen=True)
class Metric:
    """One metric: a row of the table in docs/metrics.md.

    Args:
        name: the name in Prometheus; that of a counter ends in ``_total``.
        kind: ``"counter"``, ``"gauge"`` or ``"histogram"``.
        unit: ``"bytes"``, ``"seconds"``, or ``""`` for a number of things.
        labels: the names of its labels beside ``agent``, which every metric has.
        help: what it counts.
    """

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Histogram:
    """The value of a histogram.

    Args:
        bounds: the upper bounds of the buckets, without the last one, which has none.
        counts: how many values are in each bucket, and not in one before it; one more than there are bounds.
        sum: the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Returns the bound of the bucket below which that share of the values lies; NaN if there are no values.

        Args:
            share: from 0 to 1: 0.5 for the median.
        """
        if not self.count:
            return math.nan
        below = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            if below >= share * self.count:
                return bound
        return math.inf


@dataclass(frozen=True)
class Sample:
    """The value of a metric for one set of labels.

    Args:
        metric: the metric.
        labels: the values of its labels, in the order of ``metric.labels``.
        value: a number; for a histogram, a :class:`Histogram`.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float | Histogram


Read = Callable[["Agent"], Iterable[Sample]]


class Metrics:
    """The metrics of an agent at one moment, from :func:`tensorferry.rpc.metrics`. Iterates over its samples, and
    prints as the text that Prometheus reads.

    Example::

        now = rpc.metrics()
        print(now.value("tensorferry_calls_sent_total"), now.value("tensorferry_sent_bytes_total", channel="shm"))
        print(now.histogram("tensorferry_call_seconds").quantile(0.99))
    """

    def __init__(self, agent: str, samples: Sequence[Sample]) -> None:
        self._agent = agent
        self._samples = tuple(samples)

    @property
    def agent(self) -> str:
        """The name of the agent."""
        return self._agent

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        if not any(metric.name == name for metric in all_metrics()):
            raise KeyError(f"there is no metric {name!r}: docs/metrics.md lists them")
        for sample in self._samples:
            values = dict(zip(sample.metric.labels, sample.labels, strict=True))
            if sample.metric.name == name and all(values.get(label) == value for label, value in labels.items()):
                yield sample

    def value(self, name: str, **labels: str) -> float:
        """Returns the sum of a counter or gauge over all samples that have these labels; 0 if there are none.

        Args:
            name: the name of the metric.
            labels: labels and their values; those that are left out may have any value.

        Raises:
            KeyError: there is no such metric. TypeError: it is a histogram.
        """
        total = 0.0
        for sample in self._matching(name, labels):
            if isinstance(sample.value, Histogram):
                raise TypeError(f"{name} is a histogram: use histogram()")
            total += sample.value
        return total

    def histogram(self, name: str) -> Histogram:
        """Returns the value of a histogram.

        Args:
            name: the name of the metric.

        Raises:
            KeyError: there is no such metric. TypeError: it is no histogram.
        """
        for sample in self._matching(name, {}):
            if isinstance(sample.value, Histogram):
                return sample.value
        raise TypeError(f"{name} is no histogram: use value()")

    def __str__(self) -> str:
        return text_of([self])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _labelled(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def _lines(agent: str, sample: Sample) -> Iterator[str]:
    labels = [("agent", agent), *zip(sample.metric.labels, sample.labels, strict=True)]
    name = sample.metric.name
    if not isinstance(sample.value, Histogram):
        yield f"{name}{{{_labelled(labels)}}} {sample.value:.17g}"
        return
    below = 0
    for bound, count in zip((*sample.value.bounds, math.inf), sample.value.counts, strict=True):
        below += count
        text = "+Inf" if math.isinf(bound) else f"{bound:g}"
        yield f"{name}_bucket{{{_labelled([*labels, ('le', text)])}}} {below}"
    yield f"{name}_sum{{{_labelled(labels)}}} {sample.value.sum:.9g}"
    yield f"{name}_count{{{_labelled(labels)}}} {sample.value.count}"


def text_of(all_agents: Iterable[Metrics]) -> str:
    """Returns the metrics of several agents of a process as the text that Prometheus reads (version 0.0.4).

    Args:
        all_agents: what :func:`tensorferry.rpc.metrics` has returned for each.
    """
    given = [(each.agent, sample) for each in all_agents for sample in each]
    out: list[str] = []
    for metric in all_metrics():
        lines = [line for agent, sample in given if sample.metric == metric for line in _lines(agent, sample)]
        if lines:
            out += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *lines]
    return "".join(line + "\n" for line in out)


_sources: list[tuple[tuple[Metric, ...], Read]] = []


def add_source(metrics: Sequence[Metric], read: Read) -> None:
    """Adds metrics to those of every agent of this process. Applies at once, also to agents that exist.

    Args:
        metrics: the metrics; their names are new.
        read: is called with an agent, on any thread, whenever its metrics are taken, and returns their samples. It must
            not wait for a peer. If it raises an exception, the agent's metrics lack its samples.

    Raises:
        ValueError: a name is taken.

    Example::

        from tensorferry import metrics

        steps = metrics.Metric("trainer_steps_total", "counter", "", (), "Steps that this process has trained.")
        metrics.add_source([steps], lambda agent: [metrics.Sample(steps, (), 17)])
        assert rpc.metrics().value("trainer_steps_total") == 17
    """
    known = {metric.name for metric in all_metrics()}
    if taken := [metric.name for metric in metrics if metric.name in known]:
        raise ValueError(f"there is a metric {taken[0]} already")
    _sources.append((tuple(metrics), read))


def all_metrics() -> list[Metric]:
    """Returns all metrics of this process, in the order of docs/metrics.md."""
    return [metric for metrics, _ in _sources for metric in metrics]


def take(agent: Agent) -> Metrics:
    """Implements :meth:`tensorferry.Agent.metrics`."""
    samples: list[Sample] = []
    for metrics, read in list(_sources):
        try:
            samples += read(agent)
        except Exception as error:
            if metrics is _sources[0][0]:
                raise  # the agent's own: it is closed
            import logging

            logging.getLogger("tensorferry").warning("no samples of %s: %r", metrics[0].name, error)
    return Metrics(agent.name, samples)


# ---- the agent's own metrics


def _counter(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(f"tensorferry_{name}_total", "counter", unit, labels, help)


def _gauge(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(f"tensorferry_{name}", "gauge", unit, labels, help)


def _latency(name: str, help: str) -> Metric:
    return Metric(f"tensorferry_{name}_seconds", "histogram", "seconds", (), help)


_NUMBERS = {  # by the key of Agent._metrics()
    "calls_sent": _counter("calls_sent", "Calls that this agent made."),
    "calls_served": _counter("calls_served", "Calls of peers that this agent answered."),
    "late_answers": _counter("late_answers", "Calls of peers answered after their callers had given up."),
    "late_replies": _counter("late_replies", "Replies that came after their calls had ended here."),
    "pending": _gauge("calls_pending", "Calls made here that have not ended."),
    "serving": _gauge("calls_serving", "Calls of peers that have come and are not answered."),
    "busy": _gauge("handlers_busy", "Functions that run for peers now."),
    "most": _gauge("handlers_limit", "Functions that may run for peers at once: max_threads."),
    "queued": _gauge("handlers_queued", "Functions that wait for one of these places."),
    "threads": _gauge("threads", "Threads of the agent's pool."),
    "links_opened": _counter("connections_opened", "Connections to peers, dialled or accepted."),
    "links_lost": _counter("links_lost", "Links that ended without a goodbye."),
    "dials_failed": _counter("dials_failed", "Attempts to connect to a peer that failed."),
    "objects": _gauge("objects", "Objects here that a reference keeps alive."),
    "references_given": _gauge("references_given", "References of peers to these objects."),
    "pinned_bytes": _gauge("pinned_bytes", "Page-locked host memory of the process.", unit="bytes"),
}
_LATENCIES = {
    "call_time": _latency("call", "Calls made: from the call to its end."),
    "serve_time": _latency("serve", "Calls served: from the request's arrival to its answer."),
    "queue_time": _latency("queue", "Calls served: from the request's arrival to the start of its function."),
}
_FAILED = _counter("calls_failed", "Calls that this agent made and that ended with an error of TensorFerry's.", "error")
_SENT = _counter("sent_bytes", "Bytes of tensors and other large buffers sent.", "channel", unit="bytes")
_RECEIVED = _counter("received_bytes", "The same, received.", "channel", unit="bytes")
_MEMORY = _gauge("receive_memory_bytes", "Receive memory: held by receivers, or idle.", "state", unit="bytes")
_HELD = _gauge("references_held", "References that this agent holds, by the agent that owns the object.", "peer")
_LINKS = _gauge("links", "Links by state: up, dialling, idle, ended.", "state")
_LINK_NUMBERS = {  # by the key of a link of Agent._metrics()
    "in_flight": _gauge("link_calls_in_flight", "Calls to the peer that were sent and not answered.", "peer"),
    "waiting": _gauge("link_calls_waiting", "Calls to the peer that wait for a connection.", "peer"),
    "calls_made": _counter("link_calls_made", "Calls to the peer over the present link.", "peer"),
    "calls_served": _counter("link_calls_served", "Calls of the peer answered over the present link.", "peer"),
    "bytes_sent": _counter("link_sent_bytes", "Bytes of buffers sent to the peer.", "peer", unit="bytes"),
    "bytes_received": _counter("link_received_bytes", "Bytes of buffers from the peer.", "peer", unit="bytes"),
}
_SILENT = _gauge(
    "link_silent_seconds", "Time since the last sign of life of a peer on another host.", "peer", unit="seconds"
)
_OLDEST = _gauge("oldest_call_seconds", "Age of the oldest call in flight; 0 if there is none.", unit="seconds")
_GROUPS = _gauge("groups", "Groups of this agent, and process groups of torch.distributed.")
_STARTED = _counter("group_operations_started", "Operations that this rank has started.", "group")
_ENDED = _counter("group_operations_ended", "Operations that have ended at this rank.", "group")
_PATHS = _counter(
    "group_operations_by_path",
    "Operations of all ranks that have begun at this rank, by the way that they take.",
    "group", "operation", "path", "algorithm",
)  # fmt: skip

_OWN = (
    *_NUMBERS.values(), *_LATENCIES.values(), _FAILED, _SENT, _RECEIVED, _MEMORY, _HELD, _LINKS,
    *_LINK_NUMBERS.values(), _SILENT, _OLDEST,
)  # fmt: skip
LINK_STATES = ("up", "dialling", "idle", "ended")


def histogram_of(counted: tuple[Sequence[int], float]) -> Histogram:
    """Returns the value of a histogram as the agent counts it: in buckets that double, from 1 us on."""
    counts, total = counted
    bounds = tuple(1e-6 * 2**i for i in range(len(counts) - 1))
    return Histogram(bounds, tuple(counts), total)


def _own(agent: Agent) -> Iterator[Sample]:
    now: dict[str, Any] = agent._metrics()
    for key, metric in _NUMBERS.items():
        yield Sample(metric, (), now[key])
    for key, metric in _LATENCIES.items():
        yield Sample(metric, (), histogram_of(now[key]))
    labelled = (_FAILED, "failed"), (_SENT, "bytes_sent"), (_RECEIVED, "bytes_received"), (_HELD, "references_held")
    for metric, key in labelled:
        yield from (Sample(metric, (label,), value) for label, value in now[key].items())
    yield Sample(_MEMORY, ("held",), now["held_bytes"])
    yield Sample(_MEMORY, ("idle",), now["idle_bytes"])
    states = [link["state"] for link in now["links"]]
    yield from (Sample(_LINKS, (state,), states.count(state)) for state in LINK_STATES)
    for link in now["links"]:
        peer = (link["peer"],)
        yield from (Sample(metric, peer, link[key]) for key, metric in _LINK_NUMBERS.items())
        if link["silent_seconds"] >= 0:
            yield Sample(_SILENT, peer, link["silent_seconds"])
    yield Sample(_OLDEST, (), max((age for _, _, age, _ in now["oldest_calls"]), default=0.0))


def _groups(agent: Agent) -> Iterator[Sample]:
    served = agent.__dict__.get("_groups")
    groups = [] if served is None else served.observe()
    yield Sample(_GROUPS, (), len(groups))
    progress: dict[str, tuple[int, int]] = {}  # groups of one label are counted as one
    for label, _, _, (started, ended) in groups:
        before = progress.get(label, (0, 0))
        progress[label] = before[0] + started, before[1] + ended
    for label, (started, ended) in progress.items():
        yield Sample(_STARTED, (label,), started)
        yield Sample(_ENDED, (label,), ended)
    paths: Counter[tuple[str, ...]] = Counter()
    for *labels, count in [] if served is None else served.paths():
        paths[tuple(labels)] += count
    yield from (Sample(_PATHS, labels, count) for labels, count in paths.items())


add_source(_OWN, _own)
add_source((_GROUPS, _STARTED, _ENDED, _PATHS), _groups)
