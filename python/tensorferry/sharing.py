"""Memory of tensors: :func:`empty` makes it for peers, :func:`share` hands it over, :func:`register` prepares it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import final

import torch

from . import _C
from ._C import Shared, share

__all__ = ["Registered", "Shared", "empty", "register", "share"]


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Returns a tensor as ``torch.empty`` does, in memory that peers use without a copy.

    On the CPU, :func:`share` can hand it to peers. The tensor is an ordinary contiguous CPU tensor. Calls copy it as
    any other tensor, unless :func:`share` marks it. Its memory is a memfd of its own, in whole pages, initially zero,
    and uses a file descriptor. So it suits tensors that are large or used repeatedly. The memory needs no agent, and
    belongs to none. It is freed when the last tensor in it is gone, here and at every peer that got it. A forked child
    sees the same bytes.

    On a GPU, the tensor is torch's own, and uninitialised. If each rank of a group has a GPU, the others map its memory
    at the first collective operation that has it as an input, and read it there, so it is not copied to a buffer first.
    With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it is copied like any other tensor.

    Args:
        size: as for ``torch.empty``: ``empty(2, 3)`` or ``empty((2, 3))``.
        dtype: None: ``torch.get_default_dtype()``.
        device: the CPU, which is the default even after ``torch.set_default_device``; or a CUDA device.
        requires_grad: as for ``torch.empty``.

    Raises:
        ValueError: a size is negative, the device is of another type, or the dtype cannot be sent (quantised).
        tensorferry.errors.ResourceExhausted: there is no memory or no file descriptor left.

    Example::

        weights = tensorferry.empty((1024, 1024), dtype=torch.float32)
        rpc.rpc_sync("worker1", torch.Tensor.fill_, args=(tensorferry.share(weights), 1.0))
        assert weights.mean() == 1  # worker1 wrote into these weights
    """
    where = torch.device("cpu" if device is None else device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"tensorferry.empty() makes memory on the CPU or on a CUDA device, not on {device}")
    if not size:
        raise TypeError("empty() needs a size: empty(2, 3), empty((2, 3)), or empty(()) for a scalar")
    given = size[0] if len(size) == 1 and not hasattr(size[0], "__index__") else size
    assert not isinstance(given, int)
    sizes = [operator.index(each) for each in given]  # type: ignore[arg-type]
    if min(sizes, default=0) < 0:
        raise ValueError(f"a tensor has no negative size: {tuple(sizes)}")
    if where.type == "cuda":
        tensor = torch.empty(sizes, dtype=dtype, device=where)
        _C.mark_symmetric(tensor)
    else:
        tensor = _C.empty(sizes, torch.get_default_dtype() if dtype is None else dtype)
    return tensor.requires_grad_() if requires_grad else tensor


@final
class Registered:
    """Memory that :func:`register` has registered. Release it, or drop it, to end the registration.

    It is a context manager, which releases the memory at its end.

    Example::

        with tensorferry.register(torch.ones(1 << 20)) as registered:
            assert registered.bytes == 4 << 20
        registered.release()  # does nothing more
    """

    __slots__ = ("_memory",)

    def __init__(self, memory: _C.RegisteredMemory) -> None:
        self._memory = memory

    @property
    def bytes(self) -> int:
        """The size of the memory; 0 once it is released."""
        return self._memory.bytes

    def release(self) -> None:
        """Ends the registration, if it has not ended. Transfers that are under way go on."""
        self._memory.release()

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<tensorferry.Registered: {self.bytes} bytes>"


def register(tensor: torch.Tensor) -> Registered:
    """Registers a tensor's memory with the network cards ahead, so that no call that sends it registers or copies it.

    A card reads only memory that is registered with it, which pins the memory. Without ``register``, the channel
    ``ibv`` registers a large tensor for each call that sends it, because nothing tells it when the memory is freed. So
    this suits tensors that are sent often and stay where they are, such as weights. Memory of :func:`empty` needs no
    ``register``: it stays registered from its first use. Without a card (``explain()`` says so) it registers nothing,
    and does no harm.

    The whole storage of the tensor is registered. While it is, the memory stays allocated, and the cards of peers may
    read it at any time. If the storage is resized or moved (``resize_``, ``share_memory_``), its new memory is not
    registered.

    Args:
        tensor: a dense tensor on the CPU.

    Returns:
        A handle. The memory stays registered until the handle is released or gone.

    Raises:
        ValueError: the tensor is not on the CPU, or has no memory of its own (sparse, nested).
        TypeError: ``tensor`` is not a torch.Tensor.

    Example::

        weights = torch.ones(1 << 20)
        registered = tensorferry.register(weights)
        assert rpc.rpc_sync("worker1", torch.sum, args=(weights,)) == 1 << 20
        registered.release()
    """
    return Registered(_C.register_memory(tensor))
