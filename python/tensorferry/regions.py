"""Regions: memory that peers read and write, without a call of the owner's program.

:meth:`Agent.region` makes a tensor a region. Its handle travels in calls, or has a name. Slices of it name parts, as
those of a tensor do. docs/regions.md says what each failure does, and which way the bytes take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from . import _C, errors

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["Notification", "OwnRegion", "Region", "form_of", "service_of", "tensor_form"]


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
    - else the owner's agent sends or takes the bytes.

    They are not atomic: a read that overlaps a write may see a part of it. Use :meth:`Agent.subscribe` for values that
    must never be torn. ``timeout`` is in seconds, 0: none; it counts for each answer of the owner, not for a copy.

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
        part._grant = self._grant
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
            self._grant = service.open(self.owner, self._incarnation, self._id, "", seconds)
        return self._grant

    def _limit(self, timeout: float) -> float:
        return _seconds(self._agent or _C.current_agent(), timeout)  # type: ignore[arg-type]

    def read(self, into: torch.Tensor | None = None, timeout: float = -1) -> torch.Tensor:
        """Reads the part. Returns ``into``, or a new tensor.

        Args:
            into: a CPU tensor of the part's shape and dtype.
            timeout: seconds for each answer of the owner; -1: the agent's default; 0: none.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        run, offsets = self._all_runs()
        return self._read(run, offsets, self._view.shape, into, timeout)

    def _all_runs(self) -> tuple[int, int | torch.Tensor]:
        if self._layout is None:
            self._layout = _runs(self._view)
        return self._layout

    def _read(
        self, run: int, offsets: int | torch.Tensor, shape: Sequence[int], into: torch.Tensor | None, timeout: float
    ) -> torch.Tensor:
        out = torch.empty(shape, dtype=self.dtype) if into is None else self._fitting(into, shape, "into")
        if out.numel() == 0:
            return out if into is None else into
        seconds = self._limit(timeout)
        target = out if out.is_contiguous() else torch.empty(shape, dtype=self.dtype)
        self._opened(seconds).read(run, offsets, target, seconds)
        if target is not out:
            out.detach().copy_(target)
        return out if into is None else into

    def _fitting(self, tensor: torch.Tensor, shape: Sequence[int], name: str) -> torch.Tensor:
        if tensor.dtype != self._view.dtype or tensor.shape != torch.Size(shape):
            raise errors.InvalidArgument(
                f"{name} has {tensor.dtype} and the shape {tuple(tensor.shape)}, not {self.dtype} and {tuple(shape)}"
            )
        return tensor

    def write(self, tensor: torch.Tensor, notify: int | None = None, timeout: float = -1) -> None:
        """Writes the part.

        Args:
            tensor: a CPU tensor of the part's shape and dtype.
            notify: a number from 0 to 2^64 - 1 that the owner gets (:meth:`OwnRegion.await_notification`) when all the
                bytes are there.
            timeout: seconds for each answer of the owner; -1: the agent's default; 0: none.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        run, offsets = self._all_runs()
        seconds = self._limit(timeout)
        source = self._fitting(tensor, self.shape, "the tensor").detach().contiguous()
        self._opened(seconds).write(run, offsets, source, notify, seconds)

    def _blocks(self, indices: torch.Tensor) -> tuple[int, torch.Tensor, list[int]]:
        block = self._view[:1]
        run, first = _runs(block)
        if isinstance(first, torch.Tensor):
            raise errors.InvalidArgument("blocks without gaps: the part's dimensions after the first are not dense")
        count = self.shape[0]
        indices = indices.reshape(-1).to("cpu", torch.int64)
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < count):
            raise errors.InvalidArgument(f"the indices of blocks are from 0 to {count - 1}")
        offsets = indices * (self._view.stride(0) * self._view.element_size()) + first
        return run, offsets, [indices.numel(), *self.shape[1:]]

    def read_blocks(self, indices: torch.Tensor, into: torch.Tensor | None = None, timeout: float = -1) -> torch.Tensor:
        """Reads ``part[indices]``: blocks along the first dimension, without any Python code for each block.

        Args:
            indices: integers from 0 up, in any order.
            into: a CPU tensor of shape ``(len(indices), *part.shape[1:])``.
            timeout: seconds for each answer of the owner; -1: the agent's default; 0: none.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        run, offsets, shape = self._blocks(indices)
        return self._read(run, offsets, shape, into, timeout)

    def write_blocks(
        self, indices: torch.Tensor, tensor: torch.Tensor, notify: int | None = None, timeout: float = -1
    ) -> None:
        """Writes ``part[indices] = tensor``, as :meth:`write`.

        Args:
            indices: as for :meth:`read_blocks`.
            tensor: as for the other.
            notify: as for :meth:`write`.
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        run, offsets, shape = self._blocks(indices)
        source = self._fitting(tensor, shape, "the tensor").detach().contiguous()
        seconds = self._limit(timeout)
        self._opened(seconds).write(run, offsets, source, notify, seconds)

    async def read_async(self, into: torch.Tensor | None = None, timeout: float = -1) -> torch.Tensor:
        """Reads as :meth:`read`, on a thread of asyncio's. If the task is cancelled, the transfer goes on, and
        ``into`` may be written until it ends.

        Args:
            into: as for the other.
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        return await asyncio.to_thread(self.read, into, timeout)

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
        return await asyncio.to_thread(self.read_blocks, indices, into, timeout)

    async def write_async(self, tensor: torch.Tensor, notify: int | None = None, timeout: float = -1) -> None:
        """Writes as :meth:`write`, on a thread of asyncio's.

        Args:
            tensor: as for the other.
            notify: as for :meth:`write`.
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        await asyncio.to_thread(self.write, tensor, notify, timeout)

    def carried(self, timeout: float = -1) -> str:
        """Returns how reads go: "mapped", "in place" (the kernel copies), or "served" (the owner's agent sends).

        Args:
            timeout: as for :meth:`read`.

        Raises:
            NotFound, PermissionDenied, InvalidArgument, ConnectionLost, DeadlineExceeded: see :class:`Region`.
        """
        return self._opened(self._limit(timeout)).carried


def _handle(owner: str, incarnation: int, id: int, dtype: torch.dtype, shape: Any, strides: Any, offset: int) -> Region:
    return Region(owner, incarnation, id, torch.empty(0, dtype=dtype, device="meta").as_strided(shape, strides, offset))


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
    region._grant = grant
    return region
