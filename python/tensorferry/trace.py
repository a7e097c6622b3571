"""Traces of calls, and ``python -m tensorferry.trace merge``, which joins the traces of several agents in one file.

docs/tracing.md describes what a trace shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from . import _C


class Trace:
    """Records the calls of an agent, both those that it makes and those that it serves: see :meth:`Agent.trace`.

    ``events`` is empty until the ``with`` block ends. It then has the trace's events, in the trace-event format that
    Perfetto and ``chrome://tracing`` read.
    """

    def __init__(self, agent: _C.Agent, path: str | PathLike[str] | None) -> None:
        self._agent = agent
        self._path = path
        self._recording: int | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Trace:
        if self._recording is not None:
            raise RuntimeError("this trace is being recorded already")
        self._recording = self._agent._start_trace()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._recording is not None
        text = self._agent._stop_trace(self._recording)
        self._recording = None
        self.events = json.loads(text)["traceEvents"]
        if self._path is not None:
            Path(self._path).write_text(text)


def merge(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins the traces and flight recorders of several agents, which may be on several hosts, and traces of
    ``torch.profiler``.

    The processes of one host share a clock. The times of other hosts are shifted to the clock of the first trace's
    host, by the hosts' clocks for the time of day. So are those of ``torch.profiler``, which counts from the time of
    day that its trace says.

    Args:
        traces: the traces, as ``json.load`` reads them from their files.

    Raises:
        ValueError: one of them is no trace of an agent nor of ``torch.profiler``, or none is of an agent.

    Example::

        from tensorferry import trace

        both = trace.merge([json.loads(Path(name).read_text()) for name in ("a.json", "b.json")])
        Path("both.json").write_text(json.dumps(both))
    """
    merged: list[dict[str, Any]] = []
    offsets: dict[str, float] = {}  # of a host's clock from the time of day
    own = [one["otherData"] for one in traces if "boot_id" in one.get("otherData", {})]
    if traces and not own:
        raise ValueError("none of the traces is of an agent, so there is no clock to shift the others to")
    for about in own:
        offsets.setdefault(about["boot_id"], about["clock_to_realtime_us"])
    for one in traces:
        shift = _clock_of(one, offsets) - next(iter(offsets.values()))
        for event in one["traceEvents"]:
            merged.append({**event, "ts": event["ts"] + shift} if "ts" in event else event)
    return {"traceEvents": merged, "displayTimeUnit": "ns", "otherData": own[0] if own else {}}


def _clock_of(trace: dict[str, Any], offsets: dict[str, float]) -> float:
    """Returns the time of day in microseconds at which the clock of a trace reads 0."""
    about = trace.get("otherData", {})
    if "boot_id" in about:
        return offsets[about["boot_id"]]
    if "baseTimeNanoseconds" in trace:
        return float(trace["baseTimeNanoseconds"]) / 1000
    raise ValueError("this is neither a trace of an agent nor one of torch.profiler")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``tensorferry trace merge a.json b.json > both.json``, ``tensorferry trace show a.json``."""
    parser = argparse.ArgumentParser(
        prog="tensorferry trace",
        description="Works on traces of calls, and on the flight recorders that rpc.dump() and SIGUSR2 write. Perfetto "
        "(https://ui.perfetto.dev) shows both.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="write several agents' files, and torch.profiler's, to stdout as one")
    merging.add_argument("files", nargs="+", type=Path, help="the traces")
    showing = commands.add_parser("show", help="print the events of flight recorders, in the order of time")
    showing.add_argument("files", nargs="+", type=Path, help="what rpc.dump() or SIGUSR2 has written")
    chosen = parser.parse_args(arguments)
    traces = []
    for file in chosen.files:
        try:
            traces.append(json.loads(file.read_text()))
        except (OSError, ValueError) as error:
            parser.exit(1, f"tensorferry trace: {file}: {error}\n")
    try:
        if chosen.command == "merge":
            json.dump(merge(traces), sys.stdout)
        else:
            print(*told(traces), sep="\n")
    except ValueError as error:
        parser.exit(1, f"tensorferry trace: {error}\n")


def told(dumps: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the events of flight recorders as lines, in the order of time.

    Args:
        dumps: what :func:`tensorferry.rpc.dump` has returned.

    Raises:
        ValueError: one of them is something else.
    """
    lines: list[tuple[float, str]] = []
    for one in dumps:
        if "tensorferry" not in one:
            raise ValueError("this is no flight recorder: it has no events")
        about = one["tensorferry"]
        for event in about["events"]:
            text = f"{about['agent']}: {event['subject']} {event['name']}: {event['text']}"
            lines.append((event["time"], text + (f" ({event['times']} times)" if event["times"] > 1 else "")))
        for call in about["calls_in_flight"]:
            text = f"{about['agent']}: {call['function']!r} at {call['peer']} is in flight"
            lines.append((about["time"], f"{text} for {call['age_seconds']:.3f} s"))
    return [f"{datetime.datetime.fromtimestamp(at):%H:%M:%S.%f} {text}" for at, text in sorted(lines)]


if __name__ == "__main__":
    main()
