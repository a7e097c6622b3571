"""Remote calls, with the names, positions and defaults of ``torch.distributed.rpc``.

Example::

    import tensorferry.rpc as rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    print(rpc.rpc_sync("worker1", max, args=(1, 2)))
    rpc.shutdown()
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .._C import Published, PyRRef, RRef, remote, rpc_async, rpc_sync
from ..agent import Agent, Counters, Explanation, WorkerInfo
from ..batching import batch
from ..deadlines import cancelled, deadline
from ..exposing import expose
from . import functions, options
from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from typing import TypeVar

    from .._C import DeviceChoice
    from ..agent import Peer
    from ..futures import Future
    from ..peers import Peer as PeerHandle
    from ..streams import Stream

    _T = TypeVar("_T")

__all__ = [
    "BackendType",
    "Published",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "batch",
    "call_many",
    "cancelled",
    "counters",
    "deadline",
    "explain",
    "expose",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "peer",
    "publish",
    "remote",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "shutdown",
]

_lock = threading.Lock()


class _DefaultAgent(Agent):
    """Becomes the default agent before peers can find it: a function that they call uses this module's functions, and
    so do the callbacks and threads that it leaves behind, which may run before :func:`init_rpc` has returned."""

    def _announce(self) -> None:
        _C.set_default_agent(self)
        super()._announce()


def is_available() -> bool:
    """True; torch's tells whether it was built with RPC.

    Example::

        assert rpc.is_available()
    """
    return True


def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    store: Any = None,
    init_method: str | None = None,
    timeout: float | None = None,
    **agent_options: Any,
) -> None:
    """Starts this process's default agent, which the functions of this module use.

    With a world size it returns when all have joined. Under torchrun no argument is needed.

    Args:
        name: unique; None: ``worker<rank>``.
        backend: for torch's sake; there is one.
        rank: unique, from 0; -1: the environment's, or none.
        world_size: how many begin together; None: the environment's where the rank is too, else agents come and go.
        rpc_backend_options: torch's, for ``rpc_timeout``, ``init_method``, ``devices`` and ``device_maps``.
        store: where agents meet, instead of ``init_method``: a store of torch's, or of ``tensorferry.connect_store``.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``; before that of the options.
        timeout: the default time-out of calls, seconds, before that of the options; 0: none.
        agent_options: ``key``, ``channels``, ``trust``, ``join_timeout`` and others: see :class:`tensorferry.Agent`.

    Raises:
        RuntimeError: there is a default agent already. Otherwise what :class:`tensorferry.Agent` raises.

    Example::

        rpc.init_rpc("alone", rank=0, world_size=1, init_method="tcp://127.0.0.1:29417", timeout=10)
        print(rpc.rpc_sync("alone", max, args=(1, 2)))
        rpc.shutdown()
    """
    if backend is not None and getattr(backend, "name", None) not in BackendType.__members__:
        raise TypeError("Argument backend must be a member of BackendType")
    given = rpc_backend_options
    if given is not None and not (hasattr(given, "rpc_timeout") and hasattr(given, "init_method")):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if timeout is None:
        timeout = options.DEFAULT_RPC_TIMEOUT_SEC if given is None else given.rpc_timeout
    if init_method is None and given is not None:
        init_method = given.init_method
    for option in ("devices", "device_maps"):  # torch's RpcBackendOptions, which others share, has none
        if value := getattr(given, option, None):
            agent_options.setdefault(option, value)
    with _lock:
        if _is_current_rpc_agent_set():
            raise RuntimeError("RPC is already initialized")
        try:
            where = {"store": store, "init_method": init_method}
            _DefaultAgent(name, rank, world_size, timeout=timeout, **where, **agent_options)
        except BaseException:
            _C.set_default_agent(None)
            raise


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Ends the default agent: see :meth:`tensorferry.Agent.shutdown`.

    Args:
        graceful: first wait for everybody's calls, and until everybody has come here.
        timeout: seconds to wait at most; 0: as long as it takes.

    Raises:
        RuntimeError: there is no default agent. Otherwise what :meth:`tensorferry.Agent.shutdown` raises.

    Example::

        try:
            rpc.shutdown(timeout=60)
        except tensorferry.errors.ConnectionLost as error:
            print("a peer died before it was done:", error)
    """
    agent = _default()
    try:
        agent.shutdown(graceful, timeout)
    finally:
        if agent._left:
            _C.set_default_agent(None)


def publish(value: Any) -> Published:
    """Encodes a value once, for any number of calls: what is large in it lies in one block of memory, which nobody can
    write any more.

    Anywhere in the arguments or the result of a call, beside values that the codec knows, the handle arrives as the
    value. A peer on this host maps the block and copies what it writes, page by page, so each has a value of its own
    and 64 of them take the memory of one. A peer that cannot map it (another host, another user, sockets alone) gets a
    copy, as by any call. Sending it again costs about an empty call.

    The block lives as long as the handle, or any tensor that arrived out of it, here or at a peer. It is a memfd, so
    nothing is left behind by a process that is killed. What is done to ``value`` later does not show.

    Args:
        value: tensors on the CPU and what the codec or pickle can take; no remote references, and nothing that
            :func:`tensorferry.share` or this function returned.

    Raises:
        TypeError: it cannot be encoded. InvalidArgument: it has tensors on a GPU. ResourceExhausted: no memory.

    Example::

        weights = rpc.publish(torch.nn.Linear(784, 10).state_dict())
        futures = [rpc.rpc_async(actor, len, args=(weights,)) for actor in ("worker1", "server")]
        assert tensorferry.wait_all(futures) == [2, 2]
    """
    return _current().publish(value)


