"""Trainers whose gradients are averaged by a server in a process of its own: python main.py [--trainers 2]"""

import argparse
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry.rpc as rpc
import torch
from gradient_server import GradientServer, gradient_server_hook
from tensorferry import ddp
from torch import nn
from torch.multiprocessing.spawn import spawn

BATCH = 32
GOAL = 0.85  # of the test pictures


def digits(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures as rows of 64 numbers, and what they show; in an order that is the same in every process."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[part]
    return torch.from_numpy(pictures).float()[order] / 16, torch.from_numpy(labels)[order]


def train(server: rpc.RRef[GradientServer], trainer: int, trainers: int, steps: int) -> None:
    torch.manual_seed(0)  # all trainers begin with the same network
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    pictures, labels = (data[trainer::trainers] for data in digits(slice(360, None)))
    choice = torch.Generator().manual_seed(trainer)
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH,), generator=choice)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(pictures[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        ddp.reduce_gradients(network.parameters(), server, gradient_server_hook)
        optimizer.step()
    pictures, labels = digits(slice(0, 360))
    reached = (network(pictures).argmax(1) == labels).float().mean().item()
    print(f"trainer {trainer}: accuracy on 360 pictures never trained on: {reached:.3f}", flush=True)
    if reached <= GOAL:
        raise SystemExit(f"accuracy {reached} is not above {GOAL}")


servers: list[GradientServer] = []  # in the server's process


def the_server() -> GradientServer:
    return servers[0]


def run(rank: int, size: int, steps: int, init_method: str = "env://") -> None:
    """Rank 0 is the server."""
    trainers = size - 1
    if rank == 0:
        servers.append(GradientServer(trainers))
    rpc.init_rpc(f"trainer{rank - 1}" if rank else "server", rank=rank, world_size=size, init_method=init_method)
    if rank != 0:
        train(rpc.remote("server", the_server), rank - 1, trainers, steps)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--trainers", type=int, default=2, help="without torchrun")
    given = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started us
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given.steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.trainers + 1, given.steps, f"file://{folder}/store")
        spawn(run, args=arguments, nprocs=given.trainers + 1)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
