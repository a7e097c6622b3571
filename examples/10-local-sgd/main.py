"""Local SGD on a group of agents, for a network that reads digits: python main.py [--every 8]"""

import argparse
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry.rpc as rpc
import torch
from tensorferry import collectives, ddp
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


def train(group: collectives.Group, steps: int, every: int) -> None:
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    parameters = [parameter.detach() for parameter in network.parameters()]  # the same memory
    ddp.broadcast_coalesced(group, parameters)  # all begin with the network of rank 0
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    pictures, labels = (data[group.rank :: group.size] for data in digits(slice(360, None)))
    choice = torch.Generator().manual_seed(group.rank)
    rounds, apart = 0, torch.zeros(())
    for step in range(1, steps + 1):
        batch = torch.randint(len(labels), (BATCH,), generator=choice)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(pictures[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % every == 0 or step == steps:
            mine = torch.cat([parameter.flatten() for parameter in parameters])
            group.all_reduce_coalesced(parameters, "average").wait()
            apart = (mine - torch.cat([parameter.flatten() for parameter in parameters])).norm()
            rounds += 1
    pictures, labels = digits(slice(0, 360))
    reached = (network(pictures).argmax(1) == labels).float().mean()
    reached_by_all = [each.item() for each in group.all_gather(reached).wait()]
    if group.rank == 0:
        print(f"{group.size} processes, {steps} steps, parameters averaged {rounds} times", flush=True)
        print(f"distance from the average before the last round: {apart.item():.4f}", flush=True)
        print(f"accuracy on 360 pictures never trained on: {reached.item():.3f}", flush=True)
    if min(reached_by_all) != max(reached_by_all) or reached <= GOAL:
        raise SystemExit(f"accuracies {reached_by_all} are not alike and above {GOAL}")


def run(rank: int, size: int, steps: int, every: int, init_method: str = "env://") -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, init_method=init_method)
    train(collectives.form_group(), steps, every)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--every", type=int, default=8, help="steps from one average to the next")
    parser.add_argument("--processes", type=int, default=2, help="without torchrun")
    given = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started us
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given.steps, given.every)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.processes, given.steps, given.every, f"file://{folder}/store")
        spawn(run, args=arguments, nprocs=given.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
