"""A model lives in one process; trainers call its forward and backward passes there."""

import os
import threading

import tensorferry.rpc as rpc
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

TRAINERS = 2
NAMES = ["driver", "server", *(f"trainer{i}" for i in range(TRAINERS))]
ROUNDS = 30


class ParameterServer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.outputs = [None] * TRAINERS
        self.gradients = [None] * TRAINERS

    def forward(self, trainer, inputs):
        self.outputs[trainer] = self.model(inputs)
        return self.outputs[trainer].detach()

    def backward(self, trainer, gradient):
        self.gradients[trainer] = torch.autograd.grad(self.outputs[trainer], list(self.model.parameters()), gradient)

    def step(self):
        for parameter, *each in zip(self.model.parameters(), *self.gradients):
            parameter.grad = sum(each) / TRAINERS
        self.optimizer.step()

    def parameters(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


the_server = None
guard = threading.Lock()


def get_server():
    """One server, made by the first agent that asks."""
    global the_server
    with guard:
        if the_server is None:
            the_server = ParameterServer()
        return the_server


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def remote_method(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


class Trainer:
    def __init__(self, index):
        self.index = index
        self.server = rpc.remote("server", get_server)
        choice = torch.Generator().manual_seed(index)
        self.points = torch.rand(64, 2, generator=choice) * 2 - 1
        self.labels = (self.points.norm(dim=1, keepdim=True) < 0.8).float()  # inside a circle, or not

    def compute(self):
        outputs = remote_method(ParameterServer.forward, self.server, self.index, self.points)
        outputs.requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, self.labels)
        loss.backward()
        remote_method(ParameterServer.backward, self.server, self.index, outputs.grad)
        return loss.item()


def drive():
    server = rpc.remote("server", get_server)
    trainers = [rpc.remote(f"trainer{i}", Trainer, args=(i,)) for i in range(TRAINERS)]
    for number in range(1, ROUNDS + 1):
        losses = torch.futures.wait_all([trainer.rpc_async().compute() for trainer in trainers])
        server.rpc_sync().step()
        if number % 10 == 0:
            print(f"round {number}, losses {' '.join(f'{loss:.6f}' for loss in losses)}")
    parameters = server.remote().parameters().to_here()
    print("parameters live in", {parameter.owner_name() for parameter in parameters})
    print("norms", *(f"{parameter.to_here().norm().item():.6f}" for parameter in parameters))


def run(rank, world_size):
    torch.set_num_threads(1)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if rank == 0:
        drive()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    spawn(run, args=(len(NAMES),), nprocs=len(NAMES))
