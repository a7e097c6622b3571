"""Versions whose tensors stay on a GPU: how a publisher writes them, and how a reader copies them to its own GPU.

What is on the GPU of a version is one piece of memory, in which each tensor has its place. The leases of versions keep
the publisher from writing what is read (rpc/regions/versions.h); nothing here orders one process behind another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def _waits_if_it_fails(devices: Iterable[torch.device]) -> Iterator[None]:
    """After an error, Ctrl-C too, waits for the current streams: else work that they have might use an image that
    another stream writes. A second Ctrl-C ends the wait."""
    try:
        yield
    except BaseException:
        for device in devices:
            wait_for(torch.cuda.current_stream(device))
        raise


def as_bytes_are(part: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Returns whether a copy of bytes makes the tensor equal to the part."""
    plain = not any(each.is_conj() or each.is_neg() for each in (part, tensor))
    return plain and part.dtype == tensor.dtype and part.is_contiguous() and tensor.is_contiguous()


def is_view(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Returns whether an index of ``whole`` has given a view. That by a list or a tensor gives a copy."""
    return bool(part.untyped_storage()._cdata == whole.untyped_storage()._cdata)


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
        with torch.no_grad(), torch.cuda.device(self._device), _waits_if_it_fails([self._device]):
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


class Copies:
    """The copies from one region, which an image of the publisher has, to the tensors of a reader. To plan them takes
    longer than to enqueue them, and an image is used for many versions."""

    def __init__(self, region: _C.RemoteRegion, parts: list[Part], gpu_from: int) -> None:
        self.region = region
        self._gpu_from = gpu_from
        self._end = gpu_from + region.nbytes
        devices = dict.fromkeys(part.target.device for part in parts if part.target.is_cuda)
        memories = {device: region.map_on(device.index, False) for device in devices}
        self._mapped = {device: memory for device, memory in memories.items() if memory is not None}
        self.possible = bool(self._mapped) and len(self._mapped) == len(memories)
        # By device: the target, the source, and where that begins in the image. The bytes of the first are copied as
        # they are, those of the second are cast, have gaps, or go to the host. An index that makes a copy has no
        # source: it is evaluated at each load.
        self._dense: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor, int]]] = {
            each: [] for each in self._mapped
        }
        self._other: list[tuple[torch.device, Part, torch.Tensor | None]] = []
        for part in parts if self.possible else []:
            target = part.target
            if target.numel() == 0:
                continue
            device = target.device if target.is_cuda else next(iter(self._mapped))
            source = part.source(self._mapped[device]) if is_view(part.form[part.index], part.form) else None
            if target.is_cuda and source is not None and as_bytes_are(source, target):
                begin = gpu_from + int(source.storage_offset()) * source.element_size()
                to, words = _words(target.view(-1), source.view(-1))
                self._dense[device].append((to, words, begin))
            else:
                self._other.append((device, part, source))

    def run(self, ranges: Ranges | None) -> None:
        """Copies what lies in the ranges, which are of the whole image; None: all. Waits until the bytes are there, and
        raises if they are not of one version."""
        if ranges is not None and any(at <= self._gpu_from and self._end <= at + size for at, size in ranges[-1:]):
            ranges = None
        with torch.no_grad(), _waits_if_it_fails(self._mapped):
            for device, part, source in self._other:
                if spans_of(ranges, self._gpu_from + part.offset, part.form.nbytes):
                    with torch.cuda.device(device):
                        part.target.copy_(part.source(self._mapped[device]) if source is None else source)
            for device, each in self._dense.items():
                targets, sources = _parts_in(ranges, each)
                with torch.cuda.device(device):
                    if targets:
                        torch._foreach_copy_(targets, sources)
                    wait_for(torch.cuda.current_stream())
        self.region.check()


def _parts_in(
    ranges: Ranges | None, dense: list[tuple[torch.Tensor, torch.Tensor, int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what of the targets and of the sources lies in the ranges."""
    if ranges is None:
        return [to for to, _, _ in dense], [source for _, source, _ in dense]
    targets, sources = [], []
    for to, source, begin in dense:
        item = source.element_size()
        for low, high in spans_of(ranges, begin, source.nbytes):
            targets.append(to[low // item : high // item])
            sources.append(source[low // item : high // item])
    return targets, sources
