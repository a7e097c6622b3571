"""TensorDicts as records of the codec. Called by the compiled module, where tensordict is imported already."""

from __future__ import annotations

from typing import Any


def take_apart(value: Any) -> tuple[Any, ...] | None:
    """What a TensorDict is made of; None: one that only pickle can take (memory-mapped, in shared memory)."""
    if value.is_memmap() or value.is_shared():
        return None
    names = tuple(value.names)
    named = any(name is not None for name in names)
    return dict(value.items()), value.batch_size, value.device, names if named else None, value.is_locked


def put_together(kind: type, parts: tuple[Any, ...]) -> Any:
    """The TensorDict of these parts, which a peer sent: its own constructor checks them."""
    source, batch_size, device, names, locked = parts
    if type(source) is not dict or type(locked) is not bool:
        raise TypeError("a TensorDict came that is made of something else than a dict")
    return kind(source, batch_size=batch_size, device=device, names=names, lock=locked)
