"""Time limits that calls inherit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ._C import _deadline, cancelled

__all__ = ["cancelled", "deadline"]

_NEVER = 1e9  # seconds; what is longer is this long


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Calls made inside, to whichever peer, have ended when so many seconds from here have passed.

    The time-out of each is the lesser of its own and what is left. A function that a peer called makes its own calls
    within what is left of that call, so deadlines pass on from process to process; ``rpc.cancelled()`` tells it when
    nothing is left. Inner deadlines can only be earlier. asyncio tasks inherit the deadline of where they are created;
    new threads inherit none.

    It bounds the calls, not the code: nothing is raised but by calls.

    Args:
        seconds: more than 0.

    Raises:
        ValueError: ``seconds`` is not more than 0.
        DeadlineExceeded: from calls inside, ``rpc_async`` and ``remote`` included, where the time was over before they
            were made; these are not sent. Otherwise as for ``timeout=``.

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
