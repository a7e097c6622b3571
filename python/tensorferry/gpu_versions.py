"""Versions whose tensors stay on a GPU: how a publisher writes them, and how a reader copies them to its own GPU.

What is on the GPU of a version is one piece of memory, in which each tensor has its place. The leases of versions keep
the publisher from writing what is read (rpc/regions/versions.h); nothing here orders one process behind another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from . import _C
from .gpu_regions import _words, wait_for

Ranges = Sequence[tuple[int, int]]


def on_one_gpu(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of the tensors on the first CUDA device that has one."""
    device = next((each.device for each in tensors.values() if each.is_cuda and each.numel()), None)
    return [name for name, each in tensors.items() if each.device == device and each.numel()]


def changed_blocks(image: torch.Tensor, base: torch.Tensor | None, block: int) -> torch.Tensor:
    """Compares memory of whole blocks. Returns a byte for each block: 1 if it differs, or if there is no base."""
    blocks = image.numel() // block
    if base is None:
        return torch.ones(blocks, dtype=torch.uint8, device=image.device)
    new, old = (each.view(torch.int64).view(blocks, -1) for each in (image, base))
    step = (256 << 20) // block  # a comparison has a byte of its own for each 8 bytes
    marks = [(new[at : at + step] != old[at : at + step]).any(1) for at in range(0, blocks, step)]
    return torch.cat(marks).view(torch.uint8)


class Writer:
    """Writes the tensors of a publication that stay on a GPU, version by version."""

    def __init__(self, device: torch.device, block: int, places: list[tuple[int, torch.Tensor]]) -> None:
        self._device = device
        self._block = block
        self._places = places  # the offset of each tensor in the memory, and its form

    def make(self, nbytes: int) -> torch.Tensor:
        """Returns memory for one version. Its gaps stay as they are, so they are equal in all versions."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def write(self, tensors: Iterable[torch.Tensor], image: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
        """Copies the tensors behind the current stream, and waits. Returns which blocks differ from ``base``."""
        with torch.no_grad(), torch.cuda.device(self._device):
            pairs = []
            for (offset, form), tensor in zip(self._places, tensors, strict=True):
                place = image[offset : offset + form.nbytes].view(form.dtype).view(form.shape)
                pairs.append(_words(place, tensor.resolve_conj().resolve_neg()))
            torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
            marks = changed_blocks(image, base, self._block)
            wait_for(torch.cuda.current_stream())
            return marks.cpu()


class Part(NamedTuple):
    """A tensor of a reader, and what it gets of a version's memory on a GPU."""

    target: torch.Tensor
    form: torch.Tensor  # of the published tensor
    index: Any  # of the part of that
    offset: int  # of the published tensor in the memory

    def source(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the part in the memory."""
        whole = memory[self.offset : self.offset + self.form.nbytes]
        return whole.view(self.form.dtype).view(self.form.shape)[self.index]


most_spans = 64  # beyond, one copy of all takes less time than to enqueue so many


def spans_of(ranges: Ranges | None, begin: int, nbytes: int) -> list[tuple[int, int]]:
    """Returns the parts of ``begin``, ``nbytes`` that lie in the ranges, as begins and ends relative to ``begin``. The
    ranges are in ascending order."""
    if ranges is None:
        return [(0, nbytes)]
    first = max(bisect_right(ranges, (begin, 0)) - 1, 0)
    last = bisect_right(ranges, (begin + nbytes, 0))
    spans = [(max(at - begin, 0), min(at + size - begin, nbytes)) for at, size in ranges[first:last]]
    spans = [(low, high) for low, high in spans if low < high]
    return spans if len(spans) <= most_spans else [(spans[0][0], spans[-1][1])]


def copy_from(region: _C.RemoteRegion, parts: list[Part], gpu_from: int, ranges: Ranges | None) -> bool:
    """Copies what of the parts lies in the ranges, which are of the whole image; None: all. Waits until the bytes are
    there, and raises if they are not of one version. Returns False, and copies nothing, if the region cannot be mapped.
    """
    devices = dict.fromkeys(part.target.device for part in parts if part.target.is_cuda)
    memories = {device: region.map_on(device.index, False) for device in devices}
    mapped = {device: memory for device, memory in memories.items() if memory is not None}
    if not mapped or len(mapped) < len(memories):
        return False
    batches: dict[torch.device, list[list[torch.Tensor]]] = {device: [] for device in mapped}
    with torch.no_grad():
        for part in parts:
            target = part.target
            if target.numel() == 0:
                continue
            device = target.device if target.is_cuda else next(iter(mapped))
            source = part.source(mapped[device])
            item = source.element_size()
            dense = source.is_contiguous() and target.is_contiguous() and target.dtype == source.dtype
            if target.is_cuda and dense:
                begin = gpu_from + int(source.storage_offset()) * item
                flat = _words(target.view(-1), source.view(-1))
                for low, high in spans_of(ranges, begin, source.nbytes):
                    batches[device].append([each[low // item : high // item] for each in flat])
            elif spans_of(ranges, gpu_from + part.offset, part.form.nbytes):
                with torch.cuda.device(device):
                    target.copy_(source)
        for device, pairs in batches.items():
            with torch.cuda.device(device):
                if pairs:
                    torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
                wait_for(torch.cuda.current_stream())
    region.check()
    return True
