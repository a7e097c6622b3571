"""Functions and classes that peers may call by a plain name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from . import _C, errors

__all__ = ["everywhere", "expose", "expose_with"]

F = TypeVar("F", bound=Callable[..., Any])

#: What agents that begin from now on expose.
everywhere = _C.Exposed()


def expose_with(add: Callable[[str, Any], None], fn: Any, name: str | None) -> Any:
    """What every ``expose`` is made of: a call, or a decorator with or without a name. ``add`` is told name and fn."""
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

    A call, ``expose(fn)`` or ``expose(fn, name="step")``, or a decorator, ``@expose`` or ``@expose("step")``. It holds
    for the default agent and for agents that begin later; :meth:`tensorferry.Agent.expose` is for one agent alone.
    Agents of ``trust="registered"`` let peers call nothing else.

    Args:
        fn: a function, a bound method, or any other callable. Of a class, peers may make objects
            (``rpc.remote("server", "Model")``) and call their public methods, inherited ones too; and the codec may
            make objects of it from what a peer sends.
        name: 1 to 4096 bytes, not beginning with ``py:``, ``op:`` or ``tf:``; else ``fn.__name__``.

    Returns:
        ``fn``, as it is; without it a decorator.

    Raises:
        InvalidArgument: the name is none of those, or names another function already.
        TypeError: ``fn`` cannot be called.

    Example::

        @rpc.expose
        def double(x):
            return 2 * x


        rpc.expose(max, name="largest")
        me = rpc.get_worker_info()
        assert rpc.rpc_sync(me, "double", args=(rpc.rpc_sync(me, "largest", args=(1, 2)),)) == 4
    """
    return expose_with(_add, fn, name)
