"""Derives the forms of a verb from its one declaration.

A verb, such as ``rpc_sync``, is declared as a method of :class:`~tensorferry.Agent` (``calls.py``, ``agent.py``). The
function of :mod:`tensorferry.rpc` and the method of :class:`~tensorferry.Peer` take their signature, their types and
their docstring from that method.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import _C

__all__ = ["in_cpp", "of_current_agent", "of_peer"]

P = ParamSpec("P")
R = TypeVar("R")


def in_cpp(declaration: Callable[P, R]) -> Callable[P, R]:
    """Replaces the declaration of a method of Agent by the C++ function of the same name (``csrc/call.cpp``)."""
    verb: Callable[P, R] = _C.make_method(declaration.__name__, _cpp_doc(declaration, inspect.signature(declaration)))
    return verb


def of_current_agent(verb: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
    """Returns the function of :mod:`tensorferry.rpc` that calls a method of the current agent: the agent that serves
    this call, else the default agent."""
    signature = _without(verb, "self")
    function: Callable[P, R]
    if inspect.ismethoddescriptor(verb):  # made by in_cpp: the C++ function finds the current agent itself
        function = _C.make_function(verb.__name__, _cpp_doc(verb, signature), "tensorferry.rpc")
    else:

        @functools.wraps(verb)
        def function(*args: P.args, **kwargs: P.kwargs) -> R:
            return verb(_C.current_agent(), *args, **kwargs)

        vars(function).update(__signature__=signature)
        function.__module__, function.__qualname__ = "tensorferry.rpc", function.__name__
    return function


def of_peer(verb: Callable[Concatenate[Any, Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Returns the method of :class:`Peer` that calls a method of the peer's agent with this peer as ``to``."""

    @functools.wraps(verb)
    def method(peer: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return verb(peer._agent, peer, *args, **kwargs)

    vars(method).update(__signature__=_without(verb, "to"))
    method.__module__, method.__qualname__ = "tensorferry.peers", f"Peer.{method.__name__}"
    method.__doc__ = re.sub(r"\n    to: .*(\n     .*)*|(?<=\n    )to, ", "", inspect.getdoc(verb) or "")
    return method


def _without(verb: Callable[..., Any], name: str) -> inspect.Signature:
    signature = inspect.signature(verb)
    return signature.replace(parameters=[each for each in signature.parameters.values() if each.name != name])


def _cpp_doc(verb: Callable[..., Any], signature: inspect.Signature) -> str:
    """Returns the docstring in the form in which a C function has its signature too: without annotations, and with a
    ``$`` before ``self``."""
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = str(inspect.Signature(bare)).replace("(self", "($self", 1)
    return f"{verb.__name__}{text}\n--\n\n{inspect.getdoc(verb)}"
