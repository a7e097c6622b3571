"""One peer, with the verbs as methods."""

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
    """A peer of an agent's; :func:`peer` makes it. It may be given as ``to`` wherever a name may.

    Calls run side by side over there and in no order. Those made on one ``peer.ordered()`` run one after another, in
    the order in which they were made.

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
        """The same peer, whose calls run there one after another, in the order in which they were made.

        Each starts when the one before it has been answered, coroutines and ``async_execution`` included, whether or
        not that succeeded. Each object that this returns has an order of its own. The order holds for as long as the
        link to the peer does: a call made after it was lost does not wait for those before. A stream is in order by
        itself.
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
        """:func:`rpc_sync` to this peer.

        Args:
            func, args, kwargs, timeout: as :func:`rpc_sync` takes them.
            options: its keywords, such as ``device``.

        Returns:
            What ``func(*args, **kwargs)`` returned there.

        Raises:
            What :func:`rpc_sync` raises.
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
        """:func:`rpc_async` to this peer.

        Args:
            func, args, kwargs, timeout: as :func:`rpc_sync` takes them.
            options: the keywords of :func:`rpc_async`, such as ``device``.

        Returns:
            A :class:`Future`.

        Raises:
            What :func:`rpc_async` raises.
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
        """:func:`remote` to this peer. Of an ``ordered()`` one the making is in the order, not what is done to it then.

        Args:
            func, args, kwargs, timeout: as :func:`remote` takes them.
            options: its keywords, such as ``device``.

        Returns:
            An :class:`RRef`.

        Raises:
            What :func:`remote` raises.
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
        """:func:`rpc_stream` to this peer.

        Args:
            func, args, kwargs, timeout, window: as :func:`rpc_stream` takes them.
            options: the keywords of :func:`remote`, such as ``require``.

        Returns:
            A :class:`Stream`.

        Raises:
            What :func:`rpc_stream` raises.
        """
        options.setdefault("_order", self._order)
        return open_stream(self._agent, self.name, func, args, kwargs, timeout, window, options)
