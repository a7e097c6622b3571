"""Deadlines that calls inherit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ._C import _deadline, cancelled

__all__ = ["cancelled", "deadline"]

_NEVER = 1e9  # seconds; a longer deadline is cut to this


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Sets a deadline for all calls made inside the ``with`` block, to any peer.

    The time-out of each call is the smaller of its own time-out and the time left. A function that serves a call makes
    its own calls within the time left of that call, if its caller set a deadline or gave ``timeout=``. So deadlines
    propagate from process to process. A default time-out bounds one call alone. In a function that a peer called,
    ``rpc.cancelled()`` tells when no time is left. An inner deadline can only be earlier than the outer one. An asyncio
    task inherits the deadline of the code that creates it; a new thread inherits none.

    The deadline bounds the calls, not other code: only calls raise.

    Args:
        seconds: the time from now until the deadline, more than 0.

    Raises:
        ValueError: ``seconds`` is not more than 0.
        DeadlineExceeded: from a call inside, ``rpc_async`` and ``remote`` included, if the deadline has passed before
            the call is made; such a call is not sent. Otherwise as for ``timeout=``.

    Example::

        with rpc.deadline(2.0):
            plan = rpc.rpc_sync("worker1", torch.arange, args=(3,))
            rpc.rpc_sync("server", torch.sum, args=(plan,), timeout=1.5)
    """
    if not seconds > 0:
        raise ValueError("a deadline must be more than 0 seconds away")
    until = time.monotonic() + min(seconds, _NEVER)
    outer = _deadline.get(until)
    token = _deadline.set(min(until, outer))
    try:
        yield
    finally:
        _deadline.reset(token)
