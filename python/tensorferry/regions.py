"""Regions: memory that peers read and write, without a call of the owner's program.

:meth:`Agent.region` makes a tensor a region. Its handle travels in calls, or has a name. Slices of it name parts, as
those of a tensor do. docs/regions.md says what each failure does, and which way the bytes take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from . import _C, errors, gpu_regions
from .gpu_regions import Order

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["Notification", "OwnRegion", "Region", "form_of", "read_regions", "service_of", "tensor_form"]


def service_of(agent: Agent) -> _C.RegionService:
    """Returns the one-sided memory of an agent, which begins with its first use."""
    service: _C.RegionService | None = agent.__dict__.get("_regions")
    if service is None:
        service = agent.__dict__.setdefault("_regions", _C.RegionService(agent))
    return service


def _seconds(agent: Agent, timeout: float) -> float:
    if timeout != -1 and not timeout >= 0:
        raise ValueError("a time-out must be more than 0 seconds, 0 (none), or -1 (the default)")
    return agent.timeout if timeout == -1 else timeout


def form_of(tensor: torch.Tensor) -> str:
    """Describes the dtype, the sizes and the strides of a tensor, for a peer."""
    sizes, strides = (",".join(map(str, each)) for each in (tensor.shape, tensor.stride()))
    return f"{str(tensor.dtype).removeprefix('torch.')}|{sizes}|{strides}"


def tensor_form(form: str) -> torch.Tensor:
    """Returns a tensor without memory that has the form. Raises ProtocolError if a peer sent something else."""
    try:
        name, sizes, strides = form.split("|")
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(name)
        shape, steps = ([int(each) for each in text.split(",") if each] for text in (sizes, strides))
        return torch.empty_strided(shape, steps, dtype=dtype, device="meta")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise errors.ProtocolError(f"a peer described a tensor as {form[:100]!r}") from error


def _runs(view: torch.Tensor) -> tuple[int, int | torch.Tensor]:
    """Returns the bytes of the longest runs that make up the view, in its order, and their offsets in bytes."""
    item = view.element_size()
    run = 1
    outer = view.dim()
    while outer > 0 and (view.stride(outer - 1) == run or view.shape[outer - 1] == 1):
        outer -= 1
        run *= view.shape[outer]
    first = int(view.storage_offset()) * item
    if outer == 0:
        return run * item, first
    offsets = torch.full((), first, dtype=torch.int64)
    for size, stride in zip(view.shape[:outer], view.stride()[:outer], strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * (stride * item)
    return run * item, offsets.reshape(-1)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's memory has its elements, in their order, where a transfer may read and write."""
    where = tensor.is_cpu or tensor.is_cuda
    return where and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


@final
class Notification:
    """What a peer told with its write: ``number``, the value of ``notify=``, and ``peer``, its name.

    Example::

        with rpc.region(torch.zeros(1), name="told", write=True) as told:
            rpc.find_region("worker0", "told").write(torch.ones(1), notify=3)
            notification = told.await_notification()
            assert (notification.peer, notification.number) == ("worker0", 3)
    """

    __slots__ = ("number", "peer")

    def __init__(self, peer: str, number: int) -> None:
        self.peer = peer
        self.number = number

    def __repr__(self) -> str:
        return f"<tensorferry.Notification {self.number} of {self.peer!r}>"


