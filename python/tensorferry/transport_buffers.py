"""The buffers of transport.py: memory that an endpoint has registered, views of it, and descriptors of a peer's."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import errors

if TYPE_CHECKING:
    from .transport import RegionTransport

_LONGEST = 8192  # bytes of a descriptor or of connection bytes


# ---- what travels between the programs


def packed(kind: str, fields: dict[str, str | int]) -> bytes:
    return json.dumps({"tensorferry": kind, "version": 1, **fields}, separators=(",", ":")).encode("ascii")


def unpacked(kind: str, data: bytes, types: dict[str, type]) -> dict[str, Any]:
    """Decodes what a peer's program sent, and runs no code of it. Raises TypeError, or ValueError for anything else."""
    if type(data) is not bytes:
        raise TypeError(f"the {kind} is bytes, not {type(data).__name__}")
    try:
        if len(data) > _LONGEST:
            raise ValueError(f"it has {len(data)} bytes")
        pairs: list[tuple[str, Any]] = json.loads(data.decode("ascii"), object_pairs_hook=list)
        fields = dict(pairs)
        if len(fields) != len(pairs) or fields.keys() != {"tensorferry", "version", *types}:
            raise ValueError("it has other fields")
        version = fields.pop("version")
        if fields.pop("tensorferry") != kind or type(version) is not int or version != 1:
            raise ValueError("it is of another kind or version")
        for name, expected in types.items():
            value = fields[name]
            if type(value) is not expected or (isinstance(value, int) and not 0 <= value < 1 << 64):
                raise ValueError(f"its field {name} is out of range")
    except (ValueError, TypeError, RecursionError) as error:
        raise errors.InvalidArgument(f"this is no {kind} of transport 'tensorferry': {error}") from error
    return fields


@dataclass(frozen=True)
class RemoteRegionBuffer:
    """The descriptor of memory that a peer has registered: it names the memory, and holds no address and no bytes.

    Args:
        owner: the name of the peer's endpoint.
        incarnation: the random number of the endpoint.
        region: the number of the registration, which the endpoint never uses again.
        offset: the first byte.
        length: how many bytes.
    """

    owner: str
    incarnation: int
    region: int
    offset: int
    length: int

    def serialize(self) -> bytes:
        """Returns bytes for the peer's program."""
        return packed("descriptor", dict(vars(self)))

    @classmethod
    def deserialize(cls, data: bytes) -> RemoteRegionBuffer:
        """Returns the descriptor. Raises ValueError if the bytes are not one, and TypeError if they are not bytes."""
        types = {"owner": str, "incarnation": int, "region": int, "offset": int, "length": int}
        return cls(**unpacked("descriptor", data, types))

    def part(self, offset: int, length: int) -> RemoteRegionBuffer:
        """Returns the descriptor of ``length`` bytes from ``offset`` on. Raises ValueError if it has fewer."""
        begin, size = operator.index(offset), operator.index(length)
        if not 0 <= begin <= begin + size <= self.length:
            raise errors.InvalidArgument(f"bytes {begin} to {begin + size} of a buffer of {self.length} bytes")
        return replace(self, offset=self.offset + begin, length=size)


# ---- memory of this endpoint


class Registration:
    """Memory that the endpoint has registered. Handles of the same memory share it."""

    def __init__(self, tensor: torch.Tensor, flat: torch.Tensor, region: int) -> None:
        self.tensor = tensor
        self.flat = flat  # its bytes
        self.place = place_of(flat)
        self.region = region
        self.active = True

    def check(self) -> None:
        """Raises RuntimeError if the memory is not the endpoint's any more."""
        if not self.active:
            raise errors.NotFound("this memory has been unregistered: register the tensor again")
        if place_of(self.tensor) != self.place:
            raise RuntimeError("a registered tensor was resized, or has other storage now")


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


class RegionView:
    """A range of bytes of registered memory."""

    def __init__(self, memory: RegionMemory, offset: int, length: int) -> None:
        self._memory = memory
        self._bytes = memory._registration.flat[offset : offset + length]

    def size(self) -> int:
        """Returns how many bytes it has."""
        return self._bytes.numel()


class WritableRegionView(RegionView):
    """A range of bytes of registered memory that transfers may write."""

    writable: Literal[True] = True


class RegionMemory:
    """Memory that :meth:`RegionTransport.register_memory` has registered."""

    def __init__(self, transport: RegionTransport, registration: Registration) -> None:
        self._transport = transport
        self._registration = registration

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self._registration.check()
        all_bytes = self._registration.flat.numel()
        begin = 0 if offset is None else operator.index(offset)
        size = all_bytes - begin if length is None else operator.index(length)
        if not 0 <= begin <= begin + size <= all_bytes:
            raise errors.InvalidArgument(f"bytes {begin} to {begin + size} of memory of {all_bytes} bytes")
        return begin, size

    def to_view(self, offset: int | None = None, length: int | None = None) -> RegionView:
        """Returns a view of ``length`` bytes from ``offset`` on. Raises ValueError if there are fewer."""
        return RegionView(self, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> WritableRegionView:
        """Returns a view as :meth:`to_view`, which a read may write."""
        return WritableRegionView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> RemoteRegionBuffer:
        """Returns the descriptor for the peer, which may then read and write all of the memory."""
        return self._transport._describe(self._registration, timeout)
