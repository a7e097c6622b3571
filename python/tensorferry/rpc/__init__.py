"""Remote calls, with the names, positions and defaults of ``torch.distributed.rpc``.

Most functions are methods of :class:`tensorferry.Agent`. Here they use the agent that serves the call in which they
run, else the default agent, and raise RuntimeError if there is none.

Example::

    import tensorferry.rpc as rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    print(rpc.rpc_sync("worker1", max, args=(1, 2)))
    rpc.shutdown()
"""

from __future__ import annotations

import threading
from typing import Any

from .. import _C
from .._C import Published, PyRRef, RRef
from ..agent import Agent, WorkerInfo
from ..batching import batch
from ..deadlines import cancelled, deadline
from ..exposing import expose
from ..verbs import of_current_agent
from . import functions, options
from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions

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
    "dump",
    "explain",
    "expose",
    "find_region",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "metrics",
    "peer",
    "publish",
    "region",
    "remote",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "shutdown",
    "subscribe",
    "trace",
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
        RuntimeError: there is a default agent already. TypeError: the options are of another class, whose settings
            would have no effect. Otherwise as :class:`tensorferry.Agent`.

    Example::

        rpc.init_rpc("alone", rank=0, world_size=1, init_method="tcp://127.0.0.1:29417", timeout=10)
        print(rpc.rpc_sync("alone", max, args=(1, 2)))
        rpc.shutdown()
    """
    if backend is not None and getattr(backend, "name", None) not in BackendType.__members__:
        raise TypeError("Argument backend must be a member of BackendType")
    given = rpc_backend_options
    if given is not None and not options.are_known(given):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions or TensorPipeRpcBackendOptions, not "
            f"{type(given).__qualname__}"
        )
    if timeout is None:
        timeout = options.DEFAULT_RPC_TIMEOUT_SEC if given is None else given.rpc_timeout
    if init_method is None and given is not None:
        init_method = given.init_method
    for option in ("devices", "device_maps"):  # torch's base class RpcBackendOptions has neither
        if value := getattr(given, option, None):
            agent_options.setdefault(option, value)
    own_options = getattr(given, "agent_options", None)
    agent_options = {**(options.options_of_torchs(given) if own_options is None else own_options), **agent_options}
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
    except KeyboardInterrupt:  # the agent may still be leaving
        _C.set_default_agent(None)
        raise
    finally:
        if agent._left:
            _C.set_default_agent(None)


rpc_sync = of_current_agent(Agent.rpc_sync)
rpc_async = of_current_agent(Agent.rpc_async)
remote = of_current_agent(Agent.remote)
rpc_stream = of_current_agent(Agent.rpc_stream)
call_many = of_current_agent(Agent.call_many)
publish = of_current_agent(Agent.publish)
subscribe = of_current_agent(Agent.subscribe)
region = of_current_agent(Agent.region)
find_region = of_current_agent(Agent.find_region)
peer = of_current_agent(Agent.peer)
get_worker_info = of_current_agent(Agent.get_worker_info)
explain = of_current_agent(Agent.explain)
counters = of_current_agent(Agent.counters)
metrics = of_current_agent(Agent.metrics)
trace = of_current_agent(Agent.trace)
dump = of_current_agent(Agent.dump)


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
