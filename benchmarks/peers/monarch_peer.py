"""Monarch: an actor in a process that this one spawns, with endpoints. It carries torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from monarch.actor import Actor, endpoint, this_host

from benchmarks.peers.loop import Peer, serve


class Callee(Actor):  # type: ignore[misc]
    @endpoint  # type: ignore[untyped-decorator]
    async def noop(self) -> None:
        pass

    @endpoint  # type: ignore[untyped-decorator]
    async def take(self, tensor: torch.Tensor) -> None:
        pass


class MonarchPeer(Peer):
    def __init__(self) -> None:
        self._callee = this_host().spawn_procs(per_host={"callees": 1}).spawn("callee", Callee)

    def empty(self) -> None:
        self._callee.noop.call_one().get()

    def in_flight(self, count: int) -> None:
        for future in [self._callee.noop.call_one() for _ in range(count)]:
            future.get()

    def send(self, array: np.ndarray[Any, Any]) -> None:
        self._callee.take.call_one(torch.from_numpy(array)).get()


if __name__ == "__main__":
    serve(MonarchPeer)
