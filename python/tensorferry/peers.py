"""A handle on one peer, with the calls as methods."""

from __future__ import annotations

from .calls import Calls
from .streams import new_order
from .verbs import of_peer

__all__ = ["Peer"]


class Peer:
    """A handle on a peer of an agent. :func:`peer` makes it. Calls accept it as ``to``, instead of the peer's name.

    By default, calls run concurrently at the peer, in no order. Calls on one ``peer.ordered()`` handle, and calls that
    get it as ``to``, run one after another, in the order in which they were made.

    Example::

        worker = rpc.peer("worker1")
        assert worker.rpc_sync(max, args=(1, 2)) == 2
        assert list(worker.rpc_stream(iter, args=([3, 4],))) == [3, 4]

        log = worker.ordered()
        lines = log.remote(list)
        futures = [log.rpc_async(print, args=(line,)) for line in ("first", "second")]
        tensorferry.wait_all(futures)               # "second" was printed after "first"
    """

    _order = 0  # the order key of the handle's calls, which C++ reads; 0: no order

    def __init__(self, agent: Calls, name: str, order: int = 0) -> None:
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
        lost, calls made afterwards do not wait for the calls before. Objects are created in order (``remote``), but
        later calls on them are not in order. A stream is in order by itself.
        """
        return Peer(self._agent, self.name, new_order())

    rpc_sync = of_peer(Calls.rpc_sync)
    rpc_async = of_peer(Calls.rpc_async)
    remote = of_peer(Calls.remote)
    rpc_stream = of_peer(Calls.rpc_stream)
