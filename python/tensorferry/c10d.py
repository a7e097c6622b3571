"""The backend ``tensorferry`` of ``torch.distributed``: ``dist.init_process_group("tensorferry")``.

``pip install`` registers it, by an entry point. Without an installation, ``import tensorferry.c10d`` does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend
from torch.distributed import distributed_c10d

from . import _C, errors
from .agent import Agent
from .collectives import Group, _groups_of
from .regions import service_of
from .rendezvous import check_place, url_for_torch

__all__ = ["Options", "group_of", "register"]


class _Own:
    """An agent that the backend has made, for the process groups whose ranks meet in one store. ``_lock`` guards it."""

    def __init__(self, store: Any, options: dict[str, Any], rank: int) -> None:
        self.store = store
        self.options = options
        self.making = 0  # process groups that are being made
        self.agent = Agent(
            f"rank{rank}@{socket.gethostname()}:{os.getpid()}/{uuid.uuid4().hex[:8]}",  # no two agents have one name
            store=store,
            trust="registered",
            prefix="tensorferry/c10d",
            devices=[],
            **options,
        )
        store.set(self._mark, "")

    @property
    def _mark(self) -> str:
        return f"tensorferry/c10d/agent/{self.agent.name}"

    def is_in(self, store: Any) -> bool:
        """Whether ``store`` reaches what ``self.store`` does, perhaps by another connection."""
        if store is self.store:
            return True
        try:
            return bool(store.check([self._mark]))
        except RuntimeError:  # it fails, or cannot tell
            return False

    @property
    def usable(self) -> bool:
        return not self.agent._left and self.agent._usable_here

    @property
    def idle(self) -> bool:
        return self.making == 0 and not _groups_of(self.agent).in_use()


_lock = threading.Lock()
_own: list[_Own] = []
_leaving: list[threading.Thread] = []  # in which agents leave
_agents: WeakValueDictionary[str, Agent] = WeakValueDictionary()  # of all groups, by name


class Options(_C.ProcessGroupOptions):
    """Options of a process group: ``pg_options`` of ``init_process_group``, ``new_group`` and ``split_group``.

    All ranks of the group pass the same options, except for ``interface`` and ``host``. ``split_group`` without options
    takes those of the group that is split, without the name.

    Args:
        name: names the group in errors; ``""``: torch's name of the group.
        lazy: True: the group is made at once, and its ranks meet at its first operation. None: whether
            ``TORCH_GLOO_LAZY_INIT`` is 1.
        timeout: seconds, or a timedelta, for the formation and for each operation; None: that of torch. A ``timeout=``
            that is passed to torch takes precedence. ``split_group`` always uses its own.
        interface: the network interfaces to listen on, in the order in which peers try them, or names or addresses of
            this host: ``"ib0,eth0"``; ``""``: ``GLOO_SOCKET_IFNAME``, else as for :class:`tensorferry.Agent`.
        max_threads: how many functions the agent runs at once; None: as for :class:`tensorferry.Agent`.
        algorithms: algorithms that are prescribed, such as ``"all_reduce=two_shot"``; ``""``:
            ``TENSORFERRY_COLLECTIVES``.
        board: False: the ranks exchange messages even on one host.
        memory: False: the ranks do not read one another's memory.
        host: ranks that give the same text share a host; ``""``: those that run on one boot of a kernel.

    ``interface`` and ``max_threads`` are those of the agent that the backend makes for the first group whose ranks meet
    in a store. If the process has called ``init_rpc``, or a group has already made the store's agent with other values,
    making the group raises InvalidArgument.

    Raises:
        InvalidArgument: ``algorithms`` makes no sense.

    Example::

        options = tensorferry.c10d.Options(name="gradients", algorithms="all_reduce=two_shot")
        dist.init_process_group("tensorferry", pg_options=options)
    """

    def __init__(
        self,
        *,
        name: str = "",
        lazy: bool | None = None,
        timeout: float | timedelta | None = None,
        interface: str = "",
        max_threads: int | None = None,
        algorithms: str = "",
        board: bool = True,
        memory: bool = True,
        host: str = "",
    ) -> None:
        super().__init__(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        self.name = name
        self.lazy = os.environ.get("TORCH_GLOO_LAZY_INIT") == "1" if lazy is None else lazy
        self.interface = interface
        self.max_threads = 0 if max_threads is None else max_threads
        self.algorithms = algorithms
        self.board = board
        self.memory = memory
        self.host = host
        self.check()


def _shared(store: Any) -> Any:
    """Returns the store without the prefixes that torch has put around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _own_of(store: Any, options: dict[str, Any], rank: int) -> _Own:
    """Returns the agent for the groups that meet in ``store``. Those of other stores leave if all their groups have
    gone: ranks that meet in a new store may know nothing of the old one, and its server may have died. ``rank`` is the
    rank in the world, for the name of a new agent."""
    _own[:] = [own for own in _own if own.usable]
    found = next((own for own in _own if own.is_in(store)), None)
    for own in [own for own in _own if own is not found and own.idle]:
        _own.remove(own)
        # In the background, because the old store may not answer.
        _leaving[:] = [thread for thread in _leaving if thread.is_alive()]
        _leaving.append(threading.Thread(target=own.agent.leave, name="tensorferry-leave", daemon=True))
        _leaving[-1].start()
    if found is None:
        found = _Own(store, options, rank)
        _own.append(found)
    for option, value in options.items():
        if found.options.get(option) != value:
            raise errors.InvalidArgument(
                f"Options sets {option}={value!r}, but an earlier process group has made the agent for this store "
                f"with {option}={found.options.get(option)!r}: pass it to init_process_group()"
            )
    return found


