"""Futures: the results of calls that have not completed yet."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Generator, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from . import _C, errors
from ._C import Future, wait_all

if TYPE_CHECKING:
    import torch

    AnyFuture = torch._C.Future[Any]

__all__ = ["Future", "as_completed", "awaitable", "wait_all"]

_T = TypeVar("_T")


def as_completed(futures: Iterable[AnyFuture], timeout: float | None = None) -> Iterator[AnyFuture]:
    """Yields futures in the order in which they complete. ``wait()`` on a yielded future returns at once.

    Args:
        futures: futures of :func:`rpc_async` or of torch. A future that is given twice is yielded once.
        timeout: seconds from now within which all futures must complete; ``None``: the calls' own time-outs alone.

    Raises:
        DeadlineExceeded: from the iterator, when ``timeout`` has passed; the text says how many futures are missing.
            Their calls go on.
        ValueError: ``timeout`` is negative.

    Example::

        workers = ("worker1", "server")
        futures = {rpc.rpc_async(worker, torch.ones, args=(3,)): worker for worker in workers}
        for future in tensorferry.as_completed(futures, timeout=30):
            print(futures[future], future.wait())
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError("a time-out must be 0 or more seconds, or None")
    until = None if timeout is None else time.monotonic() + timeout
    waited = list(dict.fromkeys(futures))
    completed: SimpleQueue[AnyFuture] = SimpleQueue()
    for future in waited:
        # Puts this object, not the callback's argument: for torch's futures that may be another Python object.
        future.add_done_callback(lambda _, future=future: completed.put(future))
    return _take(completed, len(waited), until)


def _take(completed: SimpleQueue[AnyFuture], count: int, until: float | None) -> Iterator[AnyFuture]:
    for taken in range(count):
        left = None if until is None else max(until - time.monotonic(), 0)
        try:
            future = completed.get(left != 0, left)
        except Empty:
            raise errors.DeadlineExceeded(
                f"{count - taken} of {count} futures have not completed within as_completed(timeout=); "
                "their calls continue"
            ) from None
        yield future
        del future  # keeps no reference to it while waiting for the next one


def awaitable(future: torch._C.Future[_T]) -> Awaitable[_T]:
    """Returns an object for a future, TensorFerry's or torch's, that asyncio can await any number of times.

    Cancelling a task that awaits a :class:`Future` of a call cancels the call. Cancelling a task that awaits a torch
    future does not affect that future. The event loop itself completes awaited futures, so do not block the loop's
    thread in torch's own waits meanwhile.

    Args:
        future: a :class:`Future`, a ``torch.futures.Future``, or the result of ``torch.futures.collect_all``.

    Returns:
        ``future`` itself if it is a :class:`Future`; else an object whose ``__await__`` returns the future's value or
        raises its exception.

    Raises:
        RuntimeError: the object is awaited without a running event loop.

    Example::

        calls = [rpc.rpc_async(worker, max, args=(1, 2)) for worker in ("worker1", "server")]
        first, second = await tensorferry.awaitable(torch.futures.collect_all(calls))
        assert first.value() == second.value() == 2
    """
    if isinstance(future, Future):
        return future
    return _Awaitable(future)


class _Awaitable(Awaitable[_T]):
    __slots__ = ("_future",)

    def __init__(self, future: torch._C.Future[_T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, _T]:
        return (yield from _await(self._future))


class _Loops:
    """The inboxes of event loops. Each loop has one of its own, made when the loop first needs it."""

    def __init__(self) -> None:
        self._inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _C._LoopInbox]
        self._inboxes = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def inbox_of(self, loop: asyncio.AbstractEventLoop) -> _C._LoopInbox:
        inbox = self._inboxes.get(loop)
        if inbox is None:
            inbox = _C._LoopInbox()
            loop.add_reader(inbox.fileno(), inbox.drain)
            weakref.finalize(loop, inbox.close)
            with self._lock:  # other threads add their loops at the same time
                # What waits in the inbox of a closed loop holds that loop.
                closed = [(other, left) for other, left in self._inboxes.items() if other.is_closed()]
                for other, _ in closed:
                    del self._inboxes[other]
                self._inboxes[loop] = inbox
            for _, left in closed:
                left.close()
        return inbox


_loops = _Loops()
inbox_of = _loops.inbox_of


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _await(future: torch._C.Future[_T]) -> Generator[Any, None, _T]:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    if not _C._await_at(future, inbox_of(loop), partial(_wake, waiter)):
        yield from waiter
    value: _T = future.wait()
    return value


def await_(future: Future[_T]) -> Generator[Any, None, _T]:
    """Implements ``await future``. The event loop runs on until the reply arrives. If the awaiting task is cancelled
    meanwhile, the call is cancelled here and at the peer."""
    try:
        value: _T = yield from _await(future)
    except asyncio.CancelledError:
        future.cancel()
        raise
    return value


# ---- failures that the program has not seen

_log = logging.getLogger("tensorferry")


def report_unseen(what: str, error: BaseException) -> None:
    """Logs the error of a future that the program dropped without waiting for it, asking for its value, adding a
    callback, or cancelling it. Called once for each such future.

    Args:
        what: the failed call: ``the call of "f" to "b" failed``.
        error: the future's exception.
    """
    _log.warning(
        "%s, and its future was dropped before its exception was retrieved: %s: %s", what, type(error).__name__, error
    )
