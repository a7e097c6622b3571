"""A recurrent model in three processes: embedding and decoder are remote references, the LSTM is the trainer's own.

The backward pass crosses processes by hand: what a remote part computed stays there until its gradient comes.
"""

import itertools
import os

import tensorferry.rpc as rpc
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

NAMES = ["trainer", "front", "back"]
TOKENS, WIDTH, HIDDEN = 12, 8, 24
STEPS = 25


class Part:
    """A piece of the model that is owned by one process and called from another."""

    def __init__(self, module, lr, *sizes):
        torch.manual_seed(0)
        self.module = module(*sizes)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=lr)
        self.numbers = itertools.count()
        self.pending = {}

    def forward(self, inputs):
        """The output, and the number by which its gradient is to be handed in."""
        if inputs.is_floating_point():
            inputs.requires_grad_()
        outputs, number = self.module(inputs), next(self.numbers)
        self.pending[number] = inputs, outputs
        return number, outputs.detach()

    def backward(self, number, gradient):
        """Adds to the gradients of the parameters; returns that of the inputs."""
        inputs, outputs = self.pending.pop(number)
        outputs.backward(gradient)
        return inputs.grad

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self):
        return [rpc.RRef(parameter) for parameter in self.module.parameters()]


class Through(torch.autograd.Function):
    """A remote part as one node of the local graph. ``anchor`` requires a gradient, so that the node has one too."""

    @staticmethod
    def forward(context, part, anchor, inputs):
        context.part = part
        context.number, outputs = part.rpc_sync().forward(inputs.detach())
        return outputs

    @staticmethod
    def backward(context, gradient):
        return None, None, context.part.rpc_sync().backward(context.number, gradient)


class SplitRNN(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = rpc.remote("front", Part, args=(nn.Embedding, 0.05, TOKENS, WIDTH))
        self.lstm = nn.LSTM(WIDTH, HIDDEN)
        self.decoder = rpc.remote("back", Part, args=(nn.Linear, 0.05, HIDDEN, TOKENS))
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, tokens, state):
        embedded = Through.apply(self.embedding, self.anchor, tokens)
        outputs, state = self.lstm(embedded, state)
        return Through.apply(self.decoder, self.anchor, outputs), state

    def parameter_rrefs(self):
        """Of the whole model, wherever they are."""
        remote = [part.remote().parameters().to_here() for part in (self.embedding, self.decoder)]
        return [*remote[0], *(rpc.RRef(parameter) for parameter in self.lstm.parameters()), *remote[1]]


def train():
    model = SplitRNN()
    optimizer = torch.optim.Adam(model.lstm.parameters(), lr=0.05)
    owners = [parameter.owner_name() for parameter in model.parameter_rrefs()]
    print("parameters live in", owners)
    text = torch.tensor([(i * i) % TOKENS for i in range(40)])[:, None].repeat(1, 4)
    state = None
    for number in range(1, STEPS + 1):
        start = number % 8
        inputs, targets = text[start : start + 16], text[start + 1 : start + 17]
        outputs, state = model(inputs, state)
        state = tuple(each.detach() for each in state)
        loss = nn.functional.cross_entropy(outputs.reshape(-1, TOKENS), targets.reshape(-1))
        loss.backward()
        steps = [part.rpc_async().step() for part in (model.embedding, model.decoder)]
        optimizer.step()
        optimizer.zero_grad()
        torch.futures.wait_all(steps)
        if number % 5 == 0:
            print(f"step {number}, loss {loss.item():.6f}")


def run(rank, world_size):
    torch.set_num_threads(1)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29514")
    spawn(run, args=(len(NAMES),), nprocs=len(NAMES))
