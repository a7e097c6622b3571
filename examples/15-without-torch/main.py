"""A parameter server with torch, whose trainers have numpy alone: python main.py [--python PYTHON]"""

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path

import tensorferry
import torch
from torch import nn

BATCH = 64
GOAL = 0.9  # of the test pictures


class ParameterServer:
    """Owns a model of one layer. Its trainers call it by the names of its methods."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pictures, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
        self.pictures = torch.from_numpy(pictures).float()[order] / 16
        self.labels = torch.from_numpy(labels)[order]
        self.layer = nn.Linear(64, 10)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.01)
        self.lock = threading.Lock()
        self.steps = 0

    def hello(self, name: str) -> str:
        return f"Hello {name}, this is a server with torch {torch.__version__.split('+')[0]}."

    def divide(self, a: float, b: float) -> float:
        return a / b

    def work(self, seed: int) -> dict[str, torch.Tensor]:
        """Returns the weights and a batch of pictures with their labels."""
        chosen = torch.randint(360, len(self.labels), (BATCH,), generator=torch.Generator().manual_seed(seed))
        with self.lock:
            weight, bias = (parameter.detach().clone() for parameter in self.layer.parameters())
        return {"weight": weight, "bias": bias, "pictures": self.pictures[chosen], "labels": self.labels[chosen]}

    def push(self, gradients: list[torch.Tensor]) -> int:
        """Takes one step. The gradients of numpy have arrived as tensors."""
        with self.lock:
            for parameter, gradient in zip(self.layer.parameters(), gradients):
                parameter.grad = gradient
            self.optimizer.step()
            self.steps += 1
            return self.steps

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def accuracy(self) -> float:
        right = self.layer(self.pictures[:360]).argmax(1) == self.labels[:360]
        return float(right.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the trainers")
    parser.add_argument("--steps", type=int, default=150, help="of each trainer")
    options = parser.parse_args()

    torch.set_num_threads(1)
    store = tensorferry.StoreServer()
    connected = tensorferry.connect_store("127.0.0.1", store.port)
    server = ParameterServer()
    with tensorferry.Agent("server", store=connected) as agent:
        for name in ("hello", "divide", "work", "push", "same"):
            agent.expose(getattr(server, name))
        program = [options.python, str(Path(__file__).parent / "trainer.py"), f"store://127.0.0.1:{store.port}"]
        names = ["trainer0", "trainer1"]
        environment = dict(os.environ)
        if options.python != sys.executable:
            environment.pop("PYTHONPATH", None)  # for packages of this interpreter
        trainers = [
            subprocess.Popen([*program, name, str(options.steps)], stdin=subprocess.PIPE, text=True, env=environment)
            for name in names
        ]
        for name in names:
            print(agent.rpc_sync(name, "describe", wait_for_ready=True), flush=True)
        for trainer in trainers:
            assert trainer.stdin is not None
            trainer.stdin.write("begin\n")
            trainer.stdin.close()
        if any([trainer.wait(300) for trainer in trainers]):
            raise SystemExit("a trainer has failed")
        reached = server.accuracy()
        print(f"{server.steps} steps, accuracy on 360 pictures never trained on: {reached:.3f}")
        if reached <= GOAL:
            raise SystemExit(f"accuracy {reached:.3f} is not above {GOAL}")
        agent.leave()


if __name__ == "__main__":
    main()
