"""The transport ``tensorferry`` of ``torch.distributed._transport``: one-sided reads and writes between two processes,
over regions. ``pip install`` registers it, by an entry point. Without an installation, importing this module does.

An endpoint is an agent of its own, and each registration is a region of it. The connection bytes are the agent's
record, as a store would hold it, so two endpoints need no store in common. docs/regions.md says which way bytes take.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from typing import Any, Literal, cast

import torch
from torch.distributed import Work

try:
    from torch.distributed._transport import Memory, MemoryView, RemoteBuffer, Transport, register_transport, wait_all
except ImportError as _missing:
    raise ImportError(
        f"tensorferry.transport needs torch.distributed._transport, which torch 2.15 has and {torch.__version__} lacks"
    ) from _missing

from . import _C, errors, gpu_regions
from .regions import service_of
from .standalone import StandaloneAgent
from .transport_buffers import (
    RegionMemory,
    RegionView,
    Registration,
    RemoteRegionBuffer,
    WritableRegionView,
    place_of,
)
from .transport_transfers import RegionTransfer, Threads, check_timeout

__all__ = [
    "RegionMemory",
    "RegionTransfer",
    "RegionTransport",
    "RegionView",
    "RemoteRegionBuffer",
    "WritableRegionView",
]

_DOOR = "door"  # a region of one byte that each endpoint has: a grant of it says whether the peer is there


class RegionTransport(Transport):
    """An endpoint: ``torch.distributed._transport.new_transport("tensorferry", "cpu")`` makes it. Thread-safe.

    Transfers go between this endpoint's registered memory and that of one peer, and run no code of the peer's program.
    A transfer that fails raises its error, here alone: NotFound if the peer has unregistered the memory, ConnectionLost
    if it has closed or died.

    Memory of GPUs of one host is copied by a GPU of the caller; between hosts it goes by way of the hosts' memory.
    ``read_stream`` and ``write_stream`` are for memory that the caller's GPU can map. They enqueue one copy, also in
    the capture of a CUDA graph, and end no process if they fail: if the peer has unregistered the memory before the
    copy's end, ``poison(device)`` becomes true in the order of the stream, and :meth:`close` raises NotFound.

    Args:
        device: None, or a CPU or CUDA device.
        timeout: the default time-out, in seconds.
        threads: how many transfers that wait for the peer may run at once.
        options: those of :class:`tensorferry.Agent` for the endpoint's agent. Beyond one host it needs ``key=``
            and ``interface=``.

    Raises:
        InvalidArgument: a device of another type. TypeError: an unknown option. Unauthenticated: no key to listen
            beyond this host with.

    Example::

        from tensorferry.transport import RegionTransport

        with RegionTransport() as trainer, RegionTransport() as replica:
            trainer.connect(replica.bind())
            weights, received = torch.arange(8.0), torch.zeros(8)
            source = trainer.register_memory(weights)
            target = replica.register_memory(received).to_remote_buffer()
            assert trainer.write(source.to_view(), target) == 0
            assert received.equal(weights)
            work = trainer.read(source.to_mutable_view(0, 8), target.part(8, 8), async_op=True)
            assert work.wait() and weights[:2].tolist() == [2.0, 3.0]
    """

    def __init__(
        self, device: torch.device | str | None = None, *, timeout: float = 30.0, threads: int = 2, **options: Any
    ) -> None:
        super().__init__(device)
        if self.device is not None:
            _check_device(self.device)
        check_timeout(timeout)
        if threads < 1:
            raise errors.InvalidArgument("threads= is at least 1")
        self._timeout = timeout
        self._default_timeout = timeout
        self._standalone = StandaloneAgent(f"transport-{uuid.uuid4().hex}", **options)
        self._agent = self._standalone.agent
        self._incarnation = self._standalone.incarnation
        self._regions = service_of(self._agent)
        self._regions.add(torch.zeros(1, dtype=torch.uint8), True, False, [], _DOOR, "")
        self._threads = Threads(threads)
        self._lock = threading.RLock()  # guards all below; never held while a peer is waited for
        self._peer: str | None = None
        self._door: _C.RemoteRegion | None = None
        self._grants: dict[int, _C.RemoteRegion] = {}
        self._registrations: dict[tuple[int, int], Registration] = {}
        self._pending: set[RegionTransfer] = set()
        self._poison: dict[int, torch.Tensor] = {}
        self._copy_streams: dict[int, torch.cuda.Stream] = {}
        self._transfer_streams: dict[int, torch.cuda.Stream] = {}  # of the program, by their handles
        self._state: Literal["open", "closing", "closed"] = "open"

    @staticmethod
    def supported() -> bool:
        """Returns True: every process that can import the package can use it."""
        return True

    def _limit(self, timeout: float | None) -> float:
        check_timeout(timeout)
        return self._timeout if timeout is None else timeout

    def _check_open(self) -> None:
        if self._state != "open":
            raise errors.AgentClosed("the transport is closed")

    # ---- connecting

    def bind(self, *, timeout: float | None = None) -> bytes:
        """Returns bytes by which a peer connects. They hold the addresses of the endpoint, and no key."""
        self._limit(timeout)
        self._check_open()
        return self._standalone.address

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connects to a peer that is bound, and returns 0 when it has answered.

        Args:
            peer_url: what the peer's :meth:`bind` returned.
            timeout: seconds; None: the default.

        Raises:
            ValueError: this is no such thing. RuntimeError: the endpoint is connected or closed. ConnectionLost,
            NotFound: the peer has died or closed. DeadlineExceeded, Unauthenticated.
        """
        seconds = self._limit(timeout)
        with self._lock:
            self._check_open()
            if self._peer is not None:
                raise RuntimeError("the transport is connected already: an endpoint has one peer")
            name, incarnation = self._standalone.introduce(peer_url)
            self._peer = name
        try:
            door = self._regions.open(name, incarnation, 0, _DOOR, max(seconds, 0.001))
        except BaseException:
            self._standalone.forget(name)
            self._peer = None
            raise
        self._door = door
        return 0

    def connected(self) -> bool:
        """Returns whether the endpoint is connected, and has not found its peer gone."""
        return self._state == "open" and self._door is not None and self._door.alive

    # ---- registering

    def register_memory(self, tensor: torch.Tensor, *, timeout: float | None = None) -> RegionMemory:
        """Registers a contiguous tensor. Registered twice, the same memory has one registration.

        Peers share memory of ``tensorferry.empty``; other memory costs a call of the kernel, or messages.

        Args:
            tensor: of any dtype, with at least one element.
            timeout: has no effect: it waits for no peer.

        Raises:
            TypeError, ValueError: another thing, gaps, no elements, or another device. RuntimeError: closed.
        """
        self._limit(timeout)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a tensor is registered, not {type(tensor).__name__}")
        self._check_device(tensor.device)
        _check_device(tensor.device)
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.numel() == 0:
            raise errors.InvalidArgument("a tensor that is registered is contiguous, and has at least one element")
        with self._lock:
            self._check_open()
            registration = self._registrations.get(place_of(tensor))
            if registration is None:
                first = tensor.storage_offset() * tensor.element_size()
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                flat.set_(tensor.untyped_storage(), first, (tensor.nbytes,), (1,))
                registration = Registration(tensor, flat, self._regions.add(flat, True, True, [], "", ""))
                self._registrations[registration.place] = registration
        return RegionMemory(self, registration)

    def unregister_memory(self, memory: Memory, *, timeout: float | None = None) -> None:
        """Ends a registration, with all its handles, views and descriptors. The second time it does nothing.

        Args:
            memory: what :meth:`register_memory` returned.
            timeout: has no effect: it waits for no peer.

        Raises:
            RuntimeError: a transfer of this endpoint uses it. TypeError: it is another endpoint's.
        """
        self._limit(timeout)
        if not isinstance(memory, RegionMemory) or memory._transport is not self:
            raise TypeError("this memory was not registered by this transport")
        registration = memory._registration
        with self._lock:
            self._check_open()
            if any(registration in work._buffers for work in self._pending):
                raise RuntimeError("a transfer of this memory is under way: wait for it first")
            if registration.active:
                registration.active = False
                del self._registrations[registration.place]
                self._regions.drop(registration.region)

    def _describe(self, registration: Registration, timeout: float | None) -> RemoteRegionBuffer:
        self._limit(timeout)
        self._check_open()
        registration.check()
        size = registration.flat.numel()
        return RemoteRegionBuffer(self._agent.name, self._incarnation, registration.region, 0, size)

    # ---- transfers

    def _check_transfer(self, local_buffer: MemoryView, remote_buffer: RemoteBuffer, *, mutable: bool) -> None:
        if not isinstance(local_buffer, WritableRegionView if mutable else RegionView):
            raise TypeError("a read takes a mutable view" if mutable else "a write takes a view of registered memory")
        if local_buffer._memory._transport is not self:
            raise TypeError("the view is of memory that another transport has registered")
        if not isinstance(remote_buffer, RemoteRegionBuffer):
            raise TypeError(f"a descriptor of this transport, not {type(remote_buffer).__name__}")
        if remote_buffer.owner != self._peer:
            raise errors.InvalidArgument("the descriptor is not of the peer that this endpoint is connected to")
        if local_buffer.size() > remote_buffer.length:
            raise errors.InvalidArgument(
                f"a view of {local_buffer.size()} bytes, and a remote buffer of {remote_buffer.length}"
            )
        local_buffer._memory._registration.check()

    def _opened(self, remote: RemoteRegionBuffer) -> _C.RemoteRegion:
        """Returns the peer's grant of the region; asks for it if there is none that is good."""
        grant = self._grants.get(remote.region)
        if grant is None or not grant.alive:
            if self._door is not None and not self._door.alive:  # the link was lost
                self._door = self._regions.open(remote.owner, remote.incarnation, 0, _DOOR, 0)
            grant = self._regions.open(remote.owner, remote.incarnation, remote.region, "", 0)
            with self._lock:
                self._grants = {each: held for each, held in self._grants.items() if held.alive}
                self._grants[remote.region] = grant
        return grant

    def _start(
        self, local: MemoryView, remote: RemoteBuffer, mutable: bool, async_op: bool, timeout: float | None
    ) -> int | Work:
        seconds = self._limit(timeout)
        with self._lock:
            self._check_open()
            self._check_transfer(local, remote, mutable=mutable)
            view, there = cast(RegionView, local), cast(RemoteRegionBuffer, remote)
            if not async_op and view.size() == 0:
                return 0
            grant = self._grants.get(there.region)
            if not async_op and grant is not None and grant.alive and _waits_for_no_peer(grant, mutable):
                work = None
            else:
                work = RegionTransfer(seconds, (view._memory._registration, view, there))
                self._pending.add(work)
        if work is None:
            self._copy(cast(_C.RemoteRegion, grant), view, there, mutable, max(seconds, 0.001))
            return 0
        self._threads.run(lambda: self._run(work, view, there, mutable))
        if async_op:
            return work
        work.wait()
        return 0

    def _run(self, work: RegionTransfer, view: RegionView, there: RemoteRegionBuffer, mutable: bool) -> None:
        failed = None
        try:
            if view.size() != 0:
                self._copy(self._opened(there), view, there, mutable, 0)
        except Exception as error:
            failed = error
        with self._lock:
            self._pending.discard(work)
        work._end(failed)

    def write(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work:
        """Writes a view to the beginning of the peer's buffer. Returns 0, or the Work if ``async_op``.

        Args:
            local_buffer: a view of memory of this endpoint.
            remote_buffer: a descriptor of the peer's, or a part of it.
            async_op: return at once.
            timeout: of the wait, in seconds; None: the default.

        Raises:
            TypeError, ValueError: the buffers do not fit. NotFound, ConnectionLost: see the class. DeadlineExceeded:
            the transfer goes on.
        """
        return self._start(local_buffer, remote_buffer, False, async_op, timeout)

    def read(  # type: ignore[override] # the base wants a view that says that it is writable
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work:
        """Reads into a view from the beginning of the peer's buffer, as :meth:`write`.

        Args:
            local_buffer: a mutable view of memory of this endpoint.
            remote_buffer: as for :meth:`write`.
            async_op: as for :meth:`write`.
            timeout: as for :meth:`write`.

        Raises:
            As :meth:`write`.
        """
        return self._start(local_buffer, remote_buffer, True, async_op, timeout)

    def _copy(
        self, grant: _C.RemoteRegion, view: RegionView, there: RemoteRegionBuffer, into_view: bool, seconds: float
    ) -> None:
        """Moves the bytes. ``seconds``: for each answer of the peer; 0: none."""
        local = view._bytes
        if grant.on_gpu and torch.cuda.is_available():
            device = local.device if local.is_cuda else torch.device("cuda", torch.cuda.current_device())
            if gpu_regions.copy_bytes(grant, there.offset, local, into_view, self._copy_stream(device), None):
                return
        if into_view:
            grant.read(view.size(), there.offset, local, seconds)
        else:
            grant.write(view.size(), there.offset, local, None, seconds)

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream of transfers that the current streams are not to wait for, and that wait for none."""
        with self._lock:
            stream = self._copy_streams.get(device.index)
            if stream is None:
                stream = self._copy_streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    def poison(self, device: torch.device | str | int | None = None) -> torch.Tensor:
        """Returns a flag on a CUDA device, a tensor of one bool: it becomes true, in the order of its stream, behind a
        stream transfer that has failed, and stays so.

        Args:
            device: None: the current one.
        """
        where = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        index = torch.cuda.current_device() if where.index is None else where.index
        with self._lock:
            flag = self._poison.get(index)
            if flag is None:
                flag = self._poison[index] = torch.zeros(1, dtype=torch.bool, device=torch.device("cuda", index))
                gpu_regions.wait_for(torch.cuda.current_stream(index))
        return flag

    def _on_stream(
        self, local: MemoryView, remote: RemoteBuffer, mutable: bool, stream: torch.cuda.Stream | None
    ) -> None:
        with self._lock:
            self._check_open()
            self._check_transfer(local, remote, mutable=mutable)
        view, there = cast(RegionView, local), cast(RemoteRegionBuffer, remote)
        if view.size() == 0:
            return
        grant = self._opened(there)
        if not grant.on_gpu or not torch.cuda.is_available():
            raise errors.InvalidArgument("a stream transfer is for memory of a GPU on both sides, or of the peer's GPU")
        on = torch.cuda.current_stream() if stream is None else stream
        with self._lock:
            self._transfer_streams[on.cuda_stream] = on
        if not gpu_regions.copy_bytes(grant, there.offset, view._bytes, mutable, on, self.poison(on.device)):
            raise errors.ChannelUnavailable("the GPU of this stream cannot map the peer's memory: use read and write")

    def read_stream(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        stream: torch.cuda.Stream | None = None,
        timeout: float | None = None,
    ) -> None:
        """Enqueues a read, in the order of a stream.

        Args:
            local_buffer: as for :meth:`read`.
            remote_buffer: as for :meth:`write`, of memory on a GPU of this host.
            stream: None: the current one.
            timeout: has no effect: a copy waits for no peer.

        Raises:
            TypeError, ValueError: the buffers do not fit, or are not on GPUs. ChannelUnavailable: the GPU cannot map
            the memory. NotFound, ConnectionLost: see the class.
        """
        self._limit(timeout)
        self._on_stream(local_buffer, remote_buffer, True, stream)

    def write_stream(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        stream: torch.cuda.Stream | None = None,
        timeout: float | None = None,
    ) -> None:
        """Enqueues a write, in the order of a stream, as :meth:`read_stream`.

        Args:
            local_buffer: as for :meth:`write`.
            remote_buffer: as for :meth:`read_stream`.
            stream: None: the current one.
            timeout: has no effect: a copy waits for no peer.

        Raises:
            As :meth:`read_stream`.
        """
        self._limit(timeout)
        self._on_stream(local_buffer, remote_buffer, False, stream)

    # ---- closing

    def close(self, *, timeout: float | None = None) -> None:
        """Waits for the transfers under way, ends all registrations, and leaves. The second time it does nothing.

        Args:
            timeout: seconds to wait for transfers; None: the default.

        Raises:
            DeadlineExceeded: some have not ended. The transport takes no new ones; call it again. The error of a
            transfer that it waited for; the transport is closed then.
        """
        until = time.monotonic() + self._limit(timeout)
        failed = None
        for work in self._begin_close():
            if not work._ended.wait(max(0.0, until - time.monotonic())):
                raise errors.DeadlineExceeded("transfers are under way: the transport is not closed; close it again")
            failed = failed or work._error
        self._finish_close()
        if failed is not None:
            raise failed

    async def close_async(self, *, timeout: float | None = None) -> None:
        """Closes as :meth:`close`, without blocking the loop.

        Args:
            timeout: as for the other.

        Raises:
            As :meth:`close`.
        """
        works = self._begin_close()
        failed: Exception | None = None
        try:
            await wait_all(works, timeout=self._limit(timeout))
        except Exception as error:
            if not all(work.is_completed() for work in works):
                raise
            failed = error
        await asyncio.to_thread(self._finish_close)
        if failed is not None:
            raise failed

    def _begin_close(self) -> list[RegionTransfer]:
        with self._lock:
            if self._state == "open":
                self._state = "closing"
            return list(self._pending)

    def _finish_close(self) -> None:
        with self._lock:
            if self._state == "closed":
                return
            self._state = "closed"
            registrations = list(self._registrations.values())
            self._registrations.clear()
            self._grants.clear()
            self._door = None
            streams, flags = list(self._transfer_streams.values()), list(self._poison.values())
        for stream in streams:
            gpu_regions.wait_for(stream)
        failed_on = [str(flag.device) for flag in flags if flag.item()]
        for registration in registrations:
            registration.active = False
        self._threads.end()
        self._agent.leave()
        if failed_on:
            raise errors.NotFound(f"a stream transfer failed on {failed_on[0]}: the peer had unregistered the memory")


def _waits_for_no_peer(grant: _C.RemoteRegion, into_view: bool) -> bool:
    """Returns whether this process copies, by itself or by a call of the kernel."""
    if grant.on_gpu and not torch.cuda.is_available():
        return False
    return grant.carried == "mapped" or (into_view and grant.carried == "in place")


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise errors.InvalidArgument(
            f"transport 'tensorferry' on {device}: it has memory of the CPU and of CUDA devices"
        )


register_transport("tensorferry", RegionTransport, replace=True)
