"""A server that answers the requests of several clients together: python main.py"""

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
from rich.table import Table
from tensorferry import wait_all
from torch import nn
from torch.multiprocessing.spawn import spawn

WIDTH, LAYERS = 1024, 4
IN_FLIGHT = 4  # requests of each client at once

Answer: TypeAlias = "torch.futures.Future[torch.Tensor]"


class Server:
    """Owns a network. Lives in one process; the clients hold remote references to it.

    ``@rpc.batch(max_size=256)`` over a method of lists of rows does what `together` and `_serve` do by hand.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        self.passes, self.rows = 0, 0
        self.changed = threading.Condition()
        self.waiting: list[tuple[torch.Tensor, Answer]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @torch.no_grad()
    def one(self, row: torch.Tensor) -> torch.Tensor:
        """An ordinary function: each request is a pass through the network of its own."""
        return torch.as_tensor(self.network(row))

    @rpc.functions.async_execution
    def together(self, row: torch.Tensor) -> Answer:
        """Answers later: no thread is held, so that any number of requests can wait for the next pass."""
        answer: Answer = torch.futures.Future()
        with self.changed:
            self.waiting.append((row, answer))
            self.changed.notify()
        return answer

    def _serve(self) -> None:
        """Takes the requests that came during the last pass. No request waits for a batch to fill up."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                batch, self.waiting = self.waiting, []
                self.passes, self.rows = self.passes + 1, self.rows + len(batch)
            with torch.no_grad():
                results = self.network(torch.stack([row for row, _ in batch]))
            for (_, answer), result in zip(batch, results):
                answer.set_result(result)

    def rows_a_pass(self) -> float:
        with self.changed:
            return self.rows / max(1, self.passes)


def ask(server: rpc.RRef[Server], method: str, client: int, requests: int) -> torch.Tensor:
    """A client's work: runs in its process, called by the driver. Some of its requests are always under way."""
    rows = torch.randn(requests, WIDTH, generator=torch.Generator().manual_seed(client))
    answers: list[torch.Tensor] = []
    under_way: list[Answer] = []
    for row in rows:
        under_way.append(getattr(server.rpc_async(), method)(row))
        if len(under_way) == IN_FLIGHT:
            answers.append(under_way.pop(0).wait())
    answers += wait_all(under_way)
    return torch.stack([answer.sum() for answer in answers])


def drive(clients: int, requests: int) -> None:
    """Lets all clients ask first one way, then the other, and compares."""
    server = rpc.remote("server", Server)
    took: dict[str, float] = {}
    answers: dict[str, list[torch.Tensor]] = {}
    for method in ("one", "together"):
        for count in (IN_FLIGHT, requests):  # the first few wake everything up
            began = time.perf_counter()
            calls = [rpc.rpc_async(f"client{i}", ask, args=(server, method, i, count)) for i in range(clients)]
            answers[method] = wait_all(calls)
            took[method] = time.perf_counter() - began
    same = all(torch.allclose(a, b, atol=1e-3) for a, b in zip(*answers.values()))

    table = Table("requests", "a second", "rows a pass", title=f"{clients} clients, {IN_FLIGHT} requests each at once")
    table.add_row("one by one", f"{clients * requests / took['one']:.0f}", "1")
    table.add_row("together", f"{clients * requests / took['together']:.0f}", f"{server.rpc_sync().rows_a_pass():.1f}")
    console = Console()
    console.print(table)
    console.print(f"the answers are the same: {same}; together is {took['one'] / took['together']:.1f} times as fast,")
    console.print(f"as a pass reads {LAYERS * WIDTH * WIDTH >> 18} MB of weights, for one row or for all that wait")
    if not same:
        raise SystemExit("the answers differ")


def run(rank: int, world_size: int, requests: int, init_method: str = "env://") -> None:
    torch.set_num_threads(1)
    clients = world_size - 2
    if clients < 1:
        raise SystemExit(f"{world_size} processes: a driver, a server and at least one client need 3")
    names = ["driver", "server", *(f"client{i}" for i in range(clients))]
    rpc.init_rpc(names[rank], rank=rank, world_size=world_size, init_method=init_method)
    if rank == 0:
        drive(clients, requests)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200, help="of each client")
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started us: a driver, a server, and the rest are clients
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.requests)
    processes = options.clients + 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, options.requests, f"file://{folder}/store")
        spawn(run, args=arguments, nprocs=processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
