"""The rendezvous of agents: at a store of torch's, or at the built-in one."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlparse

import torch.distributed as dist

from . import _C
from .errors import ConnectionLost, DeadlineExceeded, InvalidArgument

__all__ = ["Meeting", "StoreServer", "connect_store", "meet"]

_log = logging.getLogger("tensorferry")
_T = TypeVar("_T")


class LongWait:
    """A wait of ``timeout`` seconds at most (0: no limit). After 5 s, one line tells what is awaited."""

    _QUIET = 5.0

    def __init__(self, timeout: float) -> None:
        now = time.monotonic()
        self._until = now + timeout if timeout > 0 else math.inf
        self._tells_at = now + self._QUIET

    def tell(self, text: Callable[[], str]) -> None:
        """Logs the text once, if the wait has become long. To be called again and again, and before giving up."""
        if time.monotonic() < self._tells_at:
            return
        self._tells_at = math.inf
        _log.warning("%s", text())

    def left(self) -> float:
        """Returns the seconds left."""
        return max(0.0, self._until - time.monotonic())

    def over(self) -> bool:
        """Whether the time has passed."""
        return self.left() == 0


@contextlib.contextmanager
def interruption_names(awaited: str) -> Iterator[None]:
    """Lets a KeyboardInterrupt inside say what was waited for."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not error.args:
            error.args = (f"interrupted while waiting for {awaited}",)
        raise


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


def _run_within(timeout: float, awaited: str, call: Callable[[], _T]) -> _T:
    """Returns the result of ``call``, which a server that hangs would hold up: runs it on a thread of its own, so that
    Ctrl-C and ``timeout`` (seconds; 0: no limit) end the wait. The call then goes on by itself."""
    results: list[_T] = []
    errors_: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors_.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="tensorferry-join", daemon=True).start()
    wait = LongWait(timeout)
    with interruption_names(awaited):
        while not ended.wait(min(0.5, wait.left())):
            wait.tell(lambda: f"waits for an answer of {awaited}")
            if wait.over():
                raise DeadlineExceeded(f"{awaited} does not answer within {timeout:g} s: has its process stopped?")
    if errors_:
        raise errors_[0]
    return results[0]


def _check_that_it_answers(store: _C.Store) -> None:
    """Returns once the store's server has answered a request."""
    store.get("tensorferry/none", 0)


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
    server = "torchrun" if found.torchrun else "the process of rank 0"

    def awaited(why: OSError) -> str:
        return f"rank {found.rank} waits for {server}, which serves the rendezvous at {address} ({why})"

    wait = LongWait(timeout)
    pause = 0.01
    while True:
        try:
            socket.create_connection((found.host, found.port), max(0.001, min(1.0, wait.left()))).close()
        except OSError as error:
            why = error
        else:
            return
        wait.tell(functools.partial(awaited, why))
        if wait.over():
            raise DeadlineExceeded(
                f"the rendezvous host at {address} cannot be reached within {timeout:g} s ({why}): is the process of "
                "rank 0 running, and are the address and port (MASTER_ADDR, MASTER_PORT) those of its host?"
            )
        time.sleep(min(pause, wait.left()))
        pause = min(2 * pause, 0.5)


def open_store(found: _C.Rendezvous, timeout: float) -> dist.Store:
    """Returns torch's store at the rendezvous, whose server has answered.

    Args:
        found: names no built-in store.
        timeout: seconds to wait for the server; 0: no limit.

    Raises:
        DeadlineExceeded: nothing answers there within ``timeout``. DistError: torch's, if the store cannot be served or
            reached.
    """
    if not found.path and (found.rank != 0 or found.torchrun):
        with interruption_names("the rendezvous"):
            _await_server(found, timeout)

    def opened() -> dist.Store:
        store = dist.FileStore(found.path, found.world_size or -1) if found.path else _open_tcp_store(found)
        _check_that_it_answers(_C.adapt_store(store))
        return store

    return _run_within(timeout, found.path or f"the rendezvous host at {found.host}:{found.port}", opened)


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
        _run_within(join_timeout, "the store", functools.partial(_check_that_it_answers, adapted))
        host = getattr(store, "host", "")
        return Meeting(adapted, rank, world_size or 0, host if isinstance(host, str) else "", _place_of(store))
    init_method = init_method or "env://"
    found = _C.Rendezvous(init_method, rank, world_size or 0)
    if found.built_in:
        raise InvalidArgument(f"{init_method}: pass store=tensorferry.connect_store(host, port) instead")
    try:
        store = open_store(found, join_timeout)
    except dist.DistError as error:
        raise _unreachable(found, error) from None
    return Meeting(_C.adapt_store(store), found.rank, found.world_size, found.host, found.place)


# ---- torch's own entry points

_SCHEME = "tensorferry"


def url_for_torch(method: str, found: _C.Rendezvous, join_timeout: float) -> str:
    """Returns the ``init_method`` by which torch opens the TCPStore at ``found`` with :func:`open_store`: torch's own
    wait for the server and for the other ranks hears no Ctrl-C, and tells of none of them."""
    query = urlencode({"method": method, "join_timeout": join_timeout})
    host = f"[{found.host}]" if ":" in found.host else found.host
    return f"{_SCHEME}://{host}:{found.port}?{query}"


def _open_for_torch(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """The handler of the scheme."""
    query = dict(parse_qsl(urlparse(url).query))
    world_size = max(0, int(query.get("world_size", 0)))  # torch adds -1 for a group without one
    found = _C.Rendezvous(query["method"], int(query.get("rank", -1)), world_size)
    yield open_store(found, float(query["join_timeout"])), found.rank, found.world_size


def check_place(method: str, rank: Any, world_size: Any) -> None:
    """Raises InvalidArgument if the world has no such rank, for which torch would wait. -1 and None stand for what the
    environment says, if the method is ``env://``."""

    def given(value: Any, variable: str) -> int:
        if value in (None, -1):
            return int(os.environ.get(variable, -1)) if method.startswith("env://") else -1
        return int(value)

    try:
        rank, world_size = given(rank, "RANK"), given(world_size, "WORLD_SIZE")
    except (TypeError, ValueError):  # torch says what is wrong
        return
    if world_size > 0 and not -1 <= rank < world_size:
        raise InvalidArgument(f"rank {rank} is not within a world of {world_size}: ranks are 0 to {world_size - 1}")


dist.register_rendezvous_handler(_SCHEME, _open_for_torch)  # type: ignore[no-untyped-call]