def call_many(
    peers: Iterable[Peer],
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = -1.0,
) -> list[Future[Any]]:
    """Calls a function on many peers with the same arguments, which are encoded once (:func:`publish`).

    Args:
        peers: names, ranks or :class:`WorkerInfo`.
        func, args, kwargs, timeout: as for :func:`rpc_async`.

    Returns:
        A future for each peer, in their order; what goes wrong with one shows in its future alone.

    Raises:
        TypeError: the arguments cannot be sent.

    Example::

        weights = torch.nn.Linear(784, 10).state_dict()
        assert tensorferry.wait_all(rpc.call_many(["worker1", "server"], len, args=(weights,))) == [2, 2]
    """
    return _current().call_many(peers, func, args, kwargs, timeout)


def get_worker_info(worker_name: Peer | None = None) -> WorkerInfo:
    """Who the agent of that name (or rank) is; without one, this agent.

    Args:
        worker_name: a name or a rank; None: this agent.

    Raises:
        NotFound: there is none.

    Example::

        me = rpc.get_worker_info()
        next_one = rpc.get_worker_info(me.id + 1)
    """
    return _current().get_worker_info(worker_name)


def peer(name: Peer) -> PeerHandle:
    """A peer, with the verbs as methods, in order if wanted: see :class:`tensorferry.Peer`.

    Args:
        name: its name, its rank, or a :class:`WorkerInfo`. Of a name nothing is asked: the peer may come later.

    Raises:
        NotFound: there is no such rank. RuntimeError: there is no agent.

    Example::

        log = rpc.peer("worker1").ordered()
        first, second = log.rpc_async(print, args=("first",)), log.rpc_async(print, args=("second",))
        second.wait()
        assert first.done()
    """
    return _current().peer(name)


def rpc_stream(
    to: Peer,
    func: Callable[..., Iterable[_T] | AsyncIterator[_T]] | str,
    args: Iterable[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = -1.0,
    *,
    window: int = 8,
    require: str | None = None,
    wait_for_ready: bool = False,
) -> Stream[_T]:
    """Calls a generator function on a peer and returns an iterator over what it yields: see
    :meth:`tensorferry.Agent.rpc_stream`.

    Args:
        to, func, args, kwargs, timeout, window: as there. The time-out is of each item.
        require, wait_for_ready: as :func:`remote` takes them.

    Returns:
        A :class:`tensorferry.Stream`: an iterator, also an asynchronous one, and a context manager.

    Raises:
        What :meth:`tensorferry.Agent.rpc_stream` raises, at once or from the iterator.

    Example::

        async def ticks(count):                     # at the peer
            for tick in range(count):
                await asyncio.sleep(0.01)
                yield tick

        with rpc.rpc_stream("worker1", ticks, args=(3,)) as stream:
            assert [tick async for tick in stream] == [0, 1, 2]
    """
    return _current().rpc_stream(
        to, func, args, kwargs, timeout, window=window, require=require, wait_for_ready=wait_for_ready
    )


def explain(peer: Peer, tensor: torch.Tensor | None = None, *, device: DeviceChoice | None = None) -> Explanation:
    """Which channel carries tensors to ``peer``, and why not another: see :meth:`tensorferry.Agent.explain`.

    Args:
        peer: its name, rank, or :class:`WorkerInfo`.
        tensor: what would be sent; None: a CPU tensor of 1 MiB.
        device: where it is to land, as :func:`rpc_sync` has it.

    Raises:
        NotFound: there is no such peer. ConnectionLost: it cannot be reached.

    Example::

        print(rpc.explain("worker1", torch.ones(10)))
    """
    return _current().explain(peer, tensor, device=device)


def counters() -> Counters:
    """Calls, bytes and references of this agent so far: see :class:`tensorferry.Counters`.

    Raises:
        RuntimeError: there is no agent.

    Example::

        before = rpc.counters().calls_sent
        rpc.rpc_sync("worker1", max, args=(1, 2))
        assert rpc.counters().calls_sent == before + 1
    """
    return _current().counters()


def get_rpc_timeout() -> float:
    """The default time-out of calls, seconds; 0: none.

    Raises:
        RuntimeError: there is no agent.

    Example::

        half = rpc.get_rpc_timeout() / 2
        rpc.rpc_sync("worker1", max, args=(1, 2), timeout=half)
    """
    return _current().timeout


def _set_rpc_timeout(rpcTimeoutSeconds: float) -> None:
    _current().timeout = rpcTimeoutSeconds


def _is_current_rpc_agent_set() -> bool:
    agent = _C.default_agent()
    return agent is not None and agent._usable_here  # a forked child begins without one


def _current() -> Agent:
    agent = _C.current_agent()
    assert isinstance(agent, Agent)
    return agent


def _default() -> Agent:
    agent = _C.default_agent()
    if agent is None:
        raise RuntimeError("RPC has not been initialized. Call tensorferry.rpc.init_rpc first.")
    assert isinstance(agent, Agent)
    return agent
