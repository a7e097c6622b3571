"""A floor for the rate at which tensors go to a peer, beside ``require=``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _C, errors

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["measured"]

_BYTES = 16 << 20
_TIMES = 5


def measured(
    to: Any,
    *,
    min_gbps: float,
    channel: str | None = None,
    tensor: torch.Tensor | None = None,
    device: Any = None,
    agent: Agent | None = None,
) -> str:
    """Measures how fast tensors go to a peer, and returns the name of the channel that carries them, for ``require=``.

    Sends a tensor six times, and takes the median of the last five. Call it once, at the start of a program, and keep
    the name: the calls that require it then fail if the tensors would go another way.

    Args:
        to: the peer, as for :func:`tensorferry.rpc.rpc_sync`. With ``trust="registered"`` it exposes ``torch.numel``.
        min_gbps: the least rate, in gigabits per second, as of network links: 8 is 1 GB/s.
        channel: the channel to measure; None: the one that would carry the tensor.
        tensor: a tensor as the program sends it; None: 16 MiB on the CPU.
        device: where it lands, as for :func:`tensorferry.rpc.rpc_sync`.
        agent: this process's agent; None: that of ``init_rpc``.

    Raises:
        ChannelUnavailable: the rate is less, or the channel cannot carry the tensor. InvalidArgument: there is no
            agent, or no such channel. All errors of a call.

    Example::

        fast = tensorferry.measured("worker1", min_gbps=10)
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1 << 20), 1), require=fast)
    """
    found = agent if agent is not None else cast("Agent | None", _C.default_agent())
    if found is None:
        raise errors.InvalidArgument("measured() needs an agent: call init_rpc() first, or pass agent=")
    given = torch.zeros(_BYTES, dtype=torch.uint8) if tensor is None else tensor
    chosen = found.explain(to, given, device=device).channel if channel is None else channel
    if not chosen:
        raise errors.ChannelUnavailable(f"no channel carries a tensor to {to!r}: explain() tells why")
    took = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        found.rpc_sync(to, torch.numel, args=(given,), require=chosen, device=device)
        took.append(time.perf_counter() - began)
    rate = given.numel() * given.element_size() * 8 / sorted(took[1:])[_TIMES // 2] / 1e9
    if rate < min_gbps:
        raise errors.ChannelUnavailable(
            f"{chosen} carries tensors to {to!r} at {rate:.3g} Gbit/s, less than min_gbps={min_gbps:g}. "
            "Choose another channel, send larger tensors, or see what tensorferry doctor says of both hosts."
        )
    return chosen