@atexit.register
def _end() -> None:
    """Runs before the agents leave, which ends what other threads wait for. Waits up to 2 s for each agent that is
    leaving: its thread must not enter Python after the end."""
    _C.keep_waiting_threads()
    for thread in _leaving:
        thread.join(2)


@contextlib.contextmanager
def _agent(store: Any, options: _C.ProcessGroupOptions, rank: int = 0) -> Iterator[Agent]:
    """Lends the agent of ``init_rpc``, or else one of the backend's own, with the options that concern it."""
    wanted: dict[str, Any] = {}
    if options.interface:
        wanted["interface"] = options.interface
    if options.max_threads:
        wanted["max_threads"] = options.max_threads
    default = _C.default_agent()
    if default is not None and not default._left and default._usable_here:
        if wanted:
            raise errors.InvalidArgument(
                f"Options sets {' and '.join(wanted)}, but the backend uses the agent of init_rpc(): "
                "pass them to init_rpc()"
            )
        assert isinstance(default, Agent)
        yield default
        return
    if not options.interface and "TENSORFERRY_SOCKET_IFNAME" not in os.environ and os.environ.get("GLOO_SOCKET_IFNAME"):
        wanted["interface"] = os.environ["GLOO_SOCKET_IFNAME"]
    with _lock:
        own = _own_of(_shared(store), wanted, rank)
        own.making += 1
    try:
        yield own.agent
    finally:
        with _lock:
            own.making -= 1


def _checked(options: Any, pg_options: Any) -> _C.ProcessGroupOptions:
    """Returns the options if they are ours. Those of another backend of the same process group do not concern us."""
    if pg_options is None:
        return Options()
    if isinstance(pg_options, _C.ProcessGroupOptions):
        return pg_options
    foreign = isinstance(pg_options, C10dBackend.Options)
    group = getattr(options, "process_group", None)  # torch 2.11 does not tell it
    if foreign and (group is None or group.name() != "custom"):
        return Options()
    raise TypeError(
        "pg_options of the backend tensorferry is a tensorferry.c10d.Options, "
        f"not a {type(pg_options).__module__}.{type(pg_options).__qualname__}"
    )