class Region:
    """A handle of a region, or of a part of one: an index or a slice of it is a handle of that part.

    It can be passed in calls. Reads and writes go to the owner's memory directly, and run no code of its program:

    - on the owner's host they copy in memory that is mapped, or the kernel copies (reads of memory that is not);
    - on a GPU of this host, a GPU of this process copies in memory that its driver has mapped;
    - between hosts with RDMA cards these copy, also from and to memory of GPUs of both;
    - else the owner's agent sends or takes the bytes.

    They are not atomic: a read that overlaps a write may see a part of it. Use :meth:`Agent.subscribe` for values that
    must never be torn. ``timeout`` is in seconds, 0: none; it counts for each answer of the owner, not for a copy.

    Copies by a GPU are enqueued on the current stream. With ``stream_ordered=True`` the method then returns: the bytes
    are there in the order of the stream, also at each replay of a CUDA graph that was captured so. If the region is
    dropped meanwhile, :meth:`check` says so; or ``poison``, a CUDA tensor of one element, which then becomes true in
    the stream's order, so that kernels behind the copy can look at it. Without both, the method waits for the stream
    and checks. Nothing orders a copy behind the streams of the owner: it synchronises before it tells others of its
    bytes. Its GPU sees what a card has written when it gets the notification.

    After an error the contents of ``into`` are undefined, and any part of a write may have landed.

    Raises:
        NotFound: the owner has dropped or replaced the region, perhaps meanwhile. PermissionDenied. InvalidArgument:
            indices out of bounds, or another shape or dtype. ConnectionLost: the owner has died. DeadlineExceeded.

    Example::

        with rpc.region(torch.arange(12.0).reshape(3, 4), name="table", write=True) as table:
            handle = rpc.find_region("worker0", "table")
            assert handle[1, 2:].read().tolist() == [6.0, 7.0]
            handle[0].write(torch.zeros(4), notify=1)
            assert table.await_notification().number == 1
            blocks = torch.tensor([2, 0])
            handle.write_blocks(blocks, torch.ones(2, 4))
            assert handle.read_blocks(blocks).sum() == 8
            assert handle.carried() in ("mapped", "in place", "served")
            handle.check()

            async def main():
                await handle.write_async(torch.ones(3, 4), notify=2)
                await table.await_notification_async()
                return (await handle.read_async()).sum() + (await handle.read_blocks_async(blocks)).sum()

            assert asyncio.run(main()) == 20
            table.drop()
    """

    def __init__(self, owner: str, incarnation: int, id: int, view: torch.Tensor, agent: Agent | None = None) -> None:
        self.owner = owner
        self._incarnation = incarnation
        self._id = id
        self._view = view  # on the device "meta": it has no memory
        self._agent = agent
        self._grant: _C.RemoteRegion | None = None
        self._on_gpu = False  # known with the grant
        self._mapped: dict[tuple[int, bool], torch.Tensor] = {}  # on a GPU: by device and whether to write
        self._layout: tuple[int, int | torch.Tensor] | None = None  # as _runs() gives it

    @property
    def shape(self) -> torch.Size:
        """The shape of the region, or of the part."""
        return self._view.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self._view.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that a read brings."""
        return self._view.nbytes

    def __getitem__(self, index: Any) -> Region:
        part = self._view[index]
        if part.untyped_storage()._cdata != self._view.untyped_storage()._cdata:
            raise IndexError("a part of a region is an index or a slice; read_blocks() takes a tensor of indices")
        return self._part(part)

    def _part(self, view: torch.Tensor) -> Region:
        part = Region(self.owner, self._incarnation, self._id, view, self._agent)
        part._grant, part._on_gpu = self._grant, self._on_gpu
        return part

    def __repr__(self) -> str:
        return f"<tensorferry region {self._id} of {self.owner!r}: {self.dtype}, {tuple(self.shape)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        view = self._view
        form = (view.dtype, tuple(view.shape), view.stride(), view.storage_offset())
        return _handle, (self.owner, self._incarnation, self._id, *form)

    def _opened(self, seconds: float) -> _C.RemoteRegion:
        if self._grant is None or not self._grant.alive:
            agent = self._agent or _C.current_agent()
            service = service_of(agent)  # type: ignore[arg-type]
            self._take(service.open(self.owner, self._incarnation, self._id, "", seconds))
        assert self._grant is not None
        return self._grant

    def _take(self, grant: _C.RemoteRegion) -> None:
        self._grant = grant
        self._on_gpu = grant.on_gpu
        self._mapped = {}

    def _limit(self, timeout: float) -> float:
        return _seconds(self._agent or _C.current_agent(), timeout)  # type: ignore[arg-type]

    def read(
        self,
        into: torch.Tensor | None = None,
        timeout: float = -1,
        *,
        stream_ordered: bool = False,
        poison: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reads the part. Returns ``into``, or a new tensor.

        Args:
            into: a tensor of the part's shape and dtype, on the CPU or a CUDA device. None: a new tensor, on the
                current CUDA device if the region is on a GPU and torch has one here, else on the CPU.
            timeout: seconds for each answer of the owner; -1: the agent's default; 0: none.
            stream_ordered: for a region on a GPU: return before the copy has run.
            poison: the same, with a flag; see :class:`Region`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        return self._read(None, self._all_runs, self._view.shape, into, timeout, Order.of(stream_ordered, poison))

    def _all_runs(self) -> tuple[int, int | torch.Tensor]:
        if self._layout is None:
            self._layout = _runs(self._view)
        return self._layout

    def _read(
        self,
        indices: torch.Tensor | None,
        runs: Callable[[], tuple[int, int | torch.Tensor]],
        shape: tuple[int, ...],
        into: torch.Tensor | None,
        timeout: float,
        order: Order,
    ) -> torch.Tensor:
        if into is not None and self._fitting(into, shape, "into").numel() == 0:
            return into
        seconds = self._limit(timeout)
        grant = self._opened(seconds)
        out = into
        if out is None:
            on_gpu = self._on_gpu and torch.cuda.is_available()
            out = torch.empty(shape, dtype=self.dtype, device="cuda" if on_gpu else "cpu")
        by_gpu = self._on_gpu or order.by_stream
        if out.numel() == 0 or (by_gpu and gpu_regions.read(self, grant, indices, out.detach(), order)):
            return out
        run, offsets = runs()
        direct = into is None or _is_plain(out)
        target = out if direct else torch.empty(shape, dtype=self.dtype, device=out.device if out.is_cuda else "cpu")
        if target.is_cuda:
            gpu_regions.wait_for_tensors([target])  # the stream may still use its memory
        grant.read(run, offsets, target, seconds)
        if not direct:
            out.detach().copy_(target)
        return out

    def _fitting(self, tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
        if tensor.dtype != self._view.dtype or tensor.shape != shape:
            raise errors.InvalidArgument(
                f"{name} has {tensor.dtype} and the shape {tuple(tensor.shape)}, not {self.dtype} and {tuple(shape)}"
            )
        return tensor

    def write(
        self,
        tensor: torch.Tensor,
        notify: int | None = None,
        timeout: float = -1,
        *,
        stream_ordered: bool = False,
        poison: torch.Tensor | None = None,
    ) -> None:
        """Writes the part.

        Args:
            tensor: a tensor of the part's shape and dtype, on the CPU or a CUDA device.
            notify: a number from 0 to 2^64 - 1 that the owner gets (:meth:`OwnRegion.await_notification`) when all the
                bytes are there.
            timeout: seconds for each answer of the owner; -1: the agent's default; 0: none.
            stream_ordered: for a region on a GPU, without ``notify``: return before the copy has run.
            poison: the same, with a flag; see :class:`Region`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        source = self._fitting(tensor, self._view.shape, "the tensor")
        self._write(None, self._all_runs, source, notify, timeout, Order.of(stream_ordered, poison))

    def _write(
        self,
        indices: torch.Tensor | None,
        runs: Callable[[], tuple[int, int | torch.Tensor]],
        source: torch.Tensor,
        notify: int | None,
        timeout: float,
        order: Order,
    ) -> None:
        if order.by_stream and notify is not None:
            raise errors.InvalidArgument("notify= tells of bytes that are there: leave stream_ordered and poison out")
        seconds = self._limit(timeout)
        grant = self._opened(seconds)
        by_gpu = self._on_gpu or order.by_stream
        if by_gpu and gpu_regions.write(self, grant, indices, source.detach(), order):
            if notify is not None:
                nothing = torch.empty(0, dtype=torch.int64)
                grant.write(0, nothing, nothing, notify, seconds)
            return
        run, offsets = runs()
        if not _is_plain(source):
            source = source.detach().resolve_conj().resolve_neg()
            source = (source if source.is_cuda else source.cpu()).contiguous()
        if source.is_cuda:
            gpu_regions.wait_for_tensors([source])
        grant.write(run, offsets, source, notify, seconds)

    def _checked(self, indices: torch.Tensor, order: Order) -> torch.Tensor:
        """Returns the indices in one dimension. Looks at their values, unless that would wait for a stream."""
        indices = indices.reshape(-1)
        if indices.numel() and not (order.by_stream and indices.is_cuda):
            least, greatest = torch.stack(torch.aminmax(indices)).tolist()
            if least < 0 or greatest >= self.shape[0]:
                raise errors.InvalidArgument(f"the indices of blocks are from 0 to {self.shape[0] - 1}")
        return indices

    def _block_runs(self, indices: torch.Tensor) -> tuple[int, torch.Tensor]:
        run, first = _runs(self._view[:1])
        if isinstance(first, torch.Tensor):
            raise errors.InvalidArgument("blocks without gaps: the part's dimensions after the first are not dense")
        places = indices.to("cpu", torch.int64)
        return run, places * (self._view.stride(0) * self._view.element_size()) + first

    def read_blocks(
        self,
        indices: torch.Tensor,
        into: torch.Tensor | None = None,
        timeout: float = -1,
        *,
        stream_ordered: bool = False,
        poison: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reads ``part[indices]``: blocks along the first dimension, without any Python code for each block.

        Args:
            indices: integers from 0 up, in any order. On a CUDA device they are checked by the host unless
                ``stream_ordered``; then by the kernel, as for torch's own indexing.
            into: as for :meth:`read`, of shape ``(len(indices), *part.shape[1:])``.
            timeout: seconds for each answer of the owner; -1: the agent's default; 0: none.
            stream_ordered: as for :meth:`read`.
            poison: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        order = Order.of(stream_ordered, poison)
        places = self._checked(indices, order)
        shape = (places.numel(), *self.shape[1:])
        return self._read(places, lambda: self._block_runs(places), shape, into, timeout, order)

    def write_blocks(
        self,
        indices: torch.Tensor,
        tensor: torch.Tensor,
        notify: int | None = None,
        timeout: float = -1,
        *,
        stream_ordered: bool = False,
        poison: torch.Tensor | None = None,
    ) -> None:
        """Writes ``part[indices] = tensor``, as :meth:`write`.

        Args:
            indices: as for :meth:`read_blocks`.
            tensor: as for the other.
            notify: as for :meth:`write`.
            timeout: as for :meth:`read`.
            stream_ordered: as for :meth:`write`.
            poison: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        order = Order.of(stream_ordered, poison)
        places = self._checked(indices, order)
        source = self._fitting(tensor, (places.numel(), *self.shape[1:]), "the tensor")
        self._write(places, lambda: self._block_runs(places), source, notify, timeout, order)

    async def read_async(self, into: torch.Tensor | None = None, timeout: float = -1) -> torch.Tensor:
        """Reads as :meth:`read`, on a thread of asyncio's. If the task is cancelled, the transfer goes on, and
        ``into`` may be written until it ends.

        Args:
            into: as for the other.
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        return await gpu_regions.apart(self.read, into, timeout)

    async def read_blocks_async(
        self, indices: torch.Tensor, into: torch.Tensor | None = None, timeout: float = -1
    ) -> torch.Tensor:
        """Reads as :meth:`read_blocks`, on a thread of asyncio's.

        Args:
            indices: as for :meth:`read_blocks`.
            into: as for the other.
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        return await gpu_regions.apart(self.read_blocks, indices, into, timeout)

    async def write_async(self, tensor: torch.Tensor, notify: int | None = None, timeout: float = -1) -> None:
        """Writes as :meth:`write`, on a thread of asyncio's.

        Args:
            tensor: as for the other.
            notify: as for :meth:`write`.
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        await gpu_regions.apart(self.write, tensor, notify, timeout)

    def check(self) -> None:
        """Raises if the region has been dropped, or its owner has gone, since this handle was first used. For copies
        with ``stream_ordered``: call it when the stream has passed them, before their bytes are trusted.

        Raises:
            NotFound, ConnectionLost: see :class:`Region`.
        """
        if self._grant is not None:
            self._grant.check()

    def carried(self, timeout: float = -1) -> str:
        """Returns how reads go: "mapped", "in place" (the kernel copies), "by card" (a network card does, by RDMA), or
        "served" (the owner's agent sends).

        Args:
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        return self._opened(self._limit(timeout)).carried


def _handle(owner: str, incarnation: int, id: int, dtype: torch.dtype, shape: Any, strides: Any, offset: int) -> Region:
    return Region(owner, incarnation, id, torch.empty(0, dtype=dtype, device="meta").as_strided(shape, strides, offset))


def read_regions(
    regions: Sequence[Region], into: Sequence[torch.Tensor], timeout: float = -1, *, stream_ordered: bool = False
) -> None:
    """Reads many regions, or parts, at once. Those on GPUs take one launch of torch's foreach copies for many tensors,
    and one wait.

    Args:
        regions: what to read.
        into: a tensor for each, as for :meth:`Region.read`.
        timeout: as for :meth:`Region.read`.
        stream_ordered: as for :meth:`Region.read`.

    Raises:
        NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.

    Example::

        weights = [torch.ones(2, 2), torch.zeros(3)]
        handles = [rpc.region(weight) for weight in weights]
        copies = [torch.empty(2, 2), torch.empty(3)]
        tensorferry.read_regions(handles, copies)
        assert copies[0].sum() == 4
    """
    if len(regions) != len(into):
        raise errors.InvalidArgument(f"{len(into)} tensors for {len(regions)} regions")
    if not regions:
        return
    outs = [region._fitting(out, region.shape, "into").detach() for region, out in zip(regions, into, strict=True)]
    for place in gpu_regions.read_all(regions, outs, regions[0]._limit(timeout), Order.of(stream_ordered, None)):
        regions[place].read(outs[place], timeout)


@final
class OwnRegion(Region):
    """A region of this agent (:meth:`Agent.region`). At a peer, its handle arrives as a :class:`Region`.

    It is a context manager, which drops the region at its end.

    Raises:
        As :class:`Region`.

    Example::

        with rpc.region(torch.arange(12.0).reshape(3, 4), name="own", write=True) as table:
            handle = table
            assert handle[1, 2:].read().tolist() == [6.0, 7.0]
            handle[0].write(torch.zeros(4), notify=1)
            assert table.await_notification().number == 1
            blocks = torch.tensor([2, 0])
            handle.write_blocks(blocks, torch.ones(2, 4))
            assert handle.read_blocks(blocks).sum() == 8
            assert handle.carried() in ("mapped", "in place", "served")
            handle.check()

            async def main():
                await handle.write_async(torch.ones(3, 4), notify=2)
                await table.await_notification_async()
                return (await handle.read_async()).sum() + (await handle.read_blocks_async(blocks)).sum()

            assert asyncio.run(main()) == 20
            table.drop()
    """

    def __init__(self, agent: Agent, service: _C.RegionService, tensor: torch.Tensor, id: int) -> None:
        name, _, incarnation = agent._self
        super().__init__(name, incarnation, id, tensor_form(form_of(tensor)), agent)
        self.tensor = tensor
        self._service = service

    def drop(self) -> None:
        """Ends the region: reads and writes of peers raise NotFound from now on, also those under way. A write that is
        under way in mapped memory may land until the peer notices. The second time it does nothing.

        Raises:
            Nothing.
        """
        self._service.drop(self._id)

    def await_notification(self, number: int | None = None, timeout: float = -1) -> Notification:
        """Waits until a peer has written and notified, and takes the oldest notification.

        Args:
            number: the oldest with this number, and leave others.
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            DeadlineExceeded: none has come. NotFound: the region was dropped.
        """
        return Notification(*self._service.await_notification(self._id, number, self._limit(timeout)))

    async def await_notification_async(self, number: int | None = None, timeout: float = -1) -> Notification:
        """Waits as :meth:`await_notification`, on a thread of asyncio's.

        Args:
            number: as for the other.
            timeout: as for :meth:`read`.

        Raises:
            DeadlineExceeded: none has come. NotFound: the region was dropped.
        """
        return await asyncio.to_thread(self.await_notification, number, timeout)

    def __enter__(self) -> OwnRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


def make_region(
    agent: Agent, tensor: torch.Tensor, name: str, read: bool, write: bool, peers: Sequence[str]
) -> OwnRegion:
    """Implements :meth:`Agent.region`."""
    service = service_of(agent)
    if isinstance(peers, str):
        raise TypeError("peers is a sequence of names")
    id = service.add(tensor.detach(), read, write, list(peers), name, form_of(tensor))
    return OwnRegion(agent, service, tensor, id)


def find_region(agent: Agent, owner: str, name: str, timeout: float) -> Region:
    """Implements :meth:`Agent.find_region`."""
    seconds = _seconds(agent, timeout)
    _, _, incarnation = agent._find(owner)  # a restarted owner may use the region's number for other memory
    grant = service_of(agent).open(owner, incarnation, 0, name, seconds)
    view = tensor_form(grant.shape)
    if view.nbytes != grant.nbytes:
        raise errors.ProtocolError(f"{owner!r} described region {name!r} as another size than it has")
    region = Region(owner, incarnation, grant.id, view, agent)
    region._take(grant)
    return region
