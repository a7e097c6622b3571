"""What every agent answers to those who look at a job from outside: ``tensorferry top``, ``tensorferry explain``, and
the page of torch's debug server."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

from . import metrics

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["EXPLAIN", "FUNCTION", "observe", "serve"]

#: The name by which a peer calls :func:`observe`.
FUNCTION = "tensorferry.observe"
#: The name by which a peer calls :meth:`Agent.explain`, and gets its result as a dict.
EXPLAIN = "tensorferry.explain"


def observe(agent: Agent) -> dict[str, Any]:
    """Returns what `tensorferry top` shows of an agent. It has no payloads: numbers, and names of agents, functions,
    channels and groups."""
    now = agent._metrics()
    name, rank, _ = agent._self
    latencies = {
        key: {str(share): metrics.histogram_of(now[key]).quantile(share) for share in (0.5, 0.99)}
        for key in ("call_time", "serve_time", "queue_time")
    }
    served = agent.__dict__.get("_groups")
    groups = [
        {"label": label, "rank": its_rank, "size": size, "progress": list(progress)}
        for label, its_rank, size, progress in ([] if served is None else served.observe())
    ]
    kept = {key: value for key, value in now.items() if key not in latencies}
    kept["oldest_calls"] = [list(call) for call in now["oldest_calls"]]
    about = {"name": name, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
    return {**about, **kept, "latencies": latencies, "groups": groups}


def serve(agent: Agent) -> None:
    """Lets peers that may call `agent` observe it."""
    weak = weakref.ref(agent)

    def answer() -> dict[str, Any]:
        alive = weak()
        assert alive is not None, "an agent serves no call after its end"
        return observe(alive)

    def explain(peer: str) -> dict[str, Any]:
        alive = weak()
        assert alive is not None, "an agent serves no call after its end"
        return dataclasses.asdict(alive.explain(peer))

    agent._expose(FUNCTION, answer)
    agent._expose(EXPLAIN, explain)
    _register_page()


_lock = threading.Lock()
_registered = False


def _register_page() -> None:
    """Makes torch's debug server, which a worker has from torch 2.15 on, answer ``/handler/tensorferry``."""
    global _registered
    with _lock:
        if _registered:
            return
        _registered = True
    try:
        from torch._C._distributed_c10d import _register_handler
    except ImportError:
        return  # an older torch
    from . import debug_page

    # torch drops the function after the interpreter's end, which must not be the last reference to it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(debug_page.answer))
    _register_handler(debug_page.HANDLER, debug_page.answer)
