"""A parameter server that waits for all trainers, makes one step, and answers them together with the new model."""

import os
import threading

import tensorferry.rpc as rpc
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

TRAINERS = 3
NAMES = ["server", *(f"trainer{i}" for i in range(TRAINERS))]
STEPS = 20


class BatchUpdateParameterServer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.lock = threading.Lock()
        self.answer = torch.futures.Future()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.gradients = {}
        self.steps = 0

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(server, trainer, gradients):
        self = server.local_value()
        with self.lock:
            self.gradients[trainer] = gradients
            answer = self.answer
            if len(self.gradients) == TRAINERS:
                for i, parameter in enumerate(self.model.parameters()):
                    parameter.grad = sum(self.gradients[each][i] for each in range(TRAINERS)) / TRAINERS
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.steps += 1
                self.gradients, self.answer = {}, torch.futures.Future()
                answer.set_result(self.model)
        return answer


def train(server, trainer):
    """Runs in the trainer's process, called by the server's."""
    choice = torch.Generator().manual_seed(trainer)
    truth = torch.arange(8.0) / 8
    model = server.rpc_sync().get_model()
    for _ in range(STEPS):
        inputs = torch.randn(32, 8, generator=choice)
        loss = nn.functional.mse_loss(model(inputs)[:, 0], inputs @ truth)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model = rpc.rpc_sync(
            server.owner(),
            BatchUpdateParameterServer.update_and_fetch_model,
            args=(server, trainer, gradients),
        )
        model.zero_grad()
    return loss.item()


def lead():
    server = rpc.RRef(BatchUpdateParameterServer())
    futures = [rpc.rpc_async(f"trainer{i}", train, args=(server, i), timeout=0) for i in range(TRAINERS)]
    losses = torch.futures.wait_all(futures)
    print("last losses", *(f"{loss:.6f}" for loss in losses))
    learned = server.local_value().model
    print(f"{server.local_value().steps} steps, weights", *(f"{w:.5f}" for w in learned.weight[0].tolist()))


def run(rank, world_size):
    torch.set_num_threads(1)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if rank == 0:
        lead()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    spawn(run, args=(len(NAMES),), nprocs=len(NAMES))
