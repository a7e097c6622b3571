"""Functions and classes that peers may call by a plain name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from . import _C, errors

__all__ = ["everywhere", "expose", "expose_with"]

F = TypeVar("F", bound=Callable[..., Any])

#: The functions and classes that agents started from now on expose.
everywhere = _C.Exposed()


def expose_with(add: Callable[[str, Any], None], fn: Any, name: str | None) -> Any:
    """Implements every ``expose``: as a call, or as a decorator with or without a name. Calls ``add(name, fn)``."""
    if isinstance(fn, str):
        if name is not None:
            raise TypeError("expose() was given two names")
        fn, name = None, fn
    if fn is None:
        return lambda decorated: expose_with(add, decorated, name)
    if name is None:
        name = getattr(fn, "__name__", None)
        if not isinstance(name, str):
            raise errors.InvalidArgument(f"{fn!r} has no name of its own: give it one with name=")
    add(name, fn)
    return fn


def _add(name: str, fn: Any) -> None:
    everywhere.add(name, fn)
    agent = _C.default_agent()
    if agent is not None:
        agent._expose(name, fn)


@overload
def expose(fn: F, *, name: str | None = None) -> F: ...
@overload
def expose(fn: str | None = None, *, name: str | None = None) -> Callable[[F], F]: ...
def expose(fn: Any = None, *, name: str | None = None) -> Any:
    """Lets peers call a function by a plain name: ``rpc.rpc_sync("server", "step", args=(x,))``, or from C++.

    Use it as a call, ``expose(fn)`` or ``expose(fn, name="step")``, or as a decorator, ``@expose`` or
    ``@expose("step")``. It applies to the default agent and to agents that start later; to expose a function at one
    agent alone, use :meth:`tensorferry.Agent.expose`. With ``trust="registered"``, peers can call only what is exposed.

    Args:
        fn: a function, a bound method, a class, or any other callable. If it is a class, peers may make objects of it
            (``rpc.remote("server", "Model")``) and call their public methods, inherited ones too. The codec may also
            make objects of the class from the data that a peer sends.
        name: 1 to 4096 bytes that do not begin with ``py:``, ``op:`` or ``tf:``; by default ``fn.__name__``.

    Returns:
        ``fn`` unchanged; without ``fn``, a decorator.

    Raises:
        InvalidArgument: the name is not allowed, or belongs to another function already. A newer definition with the
            same module and qualified name replaces the old one.
        TypeError: ``fn`` is not callable.

    Example::

        @rpc.expose
        def double(x):
            return 2 * x


        rpc.expose(max, name="largest")
        me = rpc.get_worker_info()
        assert rpc.rpc_sync(me, "double", args=(rpc.rpc_sync(me, "largest", args=(1, 2)),)) == 4
    """
    return expose_with(_add, fn, name)
