"""Tensors between two processes: python main.py"""

import os
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry.rpc as rpc
import torch
from rich import print
from rich.console import Console
from rich.table import Table
from tensorferry import wait_all
from torch.multiprocessing.spawn import spawn


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor.mul_(factor)  # in place: what arrived is ours


def norm(tensor: torch.Tensor) -> float:
    return float(tensor.norm())


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Mean:
    """A running mean that lives in one process and is used from others."""

    def __init__(self, size: int) -> None:
        self.sum, self.count = torch.zeros(size), 0

    def add(self, tensor: torch.Tensor) -> int:
        self.sum += tensor
        self.count += 1
        return self.count

    def value(self) -> torch.Tensor:
        return self.sum / self.count


def values_and_views() -> None:
    mine = torch.arange(4.0)
    theirs = rpc.rpc_sync("worker", scale, args=(mine, 10.0))
    print(f"values:  {mine.tolist()} came back as {theirs.tolist()}; mine is unchanged")

    column = torch.arange(12.0).reshape(3, 4)[:, 1]
    theirs = rpc.rpc_sync("worker", echo, args=(column,))
    print(f"views:   a column sends its own {column.numel()} elements: {theirs.tolist()}")


def many_at_once() -> None:
    tensors = [torch.full((100,), float(i)) for i in range(32)]
    norms = wait_all([rpc.rpc_async("worker", norm, args=(tensor,)) for tensor in tensors])
    assert norms == [tensor.norm().item() for tensor in tensors]
    print(f"async:   {len(norms)} tensors were in flight at once, the last one's norm is {norms[-1]:.0f}")


def an_object_over_there() -> None:
    mean = rpc.remote("worker", Mean, args=(3,))
    for i in range(1, 5):
        mean.rpc_sync().add(torch.full((3,), float(i)))
    print(f"remote:  {mean.owner_name()} holds the mean of 4 tensors: {mean.rpc_sync().value().tolist()}")


def how_fast() -> None:
    table = Table("tensor", "there and back", title="ordinary tensors, sent and received", title_justify="left")
    for megabytes in (1, 16, 64):
        tensor = torch.rand(megabytes << 18)
        assert torch.equal(rpc.rpc_sync("worker", echo, args=(tensor,)), tensor)
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            rpc.rpc_sync("worker", echo, args=(tensor,))
            times.append(time.perf_counter() - begin)
        table.add_row(f"{megabytes} MB", f"{2 * tensor.nbytes / sorted(times)[5] / 1e9:.1f} GB/s")
    Console().print(table)


def run(rank: int, world_size: int, init_method: str = "env://") -> None:
    rpc.init_rpc(("caller", "worker")[rank], rank=rank, world_size=world_size, init_method=init_method)
    if rank == 0:
        values_and_views()
        many_at_once()
        an_object_over_there()
        how_fast()
    rpc.shutdown()


def main() -> None:
    if "RANK" in os.environ:  # torchrun has started us
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(2, f"file://{folder}/store"), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
