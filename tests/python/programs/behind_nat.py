"""Two agents, of which "inside" is behind a router that masquerades: python behind_nat.py NAME RANK STORE.

STORE is the address of torch's store, which "outside" serves. Both call each other with small and large tensors, and
use an object of the other by reference.
"""

from __future__ import annotations

import sys

import tensorferry.rpc as rpc
import torch

LARGE = 8 << 20


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, n: int) -> int:
        self.value += n
        return self.value


counter = Counter()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def shared() -> rpc.RRef:
    return rpc.RRef(counter)


def use(peer: str) -> None:
    """Calls the peer and checks what it answers."""
    for n in range(50):
        assert torch.equal(rpc.rpc_sync(peer, double, args=(torch.tensor([n]),)), torch.tensor([2 * n]))
    futures = [rpc.rpc_async(peer, double, args=(torch.full((LARGE,), n, dtype=torch.uint8),)) for n in range(4)]
    for n, future in enumerate(futures):
        assert torch.equal(future.wait(), torch.full((LARGE,), 2 * n, dtype=torch.uint8))
    reference = rpc.rpc_sync(peer, shared)
    assert [reference.rpc_sync().add(1) for _ in range(3)] == [1, 2, 3]


def main(name: str, rank: int, store: str) -> None:
    rpc.init_rpc(name, rank=rank, world_size=2, init_method=f"tcp://{store}")
    if name == "inside":  # nobody can dial it, so it calls first
        use("outside")
        rpc.rpc_sync("outside", use, args=("inside",))
        print("both ways", flush=True)
    rpc.shutdown(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
