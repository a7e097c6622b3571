"""A handle on one peer, with the calls as methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from .streams import Stream, new_order, open_stream

if TYPE_CHECKING:
    from . import _C
    from ._C import Future, RRef

__all__ = ["Peer"]

_T = TypeVar("_T")


class Peer:
    """A handle on a peer of an agent. :func:`peer` makes it. Calls accept it as ``to``, instead of the peer's name.

    By default, calls run concurrently at the peer, in no order. Calls on one ``peer.ordered()`` handle run one after
    another, in the order in which they were made.

    Example::

        worker = rpc.peer("worker1")
        assert worker.rpc_sync(max, args=(1, 2)) == 2
        assert list(worker.rpc_stream(iter, args=([3, 4],))) == [3, 4]

        log = worker.ordered()
        lines = log.remote(list)
        futures = [log.rpc_async(print, args=(line,)) for line in ("first", "second")]
        tensorferry.wait_all(futures)               # "second" was printed after "first"
    """

    def __init__(self, agent: _C.Agent, name: str, order: int = 0) -> None:
        self._agent = agent
        self._order = order
        self.name = name

    def __repr__(self) -> str:
        return f"<tensorferry peer {self.name!r}{', in order' if self._order else ''}>"

    def ordered(self) -> Peer:
        """Returns a handle on the same peer whose calls run there one after another, in the order in which they were
        made.

        Each call starts when the previous one has been answered, whether or not that one succeeded. This holds for
        coroutines and ``async_execution`` too. Each returned handle has an order of its own. If the link to the peer is
        lost, calls made afterwards do not wait for the calls before. A stream is in order by itself.
        """
        return Peer(self._agent, self.name, new_order())

    def rpc_sync(
        self,
        func: Callable[..., Any] | str,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        **options: Any,
    ) -> Any:
        """Calls a function on this peer and waits for its result: see :func:`rpc_sync`.

        Args:
            func, args, kwargs, timeout: as for :func:`rpc_sync`.
            options: keyword arguments of :func:`rpc_sync`, such as ``device``.

        Returns:
            The result of ``func(*args, **kwargs)`` at the peer.

        Raises:
            As :func:`rpc_sync`.
        """
        return self._agent.rpc_sync(self.name, func, args, kwargs, timeout, _order=self._order, **options)

    def rpc_async(
        self,
        func: Callable[..., Any] | str,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        **options: Any,
    ) -> Future[Any]:
        """Calls a function on this peer without waiting: see :func:`rpc_async`.

        Args:
            func, args, kwargs, timeout: as for :func:`rpc_async`.
            options: keyword arguments of :func:`rpc_async`, such as ``device``.

        Returns:
            The :class:`Future` of the result.

        Raises:
            As :func:`rpc_async`.
        """
        return self._agent.rpc_async(self.name, func, args, kwargs, timeout, _order=self._order, **options)

    def remote(
        self,
        func: Callable[..., Any] | str,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        **options: Any,
    ) -> RRef[Any]:
        """Creates an object on this peer: see :func:`remote`. On an ``ordered()`` handle, the creation keeps the order;
        later calls on the object do not.

        Args:
            func, args, kwargs, timeout: as for :func:`remote`.
            options: keyword arguments of :func:`remote`, such as ``device``.

        Returns:
            An :class:`RRef` to the object.

        Raises:
            As :func:`remote`.
        """
        return self._agent.remote(self.name, func, args, kwargs, timeout, _order=self._order, **options)

    def rpc_stream(
        self,
        func: Callable[..., Iterable[_T] | AsyncIterator[_T]] | str,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        *,
        window: int = 8,
        **options: Any,
    ) -> Stream[_T]:
        """Calls a generator function on this peer: see :func:`rpc_stream`.

        Args:
            func, args, kwargs, timeout, window: as for :func:`rpc_stream`.
            options: keyword arguments of :func:`remote`, such as ``require``.

        Returns:
            A :class:`Stream` of the items.

        Raises:
            As :func:`rpc_stream`.
        """
        options.setdefault("_order", self._order)
        return open_stream(self._agent, self.name, func, args, kwargs, timeout, window, options)
