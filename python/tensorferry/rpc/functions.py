"""Decorators that change how a function serves remote calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["async_execution"]

P = ParamSpec("P")
R = TypeVar("R")


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that returns a future. Remote callers get the future's value, once the future completes.

    The thread that ran the function is free until then. Functions marked by torch's decorator of the same name work
    too. With ``@staticmethod`` or ``@classmethod``, this is the inner decorator; with ``@torch.jit.script``, the outer.

    Args:
        fn: a function that returns a ``torch.futures.Future``, such as that of ``rpc_async`` or of ``then``.

    Raises:
        TypeError: at the caller, if ``fn`` returned something else.

    Example::

        @rpc.functions.async_execution
        def add_twice(to, x, y):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda sum: sum.wait() + y)

        assert rpc.rpc_sync("worker1", add_twice, args=("server", torch.ones(2), 1)).tolist() == [3, 3]
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper
