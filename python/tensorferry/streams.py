"""Streams: iterators over the items that a generator at a peer yields."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import errors
from .deadlines import deadline

if TYPE_CHECKING:
    from types import TracebackType

    from ._C import Future, RRef

__all__ = ["Stream", "new_order"]

_T = TypeVar("_T")

_orders = itertools.count()


def new_order() -> int:
    """Returns a new order key for calls, which this process uses for nothing else."""
    return next(_orders) % (2**32 - 1) + 1


class Stream(Iterator[_T], AsyncIterator[_T], Generic[_T]):
    """An iterator over the items that a generator at a peer yields. :func:`rpc_stream` makes it.

    Iterate over it with ``for`` or ``async for``, on one thread or task at a time. The generator runs on while the
    caller uses its items, but is never more than ``window`` items ahead. The generator is closed (its ``finally``
    clauses run) when one of these happens:

    - it ends by itself;
    - the caller calls :meth:`close`, leaves the ``with`` block, or drops the stream;
    - the caller's process dies, or the agent at which the generator runs leaves.

    If the generator raises an exception, the stream raises it in place of the next item, and ends.

    Raises:
        In place of an item, which closes the stream: the generator's exception; DeadlineExceeded: the item did not come
        in time; ConnectionLost: the peer was lost; AgentClosed: this agent has left.

    Example::

        def squares(count):                         # at the peer
            for number in range(count):
                yield number * number

        stream = rpc.rpc_stream("worker1", squares, args=(10**9,))
        assert [next(stream), next(stream), next(stream)] == [0, 1, 4]
        stream.close()                              # and the generator ends there
    """

    def __init__(self, rref: RRef[Any], function: str, timeout: float, window: int) -> None:
        self._rref: RRef[Any] | None = rref
        self._function = function
        self._peer = rref.owner_name()
        self._timeout = timeout
        self._window = window
        self._order = new_order()
        self._coming: deque[Future[tuple[_T, ...]]] = deque()
        self._failed: Exception | None = None  # raised after the items that are already requested
        self._ask()

    def _ask(self) -> None:
        """Requests items until ``window`` of them are under way."""
        try:
            while self._rref is not None and len(self._coming) < self._window:
                self._coming.append(self._rref._next(self._timeout, self._order, self._function))
        except Exception as error:
            self._failed, self._rref = error, None

    def _first(self) -> Future[tuple[_T, ...]] | None:
        """Returns the future of the next item; None: there are no more. Raises the error of a failed request."""
        if self._coming:
            return self._coming[0]
        error, self._failed = self._failed, None
        if error is not None:
            raise error
        return None

    def _ended_by(self, error: BaseException, late: bool) -> BaseException:
        """Closes the stream, and returns the exception to raise in place of an item that did not come."""
        if late:
            error = errors.DeadlineExceeded(
                f'"{self._function}" on "{self._peer}" did not yield its next item in {self._timeout:g} s; the stream '
                "is closed. Raise timeout="
            )
        elif isinstance(error, errors.Error) and self._rref is not None:
            try:
                self._rref._check()
            except errors.Error as why:  # why the peer could not make the generator
                error = why
        self.close()
        return error

    def __iter__(self) -> Stream[_T]:
        return self

    def __next__(self) -> _T:
        first = self._first()
        if first is None:
            raise StopIteration
        try:
            item = first.wait(self._timeout or None)
        except BaseException as error:
            ended = self._ended_by(error, isinstance(error, errors.DeadlineExceeded) and not first.done())
            if ended is error:
                raise
            raise ended from None
        if not item:
            self.close()
            raise StopIteration
        return self._next_after(item)

    def __aiter__(self) -> Stream[_T]:
        return self

    async def __anext__(self) -> _T:
        first = self._first()
        if first is None:
            raise StopAsyncIteration
        expired: list[bool] = []

        def expire() -> None:
            expired.append(True)
            first.cancel()

        timer = asyncio.get_running_loop().call_later(self._timeout, expire) if self._timeout else None
        try:
            item = await first
        except BaseException as error:
            ended = self._ended_by(error, bool(expired))
            if ended is error:
                raise
            raise ended from None
        finally:
            if timer is not None:
                timer.cancel()
        if not item:
            self.close()
            raise StopAsyncIteration
        return self._next_after(item)

    def _next_after(self, item: tuple[_T, ...]) -> _T:
        if self._coming:  # else the stream was closed meanwhile
            self._coming.popleft()
            self._ask()
        return item[0]

    def close(self) -> None:
        """Ends the stream: closes the generator at the peer, and yields no more items here. Does nothing the second
        time."""
        self._rref = self._failed = None  # drops the last reference to the generator
        while self._coming:
            self._coming.pop().cancel()

    def __enter__(self) -> Stream[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Stream[_T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if "_coming" in self.__dict__:
            self.close()


# ---- at the callee


def next_item(iterator: Any, seconds: float) -> tuple[Any, ...] | Awaitable[tuple[Any, ...]]:
    """Returns the answer to a request for the next item: a tuple of that item, or an empty tuple at the end."""
    if hasattr(iterator, "__anext__"):
        return _next_of_async(iterator, seconds)
    if not hasattr(iterator, "__next__"):
        raise TypeError(
            f"rpc_stream calls a generator, or a function that returns an iterator, not a {type(iterator).__name__}"
        )
    try:
        if not seconds:
            return (next(iterator),)
        with deadline(seconds):
            return (next(iterator),)
    except StopIteration:
        return ()


async def _next_of_async(iterator: AsyncIterator[Any], seconds: float) -> tuple[Any, ...]:
    try:
        if not seconds:
            return (await iterator.__anext__(),)
        with deadline(seconds):
            return (await iterator.__anext__(),)
    except StopAsyncIteration:
        return ()
