"""The flight recorder: the last events of links, groups and calls, as :func:`tensorferry.rpc.dump` returns them and as
SIGUSR2 writes them if ``TENSORFERRY_DUMP`` is set. docs/tracing.md is the user's guide."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import metrics

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["SIGNAL", "dump", "dump_at_signal", "dump_path"]

SIGNAL = signal.SIGUSR2
_FIRST_ROW = 2_000_000  # of the rows in the picture; the rows of calls have smaller numbers
_log = logging.getLogger("tensorferry")


def _numbers(agent: Agent) -> dict[str, float]:
    """Returns the counters and gauges that are not 0, by name and labels."""
    out = {}
    for sample in metrics.take(agent):
        if isinstance(sample.value, metrics.Histogram) or not sample.value:
            continue
        labels = ",".join(f"{name}={value}" for name, value in zip(sample.metric.labels, sample.labels, strict=True))
        out[sample.metric.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return out


def _picture(trace: dict[str, Any], events: Iterable[dict[str, Any]], calls: Iterable[dict[str, Any]]) -> None:
    """Adds the events to an empty trace, a row for each subject, and the calls in flight, which end now."""
    shown = trace["traceEvents"]
    pid = shown[0]["pid"]
    rows: dict[str, int] = {}

    def row_of(title: str) -> int:
        if title not in rows:
            rows[title] = _FIRST_ROW + len(rows)
            shown.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": rows[title], "args": {"name": title}})
        return rows[title]

    now = time.monotonic()
    for event in events:
        row = row_of(f"{event['subject']} {event['name']}")
        at = (now - event["seconds_ago"]) * 1e6
        about = {"times": event["times"]}
        shown.append(
            {"ph": "i", "s": "t", "name": event["text"], "cat": "tensorferry", "pid": pid, "tid": row, "ts": at,
             "args": about}
        )  # fmt: skip
    for number, call in enumerate(calls):
        row = row_of(f"in flight {number + 1}")
        about = {"callee": call["peer"], "sent": call["sent"]}
        age = call["age_seconds"] * 1e6
        shown.append(
            {"ph": "X", "name": call["function"], "cat": "tensorferry", "pid": pid, "tid": row, "ts": now * 1e6 - age,
             "dur": age, "args": about}
        )  # fmt: skip


def dump(agent: Agent, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Implements :meth:`tensorferry.Agent.dump`."""
    agent._check_usable_here()
    now, clock = time.time(), time.monotonic()
    events = [
        {"subject": subject, "name": name, "seconds_ago": round(clock - at, 6), "time": now - clock + at, "text": text,
         "times": times}
        for subject, name, at, text, times in agent._flight_events()
    ]  # fmt: skip
    state = agent._metrics()
    calls = [
        {"function": function, "peer": peer, "age_seconds": age, "sent": sent}
        for function, peer, age, sent in state["oldest_calls"]
    ]
    trace: dict[str, Any] = json.loads(agent._stop_trace(agent._start_trace()))  # an empty one, of this clock
    _picture(trace, events, calls)
    name, rank, _ = agent._self
    trace["tensorferry"] = {
        "agent": name, "rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "time": now,
        "events": events, "calls_in_flight": calls, "links": state["links"], "metrics": _numbers(agent),
    }  # fmt: skip
    if path is not None:
        Path(path).write_text(json.dumps(trace))
    return trace


def dump_path(path: str, agent: str) -> Path:
    """Returns the path with the agent's name and the process's id before the extension."""
    given = Path(path)
    return given.with_name(f"{given.stem}.{re.sub('/', '_', agent)}.{os.getpid()}{given.suffix}")


def _dump_all(path: str) -> None:
    from .agent import living

    for agent in living():
        where = dump_path(path, agent.name)
        try:
            dump(agent, where)
        except Exception as error:
            _log.warning("the flight recorder of %r cannot be written to %s: %s", agent.name, where, error)
        else:
            _log.warning("the flight recorder of %r is in %s", agent.name, where)


_installed = False


def dump_at_signal() -> None:
    """Writes the flight recorders of all agents at SIGUSR2 from now on, if ``TENSORFERRY_DUMP`` is set, and then runs
    the program's own handler. Only the main thread can install a handler: in others it logs that it did not."""
    global _installed
    path = os.environ.get("TENSORFERRY_DUMP")
    if not path or _installed:
        return
    before = signal.getsignal(SIGNAL)
    if threading.current_thread() is not threading.main_thread() or before is None:
        _log.warning(
            "TENSORFERRY_DUMP has no effect: the first agent must start in the main thread, and a handler of SIGUSR2 "
            "must be Python's"
        )
        return
    _installed = True

    def handle(number: int, frame: FrameType | None) -> None:
        # Not on this thread: it may hold any lock.
        threading.Thread(target=_dump_all, args=(path,), name="tensorferry-dump", daemon=True).start()
        if callable(before):
            before(number, frame)

    signal.signal(SIGNAL, handle)
