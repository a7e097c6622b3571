"""Tensors in memory that processes of one host share: :func:`empty` makes them, :func:`share` hands them over."""

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
    """Returns a tensor as ``torch.empty`` does, in memory that :func:`share` can hand to peers without a copy.

    The tensor is an ordinary contiguous CPU tensor. Calls copy it as any other tensor, unless :func:`share` marks it.
    Its memory is a memfd of its own, in whole pages, initially zero, and uses a file descriptor. So it suits tensors
    that are large or used repeatedly. The memory needs no agent, and belongs to none. It is freed when the last tensor
    in it is gone, here and at every peer that got it. A forked child sees the same bytes.

    Args:
        size: as for ``torch.empty``: ``empty(2, 3)`` or ``empty((2, 3))``.
        dtype: None: ``torch.get_default_dtype()``.
        device: the CPU, which is the default even after ``torch.set_default_device``.
        requires_grad: as for ``torch.empty``.

    Raises:
        ValueError: a size is negative, the device is not the CPU, or the dtype cannot be sent (quantised).
        tensorferry.errors.ResourceExhausted: there is no memory or no file descriptor left.

    Example::

        weights = tensorferry.empty((1024, 1024), dtype=torch.float32)
        rpc.rpc_sync("worker1", torch.Tensor.fill_, args=(tensorferry.share(weights), 1.0))
        assert weights.mean() == 1  # worker1 wrote into these weights
    """
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"tensorferry.empty() makes memory on the CPU; memory of {device} cannot be shared yet")
    if not size:
        raise TypeError("empty() needs a size: empty(2, 3), empty((2, 3)), or empty(()) for a scalar")
    given = size[0] if len(size) == 1 and not hasattr(size[0], "__index__") else size
    assert not isinstance(given, int)
    sizes = [operator.index(each) for each in given]  # type: ignore[arg-type]
    if min(sizes, default=0) < 0:
        raise ValueError(f"a tensor has no negative size: {tuple(sizes)}")
    tensor = _C.empty(sizes, torch.get_default_dtype() if dtype is None else dtype)
    return tensor.requires_grad_() if requires_grad else tensor
