"""Copies between regions on GPUs and tensors: torch's copies and kernels, on memory that the driver has mapped.

They are enqueued on the current stream of the device that copies. Unless the caller asks for the stream's order alone,
they then wait for the stream and look whether the region has lived until the last byte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from . import _C, errors

if TYPE_CHECKING:
    from .regions import Region

T = TypeVar("T")


class Order(NamedTuple):
    """How a copy is ordered: behind the stream alone, and which flag tells later work that it failed."""

    by_stream: bool
    poison: torch.Tensor | None

    @classmethod
    def of(cls, stream_ordered: bool, poison: torch.Tensor | None) -> Order:
        if poison is None and not stream_ordered:
            return PLAIN
        if poison is not None and not (poison.is_cuda and poison.numel() == 1):
            raise errors.InvalidArgument("poison is a CUDA tensor of one element")
        return cls(stream_ordered or poison is not None, poison)


PLAIN = Order(False, None)


def _copying_device(grant: _C.RemoteRegion, tensor: torch.Tensor) -> torch.device | None:
    """Returns the device that copies between the tensor and the mapped region; None: none of this process can."""
    if not grant.on_gpu or not torch.cuda.is_available():
        return None
    return tensor.device if tensor.is_cuda else torch.device("cuda", torch.cuda.current_device())


def _mapped(region: Region, grant: _C.RemoteRegion, device: torch.device | None, to_write: bool) -> torch.Tensor | None:
    """Returns the part as a tensor in the owner's memory, made once for each grant; None: it cannot be mapped."""
    if device is None:
        return None
    known = region._mapped.get((device.index, to_write))
    if known is not None:
        return known
    memory = grant.map_on(device.index, to_write)
    if memory is None:
        return None
    view = region._view
    mapped = memory.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
    region._mapped[device.index, to_write] = mapped
    return mapped


def _words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors as integers, because kernels that gather lack some dtypes."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [each.view(sizes.get(each.element_size(), each.dtype)) for each in tensors]


def _before(device: torch.device | None, order: Order, mapped: bool) -> None:
    if order.by_stream and not mapped:
        raise errors.InvalidArgument(
            "stream_ordered=True is for regions on a GPU that this process can map, and it cannot map this one"
        )
    if not order.by_stream and device is not None and torch.cuda.is_current_stream_capturing():
        raise errors.InvalidArgument("in the capture of a CUDA graph a region is used with stream_ordered=True")


def refuse_capture(what: str) -> None:
    """Raises InvalidArgument if the current stream is being captured: a wait for it would break the capture."""
    if torch.cuda.is_current_stream_capturing():
        raise errors.InvalidArgument(f"{what} waits for its copies, so the capture of a CUDA graph cannot contain it")


def _checked(
    region: Region, grant: _C.RemoteRegion, device: torch.device | None, order: Order, to_write: bool
) -> torch.Tensor | None:
    """Returns what :func:`_mapped` does, after a look at whether the order is possible."""
    view = _mapped(region, grant, device, to_write)
    _before(device, order, view is not None)
    return view


def _finish(grant: _C.RemoteRegion, device: torch.device, order: Order) -> None:
    """Ends a copy: in the stream's order, by the flag if there is one; or by a wait and a look."""
    if order.poison is not None:
        poison_unless_alive(grant, device, order.poison)
    elif not order.by_stream:
        wait_for(torch.cuda.current_stream(device))
        grant.check()


def wait_for(stream: torch.cuda.Stream) -> None:
    """Waits for the work that the stream has so far. Ctrl-C ends the wait, and no lock of the driver is held."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    looks = 0
    while not event.query():  # type: ignore[no-untyped-call]
        looks += 1
        if looks > 300:  # some hundred microseconds
            time.sleep(50e-6)


def wait_for_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for the current streams of the CUDA devices on which some of the tensors are."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        wait_for(torch.cuda.current_stream(device))


def poison_unless_alive(grant: _C.RemoteRegion, device: torch.device, flag: torch.Tensor) -> None:
    """Enqueues a look at the region's word behind the copy: the flag becomes true if the region has been dropped."""
    try:
        word = grant.word_on(device.index).view(torch.int64)
    except errors.ChannelUnavailable as error:
        raise errors.InvalidArgument(f"poison= cannot be used here: {error}") from error
    torch.logical_or(flag, word.ne(grant.id), out=flag)


