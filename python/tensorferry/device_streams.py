"""The order of work on a GPU between calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["on_default_stream"]


@contextlib.contextmanager
def on_default_stream(device: torch.device | str) -> Iterator[None]:
    """Runs its block on the default stream of a GPU, between the earlier and the later work of the current stream.

    A function that a peer calls runs with a stream of its own, which waits for no other one. Tensors that outlive
    calls, such as the parameters of a parameter server, therefore need one stream on which all calls use them. Calls
    that enter this block one after the other use them in that order. The host waits for nothing. A coroutine must not
    await inside the block, because the current stream is the thread's.

    Args:
        device: the tensors' device. Unless it is a GPU, the block just runs.

    Raises:
        RuntimeError: torch does not know the device, or this machine has no such GPU.

    Example::

        class Server:
            def __init__(self) -> None:
                self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                self.total = torch.zeros(1000, device=self.device)

            def add(self, tensor: torch.Tensor) -> torch.Tensor:
                with tensorferry.on_default_stream(self.device):
                    self.total += tensor
                    return self.total.clone()

        assert Server().add(torch.ones(1000)).sum() == 1000
    """
    if torch.device(device).type != "cuda":
        yield
        return
    mine, common = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    common.wait_stream(mine)
    try:
        with torch.cuda.stream(common):
            yield
    finally:
        mine.wait_stream(common)
