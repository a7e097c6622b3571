"""A model in two stages in two processes, trained by distributed autograd; micro-batches are in flight together.

For torch's module alone, on either backend.
"""

import os
import threading

import tensorferry.rpc as rpc
import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.multiprocessing.spawn import spawn

NAMES = ["driver", "stage0", "stage1"]
STEPS, MICRO_BATCHES = 12, 4


class Stage:
    def __init__(self, index):
        torch.manual_seed(index)
        layers = [nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 1)]
        self.layer = layers[index]
        self.guard = threading.Lock()

    def forward(self, inputs):
        with self.guard:
            return self.layer(inputs.to_here())

    def parameters(self):
        return [rpc.RRef(parameter) for parameter in self.layer.parameters()]


def drive():
    stages = [rpc.remote(name, Stage, args=(index,)) for index, name in enumerate(NAMES[1:])]
    parameters = [one for stage in stages for one in stage.rpc_sync().parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.2)
    choice = torch.Generator().manual_seed(7)
    inputs = torch.randn(MICRO_BATCHES, 16, 8, generator=choice)
    targets = inputs.sum(dim=2, keepdim=True).tanh()
    for step in range(1, STEPS + 1):
        with dist_autograd.context() as context:
            hidden = [stages[0].remote().forward(rpc.RRef(one)) for one in inputs]
            outputs = [stages[1].rpc_async().forward(one) for one in hidden]
            losses = [nn.functional.mse_loss(out.wait(), target) for out, target in zip(outputs, targets)]
            loss = torch.stack(losses).mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        if step % 4 == 0:
            print(f"step {step}, loss {loss.item():.5f}")
    print("norms", *(f"{parameter.to_here().norm().item():.4f}" for parameter in parameters))


def run(rank, world_size):
    torch.set_num_threads(1)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if rank == 0:
        drive()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    spawn(run, args=(len(NAMES),), nprocs=len(NAMES))
