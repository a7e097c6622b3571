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
    """An agent that becomes the default agent before peers can find it.

    A function that a peer calls may run before :func:`init_rpc` has returned. That function, its callbacks and its
    threads may use the functions of this module.
    """

    def _announce(self) -> None:
        _C.set_default_agent(self)
        super()._announce()


def is_available() -> bool:
    """Returns True always. torch's function of this name returns whether torch was built with RPC.

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

    With a world size, it returns when all ranks have joined. Under torchrun, it needs no argument.

    Args:
        name: the agent's name, unique; None: ``worker<rank>``.
        backend: accepted for compatibility with torch; there is only one backend.
        rank: the agent's rank, unique, from 0; -1: the rank in the environment, or none.
        world_size: the number of agents that begin together; None: the size in the environment if the rank comes from
            there too, else agents join and leave at any time.
        rpc_backend_options: torch's options; ``rpc_timeout``, ``init_method``, ``devices`` and ``device_maps`` are
            used.
        store: the store at which the agents meet, instead of ``init_method``: one of torch's stores, or the result of
            ``tensorferry.connect_store``.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``; overrides that of the options.
        timeout: the default time-out of calls, in seconds; 0: none; overrides that of the options.
        agent_options: ``key``, ``channels``, ``trust``, ``join_timeout`` and others: see :class:`tensorferry.Agent`.

    Raises:
        RuntimeError: there is a default agent already. Otherwise as :class:`tensorferry.Agent`.

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
    for option in ("devices", "device_maps"):  # torch's base class RpcBackendOptions has neither
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
    """Shuts the default agent down: see :meth:`tensorferry.Agent.shutdown`.

    Args:
        graceful: first wait for the calls under way. With a world size, wait for the calls of all agents of the world,
            and until all of them have called ``shutdown``.
        timeout: seconds to wait at most; 0: no limit.

    Raises:
        RuntimeError: there is no default agent. Otherwise as :meth:`tensorferry.Agent.shutdown`.

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
    """Encodes a value once, for any number of calls. Its tensors and other large parts lie in one read-only block of
    memory.

    The returned handle may stand anywhere in the arguments or the result of a call, beside values that the codec knows.
    It arrives there as the value. A peer on this host maps the block copy-on-write: each peer has a value of its own,
    and 64 peers use the memory of one. A peer that cannot map the block (on another host, of another user, with sockets
    alone) gets a copy, as in any call. Sending the handle again costs about as much as an empty call.

    The block lives as long as the handle or any tensor that arrived out of the block, here or at a peer. The block is a
    memfd, so a killed process leaves nothing behind. Later changes of ``value`` do not change the block.

    Args:
        value: CPU tensors, and other values that the codec or pickle can encode. Not allowed: remote references, and
            results of :func:`tensorferry.share` or of this function.

    Raises:
        TypeError: the value cannot be encoded.
        InvalidArgument: the value contains tensors on a GPU.
        ResourceExhausted: there is no memory left.

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

    Arguments that cannot be published, or whose tensors have less than 64 KiB in all, are encoded for each peer.

    Args:
        peers: the peers' names, ranks or :class:`WorkerInfo`.
        func, args, kwargs, timeout: as for :func:`rpc_async`.

    Returns:
        One future for each peer, in the order of ``peers``. An error at one peer fails that peer's future alone.

    Raises:
        TypeError: the arguments cannot be sent.

    Example::

        weights = torch.nn.Linear(784, 10).state_dict()
        assert tensorferry.wait_all(rpc.call_many(["worker1", "server"], len, args=(weights,))) == [2, 2]
    """
    return _current().call_many(peers, func, args, kwargs, timeout)


def get_worker_info(worker_name: Peer | None = None) -> WorkerInfo:
    """Returns the name and rank of an agent.

    Args:
        worker_name: the agent's name or rank; None: this agent.

    Raises:
        NotFound: there is no such agent.

    Example::

        me = rpc.get_worker_info()
        next_one = rpc.get_worker_info(me.id + 1)
    """
    return _current().get_worker_info(worker_name)


def peer(name: Peer) -> PeerHandle:
    """Returns a handle on a peer, with the calls as methods, in order if wanted: see :class:`tensorferry.Peer`.

    Args:
        name: the peer's name, its rank, or a :class:`WorkerInfo`. A name is not looked up: the peer may join later.

    Raises:
        NotFound: no agent has that rank. RuntimeError: there is no default agent.

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
    """Calls a generator function on a peer and returns an iterator over its items: see
    :meth:`tensorferry.Agent.rpc_stream`.

    Args:
        to, func, args, kwargs, timeout, window: as for that method. The time-out applies to each item.
        require, wait_for_ready: as for :func:`remote`.

    Returns:
        A :class:`tensorferry.Stream`: an iterator, also an asynchronous one, and a context manager.

    Raises:
        As :meth:`tensorferry.Agent.rpc_stream`, at once or from the iterator.

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
    """Explains which channel would carry a tensor to ``peer``, and why the others would not: see
    :meth:`tensorferry.Agent.explain`.

    Args:
        peer: the peer's name, rank, or :class:`WorkerInfo`.
        tensor: the tensor that would be sent; None: a CPU tensor of 1 MiB.
        device: the device on which the tensor is to land, as for :func:`rpc_sync`.

    Raises:
        NotFound: there is no such peer. ConnectionLost: the peer cannot be reached.

    Example::

        print(rpc.explain("worker1", torch.ones(10)))
    """
    return _current().explain(peer, tensor, device=device)


def counters() -> Counters:
    """Returns the default agent's calls, bytes and references so far: see :class:`tensorferry.Counters`.

    Raises:
        RuntimeError: there is no default agent.

    Example::

        before = rpc.counters().calls_sent
        rpc.rpc_sync("worker1", max, args=(1, 2))
        assert rpc.counters().calls_sent == before + 1
    """
    return _current().counters()


def get_rpc_timeout() -> float:
    """Returns the default time-out of calls, in seconds; 0: none.

    Raises:
        RuntimeError: there is no default agent.

    Example::

        half = rpc.get_rpc_timeout() / 2
        rpc.rpc_sync("worker1", max, args=(1, 2), timeout=half)
    """
    return _current().timeout


def _set_rpc_timeout(rpcTimeoutSeconds: float) -> None:
    _current().timeout = rpcTimeoutSeconds


def _is_current_rpc_agent_set() -> bool:
    agent = _C.default_agent()
    return agent is not None and agent._usable_here  # a forked child starts without an agent


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
