"""Results that come one by one: iterators over what a generator at a peer yields."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import _C, errors
from .deadlines import deadline

if TYPE_CHECKING:
    from types import TracebackType

    from ._C import Future, RRef

__all__ = ["Stream", "new_order", "open_stream"]

_T = TypeVar("_T")

_orders = itertools.count()


def new_order() -> int:
    """A key under which calls are made in order: one that this process uses for nothing else."""
    return next(_orders) % (2**32 - 1) + 1


class Stream(Iterator[_T], AsyncIterator[_T], Generic[_T]):
    """What a generator at a peer yields, item by item; :func:`rpc_stream` makes it.

    Iterate over it by ``for`` or ``async for``, on one thread or task at a time. The generator goes on while its items
    are used here, but is never more than ``window`` items ahead. It is closed (its ``finally`` clauses run) when it has
    ended, when :meth:`close` is called, a ``with`` block ends, the stream is dropped, or this process dies; and when
    its own agent leaves.

    An exception of the generator's is raised in the place of the item that it would have yielded, and ends the stream.

    Raises:
        In the place of an item, after which the stream is closed: what the generator raised; DeadlineExceeded: the item
        did not come in time; ConnectionLost: the peer was lost; AgentClosed: this agent has left.

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
        self._failed: Exception | None = None  # what is to be raised after the items that are coming
        self._ask()

    def _ask(self) -> None:
        """Keeps ``window`` items asked for."""
        try:
            while self._rref is not None and len(self._coming) < self._window:
                self._coming.append(self._rref._next(self._timeout, self._order, self._function))
        except Exception as error:
            self._failed, self._rref = error, None

    def _first(self) -> Future[tuple[_T, ...]] | None:
        """The next item, which may not have come yet; None: there are no more."""
        if self._coming:
            return self._coming[0]
        error, self._failed = self._failed, None
        if error is not None:
            raise error
        return None

    def _ended_by(self, error: BaseException, late: bool) -> BaseException:
        """What is to be raised in the place of an item that did not come; closes the stream."""
        if late:
            error = errors.DeadlineExceeded(
                f'"{self._function}" on "{self._peer}" did not yield its next item in {self._timeout:g} s; the stream '
                "is closed. Raise timeout="
            )
        elif isinstance(error, errors.Error) and self._rref is not None:
            try:
                self._rref._check()
            except errors.Error as why:  # where the generator could not be made, why not
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
        if self._coming:  # it has not been closed meanwhile
            self._coming.popleft()
            self._ask()
        return item[0]

    def close(self) -> None:
        """Ends the stream: the generator is closed at its peer, and there are no more items here. Does nothing the
        second time."""
        self._rref = self._failed = None  # the last reference to the generator
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


def open_stream(
    agent: _C.Agent,
    to: object,
    func: Callable[..., Iterable[_T] | AsyncIterator[_T]] | str,
    args: Iterable[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
    window: int,
    options: dict[str, Any],
) -> Stream[_T]:
    """:func:`rpc_stream`, of ``agent``."""
    if window < 1:
        raise ValueError("window must be at least 1: items that may be under way")
    generator = agent.remote(to, func, args, kwargs, timeout, **options)
    seconds = agent._timeout if timeout == -1 else timeout
    return Stream(generator, getattr(func, "__qualname__", str(func)), seconds, window)


# ---- at the generator's side


def next_item(iterator: Any, seconds: float) -> tuple[Any, ...] | Awaitable[tuple[Any, ...]]:
    """What a request for the next item is answered with: it in a tuple, or an empty one at the end."""
    if hasattr(iterator, "__anext__"):
        return _next_of_async(iterator, seconds)
    if not hasattr(iterator, "__next__"):
        raise TypeError(f"rpc_stream calls a generator, or what returns an iterator, not a {type(iterator).__name__}")
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
