"""Data-parallel training of a network that reads digits, on the CPU: python train.py [--backend gloo]"""

import argparse
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry.c10d  # noqa: F401  registers the backend; an installed package needs no import
import torch
import torch.distributed as dist
from tensorferry import ddp
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

BATCH = 32
HOOKS = {"all_reduce": ddp.all_reduce_hook, "half": ddp.half_hook, "bfloat16": ddp.bfloat16_hook}


def digits(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures as rows of 64 numbers, and what they show; in an order that is the same in every process."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[part]
    return torch.from_numpy(pictures).float()[order] / 16, torch.from_numpy(labels)[order]


def train(backend: str, epochs: int, hook: str, init_method: str = "env://", rank: int = -1, size: int = -1) -> None:
    dist.init_process_group(backend, init_method, rank=rank, world_size=size)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    if hook != "none":
        network.register_comm_hook(None, HOOKS[hook])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    pictures, labels = digits(slice(360, None))
    for epoch in range(epochs):
        total = torch.zeros(())
        for begin in range(0, len(labels) - BATCH * size + 1, BATCH * size):
            mine = slice(begin + rank * BATCH, begin + (rank + 1) * BATCH)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(pictures[mine]), labels[mine])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            steps = len(labels) // (BATCH * size)
            print(f"epoch {epoch}: loss {total.item() / steps / size:.6f}", flush=True)
    pictures, labels = digits(slice(0, 360))
    right = (network.module(pictures).argmax(1) == labels).float().mean().item()
    if rank == 0:
        print(f"accuracy on 360 pictures never trained on: {right:.3f}", flush=True)
    dist.destroy_process_group()


def start(rank: int, size: int, init_method: str, backend: str, epochs: int, hook: str) -> None:
    train(backend, epochs, hook, init_method, rank, size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="tensorferry")
    parser.add_argument("--hook", default="none", choices=["none", *HOOKS], help="how the gradients travel")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2, help="without torchrun")
    given = parser.parse_args()
    if "RANK" in os.environ:
        train(given.backend, given.epochs, given.hook)
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (given.processes, f"file://{folder}/store", given.backend, given.epochs, given.hook)
            spawn(start, arguments, nprocs=given.processes)  # type: ignore[no-untyped-call]
