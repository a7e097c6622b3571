"""TensorDicts as records of the codec. The compiled module calls this only if tensordict is imported already."""

from __future__ import annotations

from typing import Any


def to_parts(value: Any) -> tuple[Any, ...] | None:
    """Returns the parts of a TensorDict; None if only pickle can encode it (memory-mapped or in shared memory)."""
    if value.is_memmap() or value.is_shared():
        return None
    names = tuple(value.names)
    named = any(name is not None for name in names)
    return dict(value.items()), value.batch_size, value.device, names if named else None, value.is_locked


def from_parts(kind: type, parts: tuple[Any, ...]) -> Any:
    """Returns the TensorDict of the parts that a peer sent. The constructor of TensorDict checks them."""
    source, batch_size, device, names, locked = parts
    if type(source) is not dict or type(locked) is not bool:
        raise TypeError("a received TensorDict is not made of a dict")
    return kind(source, batch_size=batch_size, device=device, names=names, lock=locked)
