"""Data-parallel training with a parameter server held by a remote reference: python main.py"""

import argparse
import os
import tempfile
import threading
import time
from typing import TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry.rpc as rpc
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tensorferry import on_default_stream, wait_all
from torch import nn
from torch.multiprocessing.spawn import spawn

BATCH = 32
GOAL = 0.9  # of the test pictures

Weights: TypeAlias = "torch.futures.Future[list[torch.Tensor]]"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures as rows of 64 numbers, and what they show; in an order that is the same in every process."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[part]
    return torch.from_numpy(pictures).float()[order] / 16, torch.from_numpy(labels)[order]


TEST, TRAIN = slice(0, 360), slice(360, None)


class ParameterServer:
    """Owns the network. Lives in one process; everybody else holds a remote reference to it."""

    def __init__(self, trainers: int, device: torch.device) -> None:
        self.device = device
        self.network = network().to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.003)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.round = self._next_round()
        self.waiting = 0
        self.steps, self.loss = 0, float("nan")

    def _next_round(self) -> Weights:
        """Completes after the next step; a caller that waits for it also waits for the GPU's part."""
        return torch.futures.Future(devices=[] if self.device.type == "cpu" else [self.device])

    def weights(self) -> list[torch.Tensor]:
        with on_default_stream(self.device):
            return [parameter.detach().clone() for parameter in self.network.parameters()]

    def progress(self) -> tuple[int, float]:
        return self.steps, self.loss

    @staticmethod
    @rpc.functions.async_execution
    def push(server: "rpc.RRef[ParameterServer]", gradients: list[torch.Tensor], loss: float) -> Weights:
        """Adds one trainer's gradients to the step; the answer, the new weights, comes when all have pushed."""
        self = server.local_value()
        with self.lock, on_default_stream(self.device):
            for parameter, gradient in zip(self.network.parameters(), gradients):
                share = gradient / self.trainers
                parameter.grad = share if parameter.grad is None else parameter.grad + share
            self.loss = loss
            self.waiting += 1
            answer, last = self.round, self.waiting == self.trainers
            if last:
                self._step()
                weights = self.weights()
        if last:
            answer.set_result(weights)  # answers everybody who waits, without the lock
        return answer

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.round, self.waiting = self._next_round(), 0


def place(device: str, index: int) -> torch.device:
    """The CPU, or one of the GPUs that there are."""
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", index % torch.cuda.device_count())


def train(server: rpc.RRef[ParameterServer], index: int, trainers: int, steps: int, device: str) -> int:
    """One trainer's work: runs in its process, called by the driver. Returns how many pictures it has seen."""
    here, there = place(device, index), place(device, 0)
    pictures, labels = (data[index::trainers].to(here) for data in digits(TRAIN))
    model, choice = network().to(here), torch.Generator().manual_seed(index)
    weights = server.rpc_sync().weights()
    for _ in range(steps):
        for parameter, newest in zip(model.parameters(), weights):
            parameter.data.copy_(newest)
        batch = torch.randint(len(labels), (BATCH,), generator=choice).to(here)
        loss = nn.functional.cross_entropy(model(pictures[batch]), labels[batch])
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        # Gradients go from this device to the server's, weights come the other way.
        arguments = server, gradients, loss.item()
        weights = rpc.rpc_sync(server.owner(), ParameterServer.push, args=arguments, device={here: there})
    return steps * BATCH


def accuracy(weights: list[torch.Tensor]) -> float:
    model = network()
    for parameter, newest in zip(model.parameters(), weights):
        parameter.data.copy_(newest)
    pictures, labels = digits(TEST)
    return float((model(pictures).argmax(1) == labels).float().mean())


def drive(trainers: int, epochs: int, device: str) -> None:
    """Starts the server and the trainers, shows how far they are, and judges the result."""
    console = Console()
    steps = epochs * (1437 // (BATCH * trainers))
    server = rpc.remote("server", ParameterServer, args=(trainers, place(device, 0)))
    where = "" if device == "cpu" else ", on GPUs"
    console.print(f"a parameter server in {server.owner_name()!r}, {trainers} trainers, {steps} steps{where}")
    began = time.perf_counter()
    calls = [
        rpc.rpc_async(f"trainer{i}", train, args=(server, i, trainers, steps, device), timeout=0)
        for i in range(trainers)
    ]
    columns = TextColumn("training"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=steps)
        while not all(call.done() for call in calls):
            done, loss = server.rpc_sync().progress()
            progress.update(task, completed=done, description=f"step {done}/{steps}, loss {loss:.3f}")
            time.sleep(0.1)
        done, loss = server.rpc_sync().progress()
        progress.update(task, completed=done, description=f"step {done}/{steps}, loss {loss:.3f}")
    seen = sum(wait_all(calls))
    reached = accuracy(server.rpc_sync().weights())
    console.print(f"{seen} pictures in {time.perf_counter() - began:.1f} s, {done} steps")
    console.print(f"[bold]accuracy on 360 pictures never trained on: {reached:.3f}[/bold]")
    if reached <= GOAL:
        raise SystemExit(f"accuracy {reached:.3f} is not above {GOAL}")


def run(rank: int, world_size: int, epochs: int, device: str, init_method: str = "env://") -> None:
    torch.set_num_threads(1)
    trainers = world_size - 2
    if trainers < 1:
        raise SystemExit(f"{world_size} processes: a driver, a server and at least one trainer need 3")
    names = ["driver", "server", *(f"trainer{i}" for i in range(trainers))]
    rpc.init_rpc(names[rank], rank=rank, world_size=world_size, init_method=init_method)
    if rank == 0:
        drive(trainers, epochs, device)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where networks and gradients are")
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started us: a driver, a server, and the rest are trainers
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.epochs, options.device)
    processes = options.trainers + 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, options.epochs, options.device, f"file://{folder}/store")
        spawn(run, args=arguments, nprocs=processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
