"""Collective operations beside Gloo, on one host: python -m benchmarks.collectives [--ranks 2 4] [--quick].

Each rank is a process with two groups, one of each backend. Both are measured in turns, and every input is rewritten
before each operation. A sample is the time from a common start to the end of the slowest rank. Prints the medians and
their ratio.

--crossings prints all_reduce by each algorithm instead, for the table in rpc/collectives/choose.cpp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "64 MB": 1 << 26}
OPERATIONS = ("all_reduce", "all_reduce_empty", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send")
ALGORITHMS = ("one_shot", "two_shot")


def operation(name: str, bytes_: int, rank: int, size: int) -> tuple[Callable[[], None], Callable[[Any], object]]:
    """Returns what rewrites the inputs, and what runs the operation in a group."""
    count = bytes_ // 4
    if name == "all_reduce_empty":
        import tensorferry

        tensor = tensorferry.empty(count)
    else:
        tensor = torch.empty(count)
    share = max(count // size, 1)
    shares = torch.empty(share * size)
    runs: dict[str, Callable[[Any], object]] = {
        "all_reduce": lambda group: dist.all_reduce(tensor, group=group),
        "all_reduce_empty": lambda group: dist.all_reduce(tensor, group=group),
        "broadcast": lambda group: dist.broadcast(tensor, src=0, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(shares, tensor[:share], group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(tensor[:share], shares, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(tensor[: share * size], shares, group=group),
        "send": lambda group: dist.send(tensor, 1, group=group) if rank == 0 else dist.recv(tensor, 0, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }

    def rewrite() -> None:
        tensor.fill_(rank + 1.0)
        shares.fill_(rank + 1.0)

    return rewrite, runs[name]


def measure(groups: dict[str, Any], name: str, bytes_: int, rank: int, size: int, times: int) -> dict[str, list[float]]:
    rewrite, run = operation(name, bytes_, rank, size)
    start = next(iter(groups.values()))
    out: dict[str, list[float]] = {backend: [] for backend in groups}
    for turn in range(times + 2):
        for backend, group in groups.items():
            if name == "send" and rank > 1:
                took = 0.0
            else:
                rewrite()
            dist.barrier(group=start)
            if name != "send" or rank <= 1:
                began = time.perf_counter()
                run(group)
                took = time.perf_counter() - began
            if turn >= 2:
                out[backend].append(took)
    return out


def serve(store: str, rank: int, size: int, times: int, crossings: bool, only: str) -> None:
    import os

    import tensorferry.c10d  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    groups: dict[str, Any] = {}
    if crossings:
        for algorithm in ALGORITHMS:
            os.environ["TENSORFERRY_COLLECTIVES"] = f"all_reduce={algorithm}"
            groups[algorithm] = dist.new_group(backend="tensorferry")
        rows = [("all_reduce", f"{1 << power} B", 1 << power) for power in range(8, 19)]
    else:
        groups = {"tensorferry": dist.new_group(backend="tensorferry"), "gloo": dist.group.WORLD}
        rows = [("barrier", "", 4)]
        rows += [(name, label, bytes_) for name in OPERATIONS for label, bytes_ in SIZES.items()]
    for name, label, bytes_ in rows:
        if only and name not in only.split(","):
            continue
        number = max(3, times // (20 if bytes_ > 1 << 23 else 1))
        samples = measure(groups, name, bytes_, rank, size, number)
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, samples)
        if rank == 0:
            medians = {
                backend: statistics.median(max(each[backend][i] for each in gathered) for i in range(number)) * 1e6
                for backend in groups
            }
            print(json.dumps({"operation": name, "size": label, "ranks": size, "microseconds": medians}), flush=True)
    dist.barrier()
    os._exit(0)


def run(size: int, times: int, crossings: bool, only: str) -> list[dict[str, Any]]:
    """Runs all rows with so many ranks, prints them, and returns them."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.collectives", "--serve", str(Path(folder) / "store")]
        options = ["--size", str(size), "--times", str(times), "--only", only]
        options += ["--crossings"] if crossings else []
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), *options], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                row = json.loads(line)
                results.append(row)
                (first, a), (second, b) = row["microseconds"].items()
                print(
                    f"{size} ranks  {row['operation']:16} {row['size']:8} "
                    f"{first} {a:10.1f} us  {second} {b:10.1f} us  {b / a:6.2f}x",
                    flush=True,
                )
            for rank in ranks:
                rank.wait(60)
        finally:
            for rank in ranks:
                rank.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--crossings", action="store_true")
    parser.add_argument("--only", default="", help="operations, such as all_reduce,broadcast")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=200, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.rank, given.size, given.times, given.crossings, given.only)
        return
    results = []
    for size in given.ranks:
        results += run(size, 30 if given.quick else 200, given.crossings, given.only)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
