"""The rendezvous of agents: at a store of torch's, or at the built-in one."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import math
import socket
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import _C
from .errors import ConnectionLost, DeadlineExceeded, InvalidArgument

__all__ = ["Meeting", "StoreServer", "connect_store", "meet"]

_log = logging.getLogger("tensorferry")
_QUIET = 5.0  # seconds of waiting before a line says what is awaited


class StoreServer(_C.StoreServer):
    """Serves the built-in store, for jobs without a store of torch's. It serves until the object is dropped.

    Args:
        host: the address to listen on. Beyond this host, the server needs a ``key``, and demands it of every client.
        port: the port to listen on; 0: any free port, see :attr:`port`.
        key: the cluster key.
        tls: as for :class:`tensorferry.Agent`; the clients need the same form.

    Raises:
        Unauthenticated: the address is reachable from other hosts, and there is no key.
        InvalidArgument: ``tls`` makes no sense, or a file of it cannot be used.
        InternalError: the server cannot listen on the address.

    Example::

        server = tensorferry.StoreServer("127.0.0.1", 0)
        store = tensorferry.connect_store("127.0.0.1", server.port)
        with tensorferry.Agent("here", store=store) as agent:
            print(agent.rpc_sync("here", max, args=(1, 2)))
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, key: str = "", tls: str = "") -> None:
        super().__init__(host, port, key, tls)


def connect_store(host: str, port: int, key: str = "", timeout: float = 60.0, tls: str = "") -> _C.Store:
    """Returns a client of a :class:`StoreServer`, for ``store=`` of ``init_rpc`` and ``Agent``.

    Args:
        host: the server's address.
        port: the server's port.
        key: the cluster key, if the server has one.
        timeout: how many seconds to retry connecting: the server may start later.
        tls: as the server's.

    Raises:
        Unauthenticated: the server has another key, or one end uses TLS and the other does not.
        DeadlineExceeded, ConnectionLost: the server cannot be reached.

    Example::

        server = tensorferry.StoreServer("127.0.0.1", 0, key="a secret of 16 letters")
        store = tensorferry.connect_store("127.0.0.1", server.port, key="a secret of 16 letters", timeout=10)
    """
    return _C.connect_store(host, port, key, timeout, tls)


@dataclass
class Meeting:
    """A store, this agent's rank there, the world size (0: agents join and leave at any time), and the store's host."""

    store: _C.Store
    rank: int
    world_size: int
    host: str
    place: str  # equal for meetings at the same place, even if each makes a new store object


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of stores without an address
_count = itertools.count()


def _place_of(store: Any) -> str:
    if isinstance(store, dist.TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, dist.FileStore):
        return str(getattr(store, "path"))  # noqa: B009, torch's stubs lack it
    return f"store {_numbers.setdefault(store, next(_count))}"


def _loopback_address(host: str) -> str | None:
    """Returns the address to listen on if ``host`` leads to this host alone, IPv4 before IPv6; None: it does not."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    if not found or not all(ipaddress.ip_address(each).is_loopback for each in found):
        return None
    return min(found, key=lambda each: ":" in each)


def _listen_on_loopback(host: str, port: int) -> int | None:
    """Returns a listener for the store of torch, which would listen on all addresses by itself.

    None: ``host`` is no loopback address, or the port is taken. In that case torch says so, or finds that a store of
    this process has the port, and shares it.
    """
    address = _loopback_address(host)
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=4096).detach()
    except OSError:
        return None


def _open_tcp_store(found: _C.Rendezvous) -> dist.TCPStore:
    """Returns the store at the rendezvous; the agent of rank 0 serves it, unless torchrun does."""
    serves = found.rank == 0 and not found.torchrun
    return dist.TCPStore(
        found.host, found.port, found.world_size or None, is_master=serves,
        timeout=timedelta(seconds=300), wait_for_workers=False, multi_tenant=True,
        master_listen_fd=_listen_on_loopback(found.host, found.port) if serves else None,
    )  # fmt: skip


def _await_server(found: _C.Rendezvous, timeout: float) -> None:
    """Waits until the server of a TCPStore takes connections: torch's client would hear neither of Ctrl-C nor of
    ``timeout`` (seconds; 0: no limit)."""
    address = f"{found.host}:{found.port}"
    began = time.monotonic()
    until = began + timeout if timeout > 0 else math.inf
    says_at = began + _QUIET
    pause = 0.01
    while True:
        try:
            socket.create_connection((found.host, found.port), max(0.001, min(1.0, until - time.monotonic()))).close()
        except OSError as error:
            why = error
        else:
            return
        now = time.monotonic()
        if now >= until:
            raise DeadlineExceeded(
                f"the rendezvous host at {address} cannot be reached within {timeout:g} s ({why}): is the process of "
                "rank 0 running, and are the address and port (MASTER_ADDR, MASTER_PORT) those of its host?"
            )
        if now >= says_at:
            says_at = math.inf
            server = "torchrun" if found.torchrun else "the process of rank 0"
            _log.warning(
                "rank %d waits for %s, which serves the rendezvous at %s (%s)", found.rank, server, address, why
            )
        time.sleep(min(pause, max(0.0, until - now)))
        pause = min(2 * pause, 0.5)


def _unreachable(found: _C.Rendezvous, error: Exception) -> ConnectionLost:
    """Returns the error of a store that torch could neither serve nor reach, without the C++ stack in torch's text."""
    why = str(error).split("\n", 1)[0]
    if found.rank == 0 and not found.torchrun:
        return ConnectionLost(f"rank 0 cannot serve the rendezvous at {found.host}:{found.port}: {why}")
    return ConnectionLost(
        f"the rendezvous host at {found.host}:{found.port} cannot be reached ({why}): is the process of rank 0 "
        "running, and are the address and port (MASTER_ADDR, MASTER_PORT) those of its host?"
    )


def meet(
    init_method: str | None, store: Any, rank: int, world_size: int | None, join_timeout: float = 300.0
) -> Meeting:
    """Returns the store to join at, with the rank and the world size.

    Args:
        init_method: ``env://`` (the default: the variables that torchrun sets), ``tcp://host:port``, ``file:///path``;
            as for ``torch.distributed.init_process_group``.
        store: the store to use instead: one of torch's stores, or the result of :func:`connect_store`.
        rank: this agent's rank; -1: with ``env://``, the rank in the environment, if any; else none.
        world_size: the number of agents that begin together; None: with ``env://`` and no rank given, the size in the
            environment, if any; else agents join and leave at any time.
        join_timeout: seconds to wait for the process that serves the store; 0: no limit.
    """
    if store is not None:
        adapted = store if isinstance(store, _C.Store) else _C.adapt_store(store)
        host = getattr(store, "host", "")
        return Meeting(adapted, rank, world_size or 0, host if isinstance(host, str) else "", _place_of(store))
    init_method = init_method or "env://"
    found = _C.Rendezvous(init_method, rank, world_size or 0)
    if found.built_in:
        raise InvalidArgument(f"{init_method}: pass store=tensorferry.connect_store(host, port) instead")
    if not found.path and (found.rank != 0 or found.torchrun):
        _await_server(found, join_timeout)
    try:
        store = dist.FileStore(found.path, found.world_size or -1) if found.path else _open_tcp_store(found)
    except dist.DistError as error:
        raise _unreachable(found, error) from None
    return Meeting(_C.adapt_store(store), found.rank, found.world_size, found.host, found.place)
