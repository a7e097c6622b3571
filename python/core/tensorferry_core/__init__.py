"""TensorFerry without torch: calls with numpy arrays to agents in Python, with torch or without it, and in C++.

The names are those of the package ``tensorferry``. An agent of the process, which :func:`init` makes, is what the
functions here use; :class:`Agent` makes others.

Example::

    import numpy, tensorferry_core as tf

    tf.init("client", rendezvous="tcp://trainer:29500", rank=1, world_size=2)
    print(tf.call("trainer", "double", (numpy.ones(3),)))
    tf.shutdown()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import errors
from ._library import lib as _lib
from ._values import Array
from .agent import Agent, Future
from .group import Group
from .store import StoreServer

__all__ = [
    "Agent", "Array", "Future", "Group", "StoreServer",
    "agent", "call", "call_async", "errors", "expose", "init", "shutdown",
]  # fmt: skip
__version__: str = _lib.tferry_version().decode()

F = TypeVar("F", bound=Callable[..., Any])
_agents: list[Agent] = []
_exposed: dict[str, Callable[..., Any]] = {}


def init(name: str = "", **options: Any) -> Agent:
    """Makes the agent of the process, with the options of :class:`Agent`. It serves what :func:`expose` has got."""
    if _agents:
        raise errors.InvalidArgument(f'the process has the agent "{_agents[0].name}" already')
    options["functions"] = {**_exposed, **options.get("functions", {})}
    _agents.append(Agent(name, **options))
    return _agents[0]


def agent() -> Agent:
    """Returns the agent of the process. Raises AgentClosed if there is none."""
    if not _agents:
        raise errors.AgentClosed("the process has no agent: call init() first")
    return _agents[0]


def call(peer: str, function: str, *args: Any, **options: Any) -> Any:
    """:meth:`Agent.call` of the process's agent."""
    return agent().call(peer, function, *args, **options)


def call_async(peer: str, function: str, *args: Any, **options: Any) -> Future:
    """:meth:`Agent.call_async` of the process's agent."""
    return agent().call_async(peer, function, *args, **options)


def expose(function: F) -> F:
    """Lets peers call a function by its name, at the agent of the process, which may join later. A decorator."""
    _exposed[function.__name__] = function
    if _agents:
        _agents[0].expose(function)
    return function


def shutdown(timeout: float = 0) -> None:
    """:meth:`Agent.shutdown` of the process's agent. Does nothing if there is none."""
    if _agents:
        _agents.pop().shutdown(timeout)
