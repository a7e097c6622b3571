"""Traces of calls, and ``python -m tensorferry.trace merge``, which joins the traces of several agents in one file.

docs/tracing.md describes what a trace shows.
"""

from __future__ import annotations

import argparse
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
    """Joins the traces of several agents, which may be on several hosts.

    The processes of one host share a clock. The times of other hosts are shifted to the clock of the first trace's
    host, by the hosts' clocks for the time of day.

    Args:
        traces: the traces, as ``json.load`` reads them from their files.

    Example::

        from tensorferry import trace

        both = trace.merge([json.loads(Path(name).read_text()) for name in ("a.json", "b.json")])
        Path("both.json").write_text(json.dumps(both))
    """
    merged: list[dict[str, Any]] = []
    offsets: dict[str, float] = {}  # of a host's clock from the time of day
    for one in traces:
        about = one["otherData"]
        offset = offsets.setdefault(about["boot_id"], about["clock_to_realtime_us"])
        shift = offset - next(iter(offsets.values()))
        for event in one["traceEvents"]:
            merged.append({**event, "ts": event["ts"] + shift} if "ts" in event else event)
    return {"traceEvents": merged, "displayTimeUnit": "ns", "otherData": traces[0]["otherData"] if traces else {}}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``python -m tensorferry.trace merge a.json b.json > both.json``."""
    parser = argparse.ArgumentParser(prog="python -m tensorferry.trace", description="Works on traces of calls.")
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="write the traces of several agents to stdout as one")
    merging.add_argument("files", nargs="+", type=Path, help="the traces")
    chosen = parser.parse_args(arguments)
    json.dump(merge([json.loads(file.read_text()) for file in chosen.files]), sys.stdout)


if __name__ == "__main__":
    main()
