"""One process's place among its peers: joining, calling, leaving."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _C, errors, exposing
from .rendezvous import meet

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from typing import TypeAlias

    import torch

    from .futures import Future
    from .rendezvous import Meeting

    Peer: TypeAlias = "str | int | WorkerInfo"

__all__ = ["Agent", "Counters", "Explanation", "WorkerInfo"]

_WORTH_A_BLOCK = 64 * 1024  # bytes of tensors that call_many puts into memory for all


@dataclass(frozen=True)
class WorkerInfo:
    """An agent, as :func:`get_worker_info` tells of it; stands for its name in calls.

    Args:
        name: unique among the agents that meet.
        id: its rank; -1 where it joined without one.
    """

    name: str
    id: int


@dataclass(frozen=True)
class Explanation:
    """Which channel carries tensors to a peer, and why not another. Prints as a table.

    Args:
        peer: the peer's name.
        devices: what the answer is about, such as ``"cpu -> cpu"``.
        channel: the channel that carries them now; ``""`` where none does.
        transport: what carries the calls themselves: ``"ring"`` (memory that both map), ``"unix"`` or ``"tcp"``.
        no_ring: why it is not ``"ring"``.
        candidates: (channel, usable, reason), in the order in which they are tried.
    """

    peer: str
    devices: str
    channel: str
    transport: str
    no_ring: str
    candidates: list[tuple[str, bool, str]]

    def __str__(self) -> str:
        width = max([len("channel"), *(len(name) for name, _, _ in self.candidates)])
        lines = [f"{self.peer}: {self.devices} by {self.channel or 'no channel'}, calls over {self.transport}"]
        if self.no_ring:
            lines.append(f"  no ring: {self.no_ring}")
        lines.append(f"  {'channel':{width}}  usable  why")
        for name, usable, reason in self.candidates:
            lines.append(f"  {name:{width}}  {'yes' if usable else 'no':6}  {reason}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class Counters:
    """What an agent has done since it joined.

    Args:
        calls_sent: calls made here.
        calls_served: calls of others answered here.
        calls_failed: calls made here that ended with an error of ours.
        bytes_sent: bytes of tensors and large buffers, by channel, those that were handed over by ``share`` too;
            ``"inline"`` inside the calls' own frames.
        bytes_received: likewise.
    """

    calls_sent: int
    calls_served: int
    calls_failed: int
    bytes_sent: dict[str, int] = field(default_factory=dict)
    bytes_received: dict[str, int] = field(default_factory=dict)


_sessions: Counter[Hashable] = Counter()  # worlds begun, by place, size and rank
_living: set[Agent] = set()  # an agent lives until it leaves, whether or not anybody holds it
_lock = threading.Lock()  # guards both


def _prefix(meeting: Meeting) -> str:
    """Of the keys of one session.

    In a world all begin together, so that one process may begin again while another still ends: a session of theirs is
    not one of ours. Ranks are counted apart, as several may be in one process; and sizes, as a rank may be in some.
    """
    if not meeting.world_size:
        return "tensorferry"
    world = meeting.place, meeting.world_size, meeting.rank
    with _lock:
        session = _sessions[world]
        _sessions[world] += 1
    return f"tensorferry/{meeting.world_size}/{session}"


def _device(device: torch.device | None) -> tuple[int, int]:
    kinds = {"cpu": 0, "cuda": 1}
    if device is None:
        return 0, 0
    return kinds[device.type], device.index or 0


class Agent(_C.Agent):
    """An agent of its own, with the verbs of :mod:`tensorferry.rpc` as methods; several can live in one process.

    Args:
        name: unique among the agents that meet; None: ``worker<rank>``.
        rank: unique, from 0; -1: the environment's (torchrun), or none.
        world_size: wait until so many ranks have joined; then ``shutdown`` waits for all their calls. None: the
            environment's where the rank is too, else agents join and leave at any time.
        store: where agents meet: a store of torch's, or of :func:`tensorferry.connect_store`; else ``init_method``.
        init_method: ``env://`` (the default), ``tcp://host:port``, ``file:///path``.
        timeout: the default time-out of calls, seconds; 0: none.
        join_timeout: seconds to wait for the world.
        key: the cluster key; else ``TENSORFERRY_KEY_FILE`` or ``TENSORFERRY_KEY``; needed beyond this host.
        channels: ``"xth,basic"`` allows these alone, in this order, ``"-xth"`` all others; else
            ``TENSORFERRY_CHANNELS``.
        interface: the network interface to listen on; else ``TENSORFERRY_SOCKET_IFNAME``, else the one that leads to
            the store's host.
        ports: ``"7000"`` or ``"7000-7099"``; else any.
        unix_sockets: False: TCP also between processes of one host.
        shared_memory: False: no memory is shared with peers: sockets carry every call, and channels that share memory
            are left out unless ``channels`` names them.
        socket_dir: the folder of unix sockets; else ``TENSORFERRY_SOCKET_DIR``, else they have no file.
        max_threads: functions that run here at once; then calls fail with :class:`ResourceExhausted`.
        max_bytes_in_flight: bytes under way to one peer, beyond which callers wait.
        heartbeat: seconds between signs of life to a peer on another host; it is lost when three are missing.
        trust: ``"full"``: peers may call every function that can be imported here, and pickles that they send are
            loaded. ``"registered"``: they may call what was exposed (:meth:`expose`, :func:`tensorferry.rpc.expose`)
            and nothing else, and no pickle is loaded or sent. ``docs/security.md`` says what each risks.

    Raises:
        InvalidArgument: the name or rank belongs to an agent that lives, or an argument makes no sense.
        Unauthenticated: there is no key to listen beyond this host with, or the others have another one.
        DeadlineExceeded: not all have joined; says who is missing.

    Example::

        store = torch.distributed.HashStore()
        with tensorferry.Agent("a", store=store) as a, tensorferry.Agent("b", store=store):
            print(a.rpc_sync("b", max, args=(1, 2)))
    """

    def __init__(
        self,
        name: str | None = None,
        rank: int = -1,
        world_size: int | None = None,
        *,
        store: Any = None,
        init_method: str | None = None,
        timeout: float = 60.0,
        join_timeout: float = 300.0,
        trust: str = "full",
        **options: Any,
    ) -> None:
        meeting = meet(init_method, store, rank, world_size)
        if "prefix" not in options:
            options["prefix"] = _prefix(meeting)
        options.setdefault("reaches", meeting.host)
        if name is None:
            if meeting.rank < 0:
                raise errors.InvalidArgument("an agent without a rank needs a name")
            name = f"worker{meeting.rank}"
        super().__init__(name, meeting.rank, meeting.store, timeout, options, trust, exposing.everywhere)
        self._meeting = meeting
        self._prefix = options["prefix"]
        with _lock:
            _living.add(self)
        if meeting.world_size:
            try:
                self._world = [peer[0] for peer in self._wait_for_world(meeting.world_size, join_timeout)]
            except BaseException:
                self.leave()
                raise

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        self.leave()

    def __repr__(self) -> str:
        name, rank, _ = self._self
        return f"<tensorferry.Agent {name!r}, rank {rank}{', left' if self._left else ''}>"

    @property
    def name(self) -> str:
        """The name under which peers call this agent."""
        return self._self[0]

    @property
    def world_size(self) -> int | None:
        """How many agents began together; None where they come and go."""
        return self._meeting.world_size

    @property
    def timeout(self) -> float:
        """The default time-out of calls, seconds; 0: none."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds

    def get_worker_info(self, worker_name: Peer | None = None) -> WorkerInfo:
        """Who the agent of that name (or rank) is; without one, this agent.

        Raises:
            NotFound: there is none.
        """
        name, rank, _ = self._self if worker_name is None else self._find(worker_name)
        return WorkerInfo(name, rank)

    def explain(self, peer: Peer, tensor: torch.Tensor | None = None) -> Explanation:
        """Which channel would carry ``tensor`` (by default a CPU tensor of 1 MiB) to ``peer``, and why not another.

        Example::

            print(rpc.explain("worker1"))
        """
        device = None if tensor is None else tensor.device
        bytes_ = 1 << 20 if tensor is None else tensor.numel() * tensor.element_size()
        found = self._explain(peer, _device(device), _device(device), bytes_)
        where = str(device or "cpu")
        return Explanation(devices=f"{where} -> {where}", **found)

    def publish(self, value: Any) -> _C.Published:
        """Encodes a value once, for any number of calls: see :func:`tensorferry.rpc.publish`."""
        return _C.publish(self, value)

    def call_many(
        self,
        peers: Iterable[Peer],
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
    ) -> list[Future[Any]]:
        """Calls a function on many peers with the same arguments: see :func:`tensorferry.rpc.call_many`."""
        given: tuple[Any, ...] | _C.Published = tuple(args or ())
        named = dict(kwargs or {})
        if _C.is_called_by_name(func):
            # What cannot be published (references, tensors on GPUs) goes to each as by rpc_async, which says what is
            # wrong where that cannot be either.
            with contextlib.suppress(TypeError, errors.Error):
                block = self.publish((given, named or None))
                if not 0 < block.nbytes < _WORTH_A_BLOCK:
                    given, named = block, {}
        return [self.rpc_async(peer, func, args=given, kwargs=named, timeout=timeout) for peer in peers]

    def counters(self) -> Counters:
        """Calls and bytes so far."""
        return Counters(**self._counters())

    def expose(self, fn: Any = None, *, name: str | None = None) -> Any:
        """Lets peers call a function by name: :func:`tensorferry.rpc.expose` for this agent alone.

        Example::

            counter = Counter()
            agent.expose(counter.update, name="count")
            peer.rpc_sync(agent.name, "count", args=(["a", "b"],))
        """
        return exposing.expose_with(self._expose, fn, name)

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leaves. After it nothing of this agent's can be used: its futures and references raise :class:`AgentClosed`.

        Args:
            graceful: first wait for the calls that are under way; with a world size, for everybody's, and until
                everybody has come here. False: fail them.
            timeout: seconds to wait at most; 0: as long as it takes.

        Raises:
            DeadlineExceeded: ``timeout`` passed. ConnectionLost: a peer died or left before it came here. The agent has
            left all the same.
            InvalidArgument: called inside a function that a peer called, and graceful. The agent has not left.
        """
        if graceful and not self._left and _C.is_serving():
            raise errors.InvalidArgument("shutdown() inside a function that a peer called waits for itself")
        try:
            if graceful and not self._left:
                _finish(self, timeout)
        finally:
            self.leave()

    def leave(self) -> None:
        """Leaves at once: calls under way fail, and whoever calls here is told. Does nothing the second time."""
        self._leave()
        with _lock:
            _living.discard(self)


class _Patience:
    """Seconds that are left of a time-out; 0 stands for no end."""

    def __init__(self, timeout: float) -> None:
        self._until = time.monotonic() + timeout if timeout > 0 else None

    def slice(self) -> float:
        """A short wait, so that a dead peer or Ctrl-C is noticed."""
        return 0.5 if self._until is None else max(0.0, min(0.5, self._until - time.monotonic()))

    def over(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until


def _finish(agent: Agent, timeout: float) -> None:
    """Waits until no call is under way: here, or in a world everywhere.

    Everybody waits until it is idle, then for the others (a round). When nobody has made or served a call between its
    arrival in two rounds, all were idle at once in between, and with nothing under way nothing can begin again.
    """
    patience = _Patience(timeout)
    if not agent.world_size:
        _wait_until_idle(agent, patience)
        return
    store = agent._meeting.store
    before: object = None
    for number in itertools.count():
        _wait_until_idle(agent, patience)
        now = agent.counters()
        key = f"{agent._prefix}/shutdown/{number}"
        if (now.calls_sent, now.calls_served) != before:
            store.add(f"{key}/busy", 1)
        before = (now.calls_sent, now.calls_served)
        _wait_for_all(agent, key, patience)
        if store.add(f"{key}/busy", 0) == 0:
            break
    # Rank 0 may serve the store that the others still read.
    done = f"{agent._prefix}/shutdown/done"
    store.add(done, 1)
    until = time.monotonic() + 5
    while agent._self[1] == 0 and store.add(done, 0) < agent.world_size and time.monotonic() < until:
        time.sleep(0.001)


def _wait_until_idle(agent: Agent, patience: _Patience) -> None:
    pause = 0.0002
    while any(counts := agent._in_flight()):
        if patience.over():
            made, served, *_ = counts
            raise errors.DeadlineExceeded(f"shutdown: {made} calls made and {served} served here are still under way")
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _wait_for_all(agent: Agent, key: str, patience: _Patience) -> None:
    store = agent._meeting.store
    assert agent.world_size is not None
    store.set(f"{key}/at/{agent.name}", "")
    if store.add(f"{key}/arrived", 1) == agent.world_size:
        store.set(f"{key}/go", "")
    while store.get(f"{key}/go", patience.slice()) is None:
        missing = [name for name in agent._world if store.get(f"{key}/at/{name}", 0) is None]
        for name in missing:
            # And then once more: it may have come and gone since.
            if (why := _why_gone(agent, name)) and store.get(f"{key}/at/{name}", 0) is None:
                raise errors.ConnectionLost(f'shutdown: "{name}" was lost before it came here ({why})')
        if patience.over():
            raise errors.DeadlineExceeded(f"shutdown: still waiting for {', '.join(missing) or 'the store'}")


def _why_gone(agent: Agent, name: str) -> str | None:
    """Why the agent of that name will not come any more; None: it may."""
    try:
        incarnation = agent._find(name)[2]
    except errors.NotFound:
        return "it has left"
    except errors.Error:
        incarnation = None
    for lost, ended, why in agent._lost_peers():
        if lost == name and incarnation in (None, ended):
            return why
    return None


# Before the interpreter ends: after that no thread of ours may enter it. Quick, whatever still runs.
atexit.register(_C.leave_all)