def read(region: Region, grant: _C.RemoteRegion, indices: torch.Tensor | None, out: torch.Tensor, order: Order) -> bool:
    """Reads the part, or its blocks, into ``out``. Returns whether it did: False if the region is not mapped."""
    device = _copying_device(grant, out)
    view = _checked(region, grant, device, order, False)
    if view is None or device is None:
        return False
    with torch.no_grad(), torch.cuda.device(device):
        if indices is None:
            out.copy_(view, non_blocking=True)
        else:
            view, words = _words(view, out)
            places = indices.to(device, torch.int64, non_blocking=True)
            if words.device == device and words.is_contiguous():
                torch.index_select(view, 0, places, out=words)
            else:
                words.copy_(view.index_select(0, places), non_blocking=True)
        _finish(grant, device, order)
    return True


def write(
    region: Region, grant: _C.RemoteRegion, indices: torch.Tensor | None, source: torch.Tensor, order: Order
) -> bool:
    """Writes ``source`` to the part, or to its blocks. Returns whether it did: False if the region is not mapped."""
    device = _copying_device(grant, source)
    view = _checked(region, grant, device, order, True)
    if view is None or device is None:
        return False
    with torch.no_grad(), torch.cuda.device(device):
        if indices is None:
            view.copy_(source, non_blocking=True)
        else:
            view, words = _words(view, source.to(device, non_blocking=True))
            view.index_copy_(0, indices.to(device, torch.int64, non_blocking=True), words)
        _finish(grant, device, order)
    return True


def read_all(regions: Sequence[Region], outs: Sequence[torch.Tensor], seconds: float, order: Order) -> list[int]:
    """Reads those of the parts that can be mapped, on each device by one launch of torch's for many. Returns the
    places of the others."""
    left: list[int] = []
    batches: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    grants: dict[int, _C.RemoteRegion] = {}
    for place, (region, out) in enumerate(zip(regions, outs, strict=True)):
        grant = region._opened(seconds)
        device = _copying_device(grant, out) if out.is_cuda else None
        view = _mapped(region, grant, device, False)
        if view is None or device is None:
            left.append(place)
            continue
        grants[id(grant)] = grant
        targets, sources = batches.setdefault(device, ([], []))
        targets.append(out)
        sources.append(view)
    if left and order.by_stream:
        _before(None, order, False)
    for device, (targets, sources) in batches.items():
        _before(device, order, True)
        with torch.no_grad(), torch.cuda.device(device):
            torch._foreach_copy_(targets, sources, non_blocking=True)
    if not order.by_stream:
        for device in batches:
            wait_for(torch.cuda.current_stream(device))
        for grant in grants.values():
            grant.check()
    return left


def copy_bytes(
    grant: _C.RemoteRegion,
    offset: int,
    local: torch.Tensor,
    from_region: bool,
    stream: torch.cuda.Stream,
    poison: torch.Tensor | None,
) -> bool:
    """Copies the bytes of a tensor from a region or to it, on a stream. Waits and looks, or poisons the flag. Returns
    False if the region cannot be mapped."""
    device = stream.device
    memory = grant.map_on(device.index, not from_region) if grant.on_gpu else None
    if memory is None:
        return False
    part = memory[offset : offset + local.numel()]
    to, source = (local, part) if from_region else (part, local)
    with torch.no_grad(), torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
        _finish(grant, device, Order.of(False, poison))
    return True


async def apart(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs the function on a thread of asyncio's, on the current streams of this thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return await asyncio.to_thread(function, *args, **kwargs)
    stream = torch.cuda.current_stream()

    def run() -> T:
        with torch.cuda.stream(stream):
            return function(*args, **kwargs)

    return await asyncio.to_thread(run)
