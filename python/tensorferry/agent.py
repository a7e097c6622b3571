"""One process's place among its peers: joining, calling, leaving."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from . import _C, errors, exposing
from .peers import Peer as PeerHandle
from .rendezvous import meet
from .streams import Stream, open_stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeVar

    from ._C import DeviceChoice, DeviceLike, Published
    from .futures import Future
    from .rendezvous import Meeting

    _T = TypeVar("_T")
    DeviceMap: TypeAlias = "Mapping[DeviceLike, DeviceLike]"

Peer: TypeAlias = "str | int | WorkerInfo | PeerHandle"

__all__ = ["Agent", "Counters", "Explanation", "WorkerInfo"]

_WORTH_A_BLOCK = 64 * 1024  # bytes of tensors that call_many puts into memory for all


@dataclass(frozen=True)
class WorkerInfo:
    """An agent, as :func:`get_worker_info` tells of it; stands for its name in calls.

    Args:
        name: unique among the agents that meet.
        id: its rank; -1 where it joined without one.

    Example::

        peer = rpc.get_worker_info("worker1")
        assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
    """

    name: str
    id: int


@dataclass(frozen=True)
class Explanation:
    """Which channel carries tensors to a peer, and why not another. Prints as a table.

    Args:
        peer: the peer's name.
        devices: what the answer is about, such as ``"cpu -> cpu"`` or ``"cuda:0 -> cuda:1"``: where the tensor is,
            and where it would land.
        channel: the channel that carries them now; ``""`` where none does.
        transport: what carries the calls themselves: ``"ring"`` (memory that both map), ``"unix"`` or ``"tcp"``.
        no_ring: why it is not ``"ring"``.
        candidates: (channel, usable, reason), in the order in which they are tried.

    Example::

        found = rpc.explain("worker1")
        for channel, usable, reason in found.candidates:
            print(channel, "carries" if channel == found.channel else reason)
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
        structure_bytes_spared: bytes of calls and results beside their buffers (names, keys, shapes) that did not
            travel because the peer had them from an earlier one.
        objects: objects here that a reference (:class:`RRef`) stands for, now.
        references_given: references that peers hold on them, now.
        references_held: references that are held here on objects of peers, by the owner's name, now.

    Example::

        assert rpc.counters().references_held.get("server", 0) == 0   # nothing there is kept alive by us
    """

    calls_sent: int
    calls_served: int
    calls_failed: int
    bytes_sent: dict[str, int] = field(default_factory=dict)
    bytes_received: dict[str, int] = field(default_factory=dict)
    structure_bytes_spared: int = 0
    objects: int = 0
    references_given: int = 0
    references_held: dict[str, int] = field(default_factory=dict)


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


_KINDS = {"cpu": 0, "cuda": 1}


def _device(device: DeviceLike | None) -> tuple[int, int]:
    if device is None:
        return 0, 0
    device = torch.device(device)
    if device.type not in _KINDS:
        raise ValueError(f"tensors travel between the CPU and GPUs, not {device}")
    return _KINDS[device.type], device.index or 0


def _gpus(devices: Sequence[DeviceLike] | None) -> list[int]:
    """The GPUs that tensors may be on; makes no context on any of them."""
    present = torch.cuda.device_count() if torch.version.cuda else 0
    if devices is None:
        return list(range(present))
    wanted = sorted({index for kind, index in map(_device, devices) if kind == _KINDS["cuda"]})
    if missing := [index for index in wanted if index >= present]:
        raise errors.InvalidArgument(f"devices= names cuda:{missing[0]}, and torch sees {present} GPUs here")
    return wanted


def _device_maps(given: Mapping[str, DeviceMap] | None) -> dict[str, list[tuple[tuple[int, int], tuple[int, int]]]]:
    maps = {}
    for peer, device_map in (given or {}).items():
        pairs = [(_device(local), _device(remote)) for local, remote in device_map.items()]
        if len({remote for _, remote in pairs}) < len(pairs) or len({local for local, _ in pairs}) < len(pairs):
            raise ValueError(f"the device map for {peer!r} is not one to one")
        if len(pairs) > 64:
            raise ValueError(f"the device map for {peer!r} has more than 64 entries")
        maps[peer] = pairs
    return maps


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
            ``TENSORFERRY_CHANNELS``. ``tensorpipe`` is there only where it is named.
        interface: the network interface to listen on; else ``TENSORFERRY_SOCKET_IFNAME``, else the one that leads to
            the store's host.
        ports: ``"7000"`` or ``"7000-7099"``; else any.
        unix_sockets: False: TCP also between processes of one host.
        shared_memory: False: no memory is shared with peers: sockets carry every call, and channels that share memory
            are left out unless ``channels`` names them.
        socket_dir: the folder of unix sockets; else ``TENSORFERRY_SOCKET_DIR``, else they have no file.
        max_threads: functions that run here at once; then calls fail with :class:`ResourceExhausted`.
        max_bytes_in_flight: bytes under way to one peer, beyond which callers wait.
        devices: the GPUs that tensors of its calls may be on, here; None: all that torch sees. Nothing is asked of a
            GPU, and no context made on it, before a tensor on it is sent or received.
        device_maps: by peer, a dict of devices here to devices there, one to one: where tensors among the arguments of
            calls to it land, and the other way round where those of the results land. Others land on the device of the
            same index, else on the first GPU, else on the CPU. ``device=`` of a call goes before.
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
        with tensorferry.Agent("a", store=store) as a, tensorferry.Agent("b", store=store) as b:
            print(a.rpc_sync("b", max, args=(1, 2)), a.get_worker_info("b"))
            print(a.explain("b"), a.counters())
            b.leave()
            a.shutdown()
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
        devices: Sequence[DeviceLike] | None = None,
        device_maps: Mapping[str, DeviceMap] | None = None,
        trust: str = "full",
        **options: Any,
    ) -> None:
        options["gpus"] = _gpus(devices)
        options["device_maps"] = _device_maps(device_maps)
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
        try:
            self._announce()
            if meeting.world_size:
                self._world = self._meet_world(meeting.world_size, join_timeout)
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

        Args:
            worker_name: a name or a rank; None: this agent.

        Raises:
            NotFound: there is none. AgentClosed: this agent has left.
        """
        name, rank, _ = self._self if worker_name is None else self._find(worker_name)
        return WorkerInfo(name, rank)

    def peer(self, name: Peer) -> PeerHandle:
        """A peer, with the verbs as methods: see :class:`tensorferry.Peer`.

        Args:
            name: its name, its rank, or a :class:`WorkerInfo`. Of a name nothing is asked: the peer may come later.

        Raises:
            NotFound: there is no such rank. AgentClosed: a rank was given, and this agent has left.

        Example::

            assert rpc.peer("worker1").rpc_sync(max, args=(1, 2)) == 2
        """
        if isinstance(name, int):
            name = self.get_worker_info(name)
        return PeerHandle(self, name if isinstance(name, str) else name.name)

    def rpc_stream(
        self,
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
        """Calls a generator function on a peer and returns an iterator over what it yields.

        Args:
            to: the peer, as for :func:`rpc_sync`.
            func: a generator function, an asynchronous one, or one that returns an iterator; or the name of one that
                the peer exposed.
            args: the positional arguments, a tuple.
            kwargs: the keyword arguments, a dict.
            timeout: seconds that each item may take from when it is waited for; 0: no limit; -1: the default that
                ``init_rpc`` was given (60). It also bounds the calls that the generator makes for the item.
            window: items that the generator may be ahead of what has been taken here, at least 1.
            require, wait_for_ready: as for :func:`remote`.

        Returns:
            A :class:`Stream`: an iterator, also an asynchronous one, and a context manager.

        Raises:
            At once: ValueError: ``window`` is below 1; otherwise what :func:`remote` raises.
            From the iterator, after which the stream is closed: what ``func`` raised; DeadlineExceeded, where an item
            did not come in time; ConnectionLost; TypeError, where ``func`` returned no iterator.

        Example::

            def batches(epochs):                    # at the peer
                for epoch in range(epochs):
                    yield torch.full((4,), float(epoch))

            total = torch.zeros(4)
            with rpc.rpc_stream("worker1", batches, args=(3,), window=4) as stream:
                for batch in stream:
                    total += batch
            assert total.tolist() == [3, 3, 3, 3]
        """
        options = {"require": require, "wait_for_ready": wait_for_ready}
        return open_stream(self, to, func, args, kwargs, timeout, window, options)

    def explain(
        self, peer: Peer, tensor: torch.Tensor | None = None, *, device: DeviceChoice | None = None
    ) -> Explanation:
        """Which channel would carry ``tensor`` (by default a CPU tensor of 1 MiB) to ``peer``, and why not another.

        Args:
            peer: its name, rank, or :class:`WorkerInfo`.
            tensor: its device and size count, not its values.
            device: where it is to land, as :func:`rpc_sync` has it.

        Raises:
            InvalidArgument: the peer has no such device. NotFound: there is no such peer. ConnectionLost: it cannot be
                reached. AgentClosed: this agent has left.

        Example::

            print(rpc.explain("worker1"))
            print(rpc.explain("worker1", torch.ones(3), device="cpu"))
        """
        local = None if tensor is None else tensor.device
        bytes_ = 1 << 20 if tensor is None else tensor.numel() * tensor.element_size()
        found = self._explain(peer, _device(local), device, bytes_)
        return Explanation(devices=f"{local or 'cpu'} -> {found.pop('remote')}", **found)

    def publish(self, value: Any) -> Published:
        """Encodes a value once, for any number of calls: see :func:`tensorferry.rpc.publish`.

        Args:
            value: as :func:`tensorferry.rpc.publish` takes it.

        Raises:
            TypeError, InvalidArgument, ResourceExhausted: as there.

        Example::

            table = rpc.publish(torch.ones(1000, 1000))
            assert rpc.rpc_sync("worker1", torch.sum, args=(table,)) == 1e6
        """
        return _C.publish(self, value)

    def call_many(
        self,
        peers: Iterable[Peer],
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
    ) -> list[Future[Any]]:
        """Calls a function on many peers with the same arguments: see :func:`tensorferry.rpc.call_many`.

        Args:
            peers, func, args, kwargs, timeout: as :func:`tensorferry.rpc.call_many` takes them.

        Returns:
            A future for each peer, in their order.

        Raises:
            TypeError: as there.

        Example::

            assert tensorferry.wait_all(rpc.call_many(["worker1", "server"], max, args=(1, 2))) == [2, 2]
        """
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
        """Calls, bytes and references so far: also after the agent has left.

        Raises:
            AgentClosed: in a forked child, whose parent's the agent is.
        """
        return Counters(**self._counters())

    def expose(self, fn: Any = None, *, name: str | None = None) -> Any:
        """Lets peers call a function by name: :func:`tensorferry.rpc.expose` for this agent alone.

        Args:
            fn, name: as :func:`tensorferry.rpc.expose` takes them.

        Raises:
            InvalidArgument, TypeError: as there.

        Example::

            store = torch.distributed.HashStore()
            with tensorferry.Agent("a", store=store) as agent, tensorferry.Agent("b", store=store) as peer:
                counter = collections.Counter()
                agent.expose(counter.update, name="count")
                peer.rpc_sync("a", "count", args=(["a", "b"],))
                assert counter.total() == 2
        """
        return exposing.expose_with(self._expose, fn, name)

    def _meet_world(self, size: int, timeout: float) -> list[str]:
        patience = _Patience(timeout)
        with _interruptible(f"a world of {size} to join"):
            while True:
                try:
                    return [peer[0] for peer in self._wait_for_world(size, patience.slice() or 0.001)]
                except errors.DeadlineExceeded as error:
                    if patience.over():
                        raise errors.DeadlineExceeded(f"after {timeout:g} s {error}") from None

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
            AgentClosed: called in a forked child, whose parent's the agent is. It goes on there.
        """
        self._check_usable_here()
        if graceful and not self._left and _C.is_serving():
            raise errors.InvalidArgument("shutdown() inside a function that a peer called waits for itself")
        try:
            if graceful and not self._left:
                with _interruptible("everybody's calls to end, and for everybody to shut down"):
                    _finish(self, timeout)
        finally:
            self.leave()

    def leave(self) -> None:
        """Leaves at once: calls under way fail, and whoever calls here is told. Does nothing the second time, nor in a
        forked child, whose parent's the agent is."""
        self._leave()
        with _lock:
            _living.discard(self)


@contextmanager
def _interruptible(what: str) -> Iterator[None]:
    """Ctrl-C inside says what was waited for."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = error.args or (f"interrupted while waiting for {what}",)
        raise


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