def _make(options: Any, pg_options: Any = None) -> Any:
    chosen = _checked(options, pg_options)
    timeout = options.timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    ranks = options.global_ranks_in_group
    rank = ranks[options.group_rank] if ranks else options.group_rank
    with _agent(options.store, chosen, rank) as agent:
        _agents[agent.name] = agent
        groups = _groups_of(agent)  # serves groups before another rank can know this agent
        return _C.ProcessGroup(
            groups,
            options.store,
            options.group_rank,
            options.group_size,
            chosen,
            options.group_id or "default",
            seconds,
            options.global_ranks_in_group,
            service_of(agent),  # for windows
            getattr(options, "enable_reconfigure", False),  # torch 2.11 lacks it
        )


def group_of(process_group: Any = None) -> Group:
    """Returns the :class:`tensorferry.collectives.Group` under a process group of torch's; None: the default one.

    A lazy group that no operation has formed is formed: all its ranks call this, or an operation.

    Raises:
        KeyError: the process group has another backend. AgentClosed: the agent of the group has left.

    Example::

        print(tensorferry.c10d.group_of().explain("all_reduce", 1 << 20))
    """
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError("there is no default process group: call torch.distributed.init_process_group() first")
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        backend = None
    if not isinstance(backend, _C.ProcessGroup):
        backend = getattr(backend, "wrapped_pg", None)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(backend, _C.ProcessGroup):
        raise KeyError(f"the process group {group.group_name!r} does not have the backend tensorferry")
    found = backend.group
    agent = _agents.get(found.names[found.rank])
    if agent is None:
        raise errors.AgentClosed("the agent of the process group has left")
    return Group(agent, found)


_torch_init_process_group = dist.init_process_group
_torch_signature = inspect.signature(_torch_init_process_group)


@functools.wraps(_torch_init_process_group)
def _init_process_group(*args: Any, **kwargs: Any) -> None:
    # If the group has this backend, opens a TCPStore by open_store(). In torch's own, each rank waits for the server,
    # and rank 0 for all others, deaf to Ctrl-C and without a word of who is missing.
    try:
        bound = _torch_signature.bind(*args, **kwargs)
    except TypeError:  # torch names the function
        return _torch_init_process_group(*args, **kwargs)
    given = bound.arguments
    if "tensorferry" not in str(given.get("backend")).lower():
        return _torch_init_process_group(*args, **kwargs)
    method = "" if given.get("store") is not None else given.get("init_method") or "env://"
    place = given.get("rank", -1), given.get("world_size", -1)
    check_place(method, *place)
    timeout = given.get("timeout") or distributed_c10d.default_pg_timeout
    given["init_method"] = _interruptible_method(method, *place, timeout) or given.get("init_method")
    try:
        return _torch_init_process_group(*bound.args, **bound.kwargs)
    except errors.DeadlineExceeded as error:  # a program expects torch's class
        raise dist.DistNetworkError(f"DeadlineExceeded: {error}") from None


def _interruptible_method(method: str, rank: int, world_size: int, timeout: timedelta) -> str | None:
    """Returns the ``init_method`` of a store that is to be opened by open_store(); None: torch opens it."""
    if method != "env://" and (not method.startswith("tcp://") or "?" in method or -1 in (rank, world_size)):
        return None
    try:
        if method == "env://":  # torch takes each from the environment by itself
            rank = int(os.environ["RANK"]) if rank == -1 else rank
            world_size = int(os.environ["WORLD_SIZE"]) if world_size == -1 else world_size
        found = _C.Rendezvous(method, rank, world_size)
    except (KeyError, TypeError, ValueError):  # torch says what is wrong
        return None
    return url_for_torch(method, found, timeout.total_seconds())


def register() -> None:
    """Registers the backend. Does nothing the second time."""
    if hasattr(dist.Backend, "TENSORFERRY"):
        return
    dist.Backend.register_backend("tensorferry", _make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group = distributed_c10d.init_process_group = _init_process_group


register()
