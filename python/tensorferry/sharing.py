"""Tensors in memory that processes of one host can share: made by :func:`empty`, handed over by :func:`share`."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from . import _C
from ._C import Shared, share

__all__ = ["Shared", "empty", "share"]


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """A tensor like ``torch.empty``'s, in memory that :func:`share` can hand over to peers without a copy.

    It is an ordinary contiguous CPU tensor, and in calls a value like any other unless :func:`share` marks it. Its
    memory is a piece of its own (a memfd, with a file descriptor), zero at first, in whole pages; so it is for tensors
    that are large or used again and again. It needs no agent, and belongs to none. It is given back when the last
    tensor on it is gone, here and at every peer that it was handed to. A forked child sees the same bytes.

    Args:
        size: as ``torch.empty`` has it: ``empty(2, 3)`` or ``empty((2, 3))``.
        dtype: None: ``torch.get_default_dtype()``.
        device: the CPU, which is the default whatever ``torch.set_default_device`` says.
        requires_grad: as ``torch.empty`` has it.

    Raises:
        ValueError: a negative size; a device other than the CPU; a dtype that cannot be sent (quantised).
        tensorferry.errors.ResourceExhausted: no memory, or no file descriptor, is left.

    Example::

        weights = tensorferry.empty((1024, 1024), dtype=torch.float32)
        rpc.rpc_sync("worker1", torch.Tensor.fill_, args=(tensorferry.share(weights), 1.0))
        assert weights.mean() == 1  # worker1 wrote into these weights
    """
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"tensorferry.empty() makes memory on the CPU; sharing that of {device} is not there yet")
    if not size:
        raise TypeError("empty() needs a size: empty(2, 3), empty((2, 3)), or empty(()) for a scalar")
    given = size[0] if len(size) == 1 and not hasattr(size[0], "__index__") else size
    assert not isinstance(given, int)
    sizes = [operator.index(each) for each in given]  # type: ignore[arg-type]
    if min(sizes, default=0) < 0:
        raise ValueError(f"a tensor has no negative size: {tuple(sizes)}")
    tensor = _C.empty(sizes, torch.get_default_dtype() if dtype is None else dtype)
    return tensor.requires_grad_() if requires_grad else tensor
