"""An agent: a process's member of a job. It joins, calls peers, serves their calls, and leaves."""

from __future__ import annotations

import atexit
import operator
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from . import _C, errors, exporting, exposing, observing, recorder
from .calls import Calls
from .metrics import Metrics, take
from .peers import Peer
from .plugins import load_installed
from .rendezvous import meet
from .trace import Trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from .calls import DeviceChoice, DeviceLike, PeerLike

    DeviceMap: TypeAlias = "Mapping[DeviceLike, DeviceLike]"

__all__ = ["Agent", "Counters", "Explanation", "WorkerInfo"]


@dataclass(frozen=True)
class WorkerInfo:
    """The name and rank of an agent, from :func:`get_worker_info`. Calls accept it instead of the name.

    Args:
        name: the agent's name, unique among the agents that meet.
        id: the agent's rank; -1 if it joined without one.

    Example::

        peer = rpc.get_worker_info("worker1")
        assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
    """

    name: str
    id: int


@dataclass(frozen=True)
class Explanation:
    """Which channel carries tensors to a peer, and why the others do not. Prints as a table.

    Args:
        peer: the peer's name.
        devices: the tensor's device and the device on which it would land, such as ``"cpu -> cpu"`` or
            ``"cuda:0 -> cuda:1"``.
        channel: the channel that carries the tensors now; ``""`` if none does.
        transport: the transport of the calls themselves: ``"ring"`` (memory that both processes map), ``"unix"`` or
            ``"tcp"``.
        no_ring: why the transport is not ``"ring"``; ``""`` if it is.
        candidates: the channels as (channel, usable, reason), in the order in which the agent tries them.

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
    """The calls, bytes and references of an agent, counted since it joined.

    Args:
        calls_sent: calls that this agent made.
        calls_served: calls of peers that this agent answered.
        calls_failed: calls that this agent made and that ended with an error of TensorFerry's own.
        late_answers: calls of peers that this agent answered after their callers had given up.
        late_replies: replies to this agent that came after their calls had ended.
        bytes_sent: bytes of tensors and other large buffers sent, by channel, including those handed over by
            ``share``; under ``"inline"`` those inside the frames of calls, and under ``"cuda_basic over ibv"`` those
            that one channel staged in host memory for another one to carry.
        bytes_received: the same for bytes received.
        objects: objects here that at least one reference (:class:`RRef`) keeps alive now.
        references_given: references that peers hold on those objects now.
        references_held: references that this agent holds now on objects of peers, by the owner's name.
        pinned_bytes: page-locked host memory that this process holds now to copy tensors of GPUs through, and memory
            that is registered with network cards.

    Example::

        assert rpc.counters().references_held.get("server", 0) == 0   # nothing there is kept alive by us
    """

    calls_sent: int
    calls_served: int
    calls_failed: int
    bytes_sent: dict[str, int] = field(default_factory=dict)
    bytes_received: dict[str, int] = field(default_factory=dict)
    late_answers: int = 0
    late_replies: int = 0
    objects: int = 0
    references_given: int = 0
    references_held: dict[str, int] = field(default_factory=dict)
    pinned_bytes: int = 0


_living: set[Agent] = set()  # keeps every agent alive until it leaves, even if the program drops it
_lock = threading.Lock()  # guards _living


def living() -> list[Agent]:
    """Returns the agents of this process that have not left."""
    with _lock:
        return sorted((agent for agent in _living if agent._usable_here), key=lambda agent: agent.name)


_KINDS = {"cpu": 0, "cuda": 1}


def _device(device: DeviceLike | None) -> tuple[int, int]:
    if device is None:
        return 0, 0
    device = torch.device(device)
    if device.type not in _KINDS:
        raise ValueError(f"tensors travel between the CPU and GPUs, not {device}")
    return _KINDS[device.type], device.index or 0


def _gpus(devices: Sequence[DeviceLike] | None) -> list[int]:
    """Returns the indices of the GPUs that tensors may be on. Makes no CUDA context on any of them."""
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


def _check_types(name: object, rank: object, world_size: object) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"an agent's name is a str, not {name!r}")
    for what, value in (("rank", rank), ("world_size", world_size)):
        if value is None and what == "world_size":
            continue
        try:
            operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{what}= is an int, not {value!r}") from None


class Agent(Calls):
    """A member of a job, with the functions of :mod:`tensorferry.rpc` as methods. One process can have several agents.

    Args:
        name: the agent's name, unique among the agents that meet; None: ``worker<rank>``.
        rank: the agent's rank, unique, from 0; -1: the rank in the environment (torchrun), or none.
        world_size: wait until this many ranks have joined; ``shutdown`` then waits for the calls of all of them. None:
            the size in the environment if the rank comes from there too, else agents join and leave at any time.
        store: the store at which the agents meet, instead of ``init_method``: one of torch's stores, or the result of
            :func:`tensorferry.connect_store`.
        init_method: ``env://`` (the default), ``tcp://host:port``, ``file:///path``.
        timeout: the default time-out of calls, in seconds; 0: none.
        join_timeout: seconds to wait for the process that serves the rendezvous, and then for the world; 0: no limit.
        key: the cluster key; by default that of ``TENSORFERRY_KEY_FILE`` or ``TENSORFERRY_KEY``. Required to listen
            beyond this host.
        channels: the channels that are allowed. ``"xth,basic"`` allows only these, in this order; ``"-xth"`` allows all
            except this one; ``"cma:90"`` gives one another priority; by default ``TENSORFERRY_CHANNELS``.
            ``tensorpipe`` is used only if it is named.
        interface: the network interfaces to listen on, in the order in which peers try them: ``"eth0"`` or
            ``"ib0,eth0"``; or names or addresses of this host; by default ``TENSORFERRY_SOCKET_IFNAME``, else the
            interface that leads to the store's host.
        ports: the ports to listen on: ``"7000"`` or ``"7000-7099"``; by default any.
        unix_sockets: False: use TCP also between processes of one host.
        shared_memory: False: share no memory with peers. Sockets carry every call, and the agent leaves out channels
            that share memory unless ``channels`` names them.
        socket_dir: the folder of unix sockets; by default ``TENSORFERRY_SOCKET_DIR``, else the sockets have no file.
        tls: TLS 1.3 on all TCP connections of the agent. ``"key"``: the cluster key proves both ends.
            ``"certificate=FILE,private_key=FILE,ca=FILE"`` (PEM): each end has a certificate of that CA, and verifies
            the other's. ``"off"``: none. By default ``TENSORFERRY_TLS``, else none. All agents of a job need the same
            form. A store has a ``tls=`` of its own (:func:`tensorferry.connect_store`); torch's stores have none.
        trace: a file beside which the agent writes a trace of all its calls when it leaves (:meth:`trace`); by default
            ``TENSORFERRY_TRACE``, else none.
        max_threads: how many functions run here at once, without those that wait for a call or a future of their own.
            Further calls wait up to their deadlines, and start in turn by peer.
        max_queued_calls: how many calls of one peer may wait here for their functions to start. Further ones fail with
            :class:`ResourceExhausted`.
        max_queued_bytes: how many bytes the waiting calls of one peer may have. A call with more fails with
            :class:`ResourceExhausted`, unless no other call of the peer waits.
        max_bytes_in_flight: how many bytes of tensors may be under way to one peer, for calls and for results each.
            Callers beyond it block. When a peer does not take its results, no further function that it calls starts.
        devices: the local GPUs that tensors of this agent's calls may be on; None: all that torch sees. The agent asks
            nothing of a GPU, and makes no context on it, before it sends or receives a tensor on that GPU.
        device_maps: for each peer, a one-to-one dict from devices here to devices there. Tensors in the arguments of
            calls to the peer land by it, and those in the results land by its inverse. Tensors on other devices land on
            the device of the same index, else on the first GPU, else on the CPU. ``device=`` of a call takes
            precedence.
        heartbeat: seconds between heartbeats to a peer on another host. When three in a row are missing, the
            connections to the peer are closed and dialled again.
        peer_timeout: a peer that cannot be reached for this many seconds counts as dead: references to its objects are
            lost, and it loses those that it holds. A process of this host that ends is noticed at once.
        metrics: False: the times of calls are not counted for :meth:`metrics`, which saves some 50 ns at each end of a
            call.
        metrics_port: the port of this host alone on which Prometheus reads the metrics of this process:
            9400, ``"9400-9463"`` for the first free one, or ``"0.0.0.0:9400"``; by default
            ``TENSORFERRY_METRICS_PORT``, else none. ``docs/metrics.md`` lists the metrics.
        metrics_file: a file beside which the process writes its metrics every 10 s; by default
            ``TENSORFERRY_METRICS_FILE``, else none.
        trust: ``"full"``: peers may call every function that can be imported here, and the agent loads the pickles that
            they send. ``"registered"``: peers may call only exposed functions and classes (:meth:`expose`,
            :func:`tensorferry.rpc.expose`), and the agent neither loads nor sends pickles. ``docs/security.md``
            describes the risks of each.

    Raises:
        InvalidArgument: the name or rank belongs to a living agent, or an argument makes no sense.
        Unauthenticated: the agent has no key to listen beyond this host with, or its peers have another key.
        DeadlineExceeded: some agents of the world have not joined, and the text names the missing ones; or no process
            serves the rendezvous.

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
        metrics: bool = True,
        metrics_port: int | str | None = None,
        metrics_file: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        _check_types(name, rank, world_size)
        load_installed()
        options["gpus"] = _gpus(devices)
        options["device_maps"] = _device_maps(device_maps)
        meeting = meet(init_method, store, rank, world_size, join_timeout)
        options["world_size"] = meeting.world_size
        if "prefix" not in options:
            options["prefix"] = _C.world_prefix(meeting.place, meeting.world_size, meeting.rank)
        options.setdefault("reaches", meeting.host)
        if name is None:
            if meeting.rank < 0:
                raise errors.InvalidArgument("an agent without a rank needs a name")
            name = f"worker{meeting.rank}"
        super().__init__(name, meeting.rank, meeting.store, timeout, options, trust, exposing.everywhere)
        self._meeting = meeting
        self._trust = trust
        self._time_calls(metrics)
        observing.serve(self)
        recorder.dump_at_signal()
        with _lock:
            _living.add(self)
        try:
            exporting.share(self, metrics_port, metrics_file)
            self._announce()
            self._wait_for_world(join_timeout)
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
        """The number of agents that began together; None if agents join and leave at any time."""
        return self._meeting.world_size or None

    @property
    def timeout(self) -> float:
        """The default time-out of calls, in seconds; 0: none."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds

    def get_worker_info(self, worker_name: PeerLike | None = None) -> WorkerInfo:
        """Returns the name and rank of an agent.

        Args:
            worker_name: the agent's name or rank; None: this agent.

        Raises:
            NotFound: there is no such agent. ConnectionLost: no link to it is up, and the process that serves the
                rendezvous has died. AgentClosed: this agent has left.

        Example::

            me = rpc.get_worker_info()
            next_one = rpc.get_worker_info(me.id + 1)
        """
        name, rank, _ = self._self if worker_name is None else self._find(worker_name)
        return WorkerInfo(name, rank)

    def peer(self, name: PeerLike) -> Peer:
        """Returns a handle on a peer, with the calls as methods, in order if wanted: see :class:`tensorferry.Peer`.

        Args:
            name: the peer's name, its rank, or a :class:`WorkerInfo`. A name is not looked up: the peer may join later.

        Raises:
            NotFound: no agent has that rank. AgentClosed: a rank was given, and this agent has left.

        Example::

            log = rpc.peer("worker1").ordered()
            first, second = log.rpc_async(print, args=("first",)), log.rpc_async(print, args=("second",))
            second.wait()
            assert first.done()
        """
        if isinstance(name, int):
            name = self.get_worker_info(name)
        return Peer(self, name if isinstance(name, str) else name.name)

    def explain(
        self, peer: PeerLike, tensor: torch.Tensor | None = None, *, device: DeviceChoice | None = None
    ) -> Explanation:
        """Explains which channel would carry ``tensor`` to ``peer``, and why the others would not.

        Args:
            peer: the peer's name, rank, or :class:`WorkerInfo`.
            tensor: only its device and size count, not its values; None: a CPU tensor of 1 MiB.
            device: the device on which the tensor is to land, as for :func:`rpc_sync`.

        Raises:
            InvalidArgument: the peer has no such device. NotFound: there is no such peer. ConnectionLost: the peer
                cannot be reached. AgentClosed: this agent has left.

        Example::

            print(rpc.explain("worker1"))
            print(rpc.explain("worker1", torch.ones(3), device="cpu"))
        """
        local = None if tensor is None else tensor.device
        bytes_ = 1 << 20 if tensor is None else tensor.numel() * tensor.element_size()
        found = self._explain(peer, _device(local), device, bytes_)
        return Explanation(devices=f"{local or 'cpu'} -> {found.pop('remote')}", **found)

    def counters(self) -> Counters:
        """Returns the calls, bytes and references so far. May be called after the agent has left, too.

        Raises:
            AgentClosed: called in a forked child: the agent belongs to the parent.

        Example::

            before = rpc.counters().calls_sent
            rpc.rpc_sync("worker1", max, args=(1, 2))
            assert rpc.counters().calls_sent == before + 1
        """
        return Counters(**self._counters())

    def trace(self, path: str | PathLike[str] | None = None) -> Trace:
        """Records the calls that this agent makes and serves while a ``with`` block runs, as a trace for Perfetto or
        ``chrome://tracing``.

        A call is in the trace if it begins and ends in the block. Arrows lead from each call to the peer that serves
        it, if the peer records too: ``python -m tensorferry.trace merge`` joins the files of several agents. To record
        all calls of a process, set ``TENSORFERRY_TRACE`` instead.

        Args:
            path: the file to write the trace to when the block ends; None: only ``events`` of the result has it.

        Returns:
            A context manager. Its ``events`` are the trace's events, as dicts, when the block has ended.

        Raises:
            AgentClosed: called in a forked child: the agent belongs to the parent.

        Example::

            with rpc.trace() as trace:
                rpc.rpc_sync("worker1", max, args=(1, 2))
            assert any(event["name"] == "max" for event in trace.events)
        """
        self._check_usable_here()
        return Trace(self, path)

    def metrics(self) -> Metrics:
        """Takes the metrics of this agent: calls, errors by kind, latencies, bytes by channel, queues, memory, links,
        groups. ``docs/metrics.md`` lists them; ``metrics_port=`` exports them.

        Raises:
            AgentClosed: called in a forked child: the agent belongs to the parent.

        Example::

            rpc.rpc_sync("worker1", max, args=(1, 2))
            now = rpc.metrics()
            assert now.value("tensorferry_calls_sent_total") >= 1
            print(now.histogram("tensorferry_call_seconds").quantile(0.99), "s")
        """
        return take(self)

    def dump(self, path: str | PathLike[str] | None = None) -> dict[str, Any]:
        """Returns the flight recorder of this agent: the last events of each link and group and of the calls to each
        peer, with the calls in flight and the state of the links now. ``docs/tracing.md`` describes it.

        Perfetto and ``chrome://tracing`` show the result, as JSON, as they show traces; ``tensorferry trace merge``
        joins it with traces, also those of ``torch.profiler``.

        Args:
            path: the file to write it to as well; None: none.

        Raises:
            AgentClosed: called in a forked child: the agent belongs to the parent. OSError: the file cannot be written.

        Example::

            rpc.rpc_sync("worker1", max, args=(1, 2))
            for event in rpc.dump()["tensorferry"]["events"]:
                print(event["seconds_ago"], event["subject"], event["name"], event["text"])
        """
        return recorder.dump(self, path)

    def expose(self, fn: Any = None, *, name: str | None = None) -> Any:
        """Lets peers of this agent alone call a function by name: see :func:`tensorferry.rpc.expose`.

        Args:
            fn, name: as for :func:`tensorferry.rpc.expose`.

        Raises:
            InvalidArgument, TypeError: as :func:`tensorferry.rpc.expose`.

        Example::

            store = torch.distributed.HashStore()
            with tensorferry.Agent("a", store=store) as agent, tensorferry.Agent("b", store=store) as peer:
                counter = collections.Counter()
                agent.expose(counter.update, name="count")
                peer.rpc_sync("a", "count", args=(["a", "b"],))
                assert counter.total() == 2
        """
        return exposing.expose_with(self._expose, fn, name)

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Waits for calls under way, and leaves. Afterwards, the agent's futures and references raise
        :class:`AgentClosed`.

        Args:
            graceful: True: first wait for the calls under way. With a world size, wait for the calls of all agents of
                the world, and until all of them have called ``shutdown``. False: fail the calls under way.
            timeout: seconds to wait at most; 0: no limit.

        Raises:
            DeadlineExceeded: ``timeout`` passed. The agent has left all the same.
            ConnectionLost: a peer died or left before it called ``shutdown``, or the process that serves the rendezvous
                has died. The agent has left all the same.
            InvalidArgument: a graceful ``shutdown`` was called inside a function that a peer called. The agent has not
                left.
            AgentClosed: called in a forked child: the agent belongs to the parent, and goes on there.
        """
        self._check_usable_here()
        if graceful and not self._left and _C.is_serving():
            raise errors.InvalidArgument("shutdown() inside a function that a peer called waits for itself")
        try:
            if graceful and not self._left:
                if (regions := self.__dict__.get("_regions")) is not None:
                    regions.end_visits()
                    if self.world_size is None:
                        regions.close()
                self._finish(timeout)
        except KeyboardInterrupt:
            # leave() waits up to 0.4 s for functions that peers have called here.
            leaving = threading.Thread(target=self.leave, name="tensorferry-leave")
            leaving.start()
            leaving.join(0.1)
            raise
        except BaseException:
            self.leave()
            raise
        self.leave()

    def leave(self) -> None:
        """Leaves at once: calls under way fail, and peers with calls under way here get an error.

        Does nothing the second time. Does nothing in a forked child either: the agent belongs to the parent.
        """
        if (groups := self.__dict__.get("_groups")) is not None:
            groups.leave()
        exporting.unshare(self)
        if (regions := self.__dict__.get("_regions")) is not None and self._usable_here:
            regions.close()
        self._leave()
        with _lock:
            _living.discard(self)


# Runs before the interpreter ends, because no thread of ours may enter it afterwards. Quick, even if calls still run.
atexit.register(_C.leave_all)
