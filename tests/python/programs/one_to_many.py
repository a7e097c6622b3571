"""One publisher and many actors, forked before any of them has an agent: python one_to_many.py ACTORS MEGABYTES.

Prints what a model of so many megabytes, taken by all actors, costs all processes together, over its bytes.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import tensorferry
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist

kept = []


def take(model: dict[str, torch.Tensor]) -> float:
    """Reads all of it, and keeps it."""
    kept.append(model)
    return sum(float(tensor.sum()) for tensor in model.values())


def forget() -> None:
    kept.clear()
    gc.collect()


def memory() -> int:
    """Bytes of this process, those that it shares with others divided among them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/smaps_rollup has no Pss")


def meet(rank: int, size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    rpc.init_rpc(f"actor{rank}" if rank else "publisher", rank=rank, world_size=size, store=store, timeout=120)


def actor(rank: int, size: int, ports: SimpleQueue[int]) -> None:
    torch.set_num_threads(1)
    meet(rank, size, ports.get())
    rpc.shutdown()


def all_memory(actors: list[str]) -> int:
    return memory() + sum(tensorferry.wait_all(rpc.call_many(actors, memory)))


def main(count: int, megabytes: int) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ports: SimpleQueue[int] = fork.SimpleQueue()
    processes = [fork.Process(target=actor, args=(rank, count + 1, ports)) for rank in range(1, count + 1)]
    for process in processes:
        process.start()
    # After the forks: the server's thread resolves names, by a lock of libc's that a child would find taken for ever.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    for _ in processes:
        ports.put(store.port)
    meet(0, count + 1, store.port)
    actors = [f"actor{rank}" for rank in range(1, count + 1)]

    layers = 8
    model = {f"layer{i}": torch.full(((megabytes << 18) // layers,), float(i)) for i in range(layers)}
    bytes_ = sum(tensor.nbytes for tensor in model.values())
    small = {"layer": torch.ones(1 << 18)}
    for _ in range(3):  # the ways are open, the code has run
        tensorferry.wait_all(rpc.call_many(actors, take, args=(small,)))
        tensorferry.wait_all(rpc.call_many(actors, forget))
    before = all_memory(actors)
    totals = tensorferry.wait_all(rpc.call_many(actors, take, args=(model,)))
    after = all_memory(actors)
    if set(totals) != {take(model)}:
        raise AssertionError(f"not what was sent: {totals}")
    rpc.shutdown()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"an actor ended with {process.exitcode}")
    print(f"{count} actors, {megabytes} MB: {(after - before) / bytes_:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
