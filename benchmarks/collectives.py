"""Collective operations by each of their algorithms: python -m benchmarks.collectives [--ranks 2 4] [--messages].

Prints the medians from which the table in rpc/collectives/choose.cpp is made: it shows where two algorithms cross. The
algorithms are measured in turns, and every input is rewritten before each operation. A sample is the time from a common
start to the end of the slowest rank. With --messages the ranks have no board and go by sockets, as between hosts.

The rows `group-*` of benchmarks.run are the operations beside Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tensorferry
import torch
import torch.distributed as dist
from tensorferry.tune import medians_in_turns

REDUCING = ("one_shot", "two_shot", "ring")
ALGORITHMS = {
    "all_reduce": REDUCING,
    "broadcast": ("direct", "ring"),
    "all_gather": ("direct", "ring"),
    "reduce_scatter": ("direct", "ring"),
}


def operation(name: str, bytes_: int, rank: int, size: int) -> tuple[Callable[[], None], Callable[[Any], object]]:
    """Returns what rewrites the inputs, and what runs the operation in a group. `bytes_` are those of all ranks
    together."""
    whole = torch.empty(bytes_ // 4)
    shares = list(whole.tensor_split(size))
    share = torch.empty_like(shares[0])
    runs: dict[str, Callable[[Any], object]] = {
        "all_reduce": lambda group: group.all_reduce(whole).wait(),
        "broadcast": lambda group: group.broadcast(whole, 0).wait(),
        "all_gather": lambda group: group.all_gather(share, shares).wait(),
        "reduce_scatter": lambda group: group.reduce_scatter(share, shares).wait(),
    }

    def rewrite() -> None:
        whole.fill_(rank + 1.0)

    return rewrite, runs[name]


def serve(store: str, rank: int, size: int, times: int, messages: bool, only: str) -> None:
    """Measures each algorithm at each size. Rank 0 prints the medians."""
    torch.set_num_threads(1)
    names = [f"rank{each}" for each in range(size)]
    agent = tensorferry.Agent(
        names[rank], store=dist.FileStore(store, size), trust="registered", channels="basic" if messages else None
    )
    form = tensorferry.collectives.form_group
    start = form(names, agent=agent, label="start")
    for name, algorithms in ALGORITHMS.items():
        if only and name not in only.split(","):
            continue
        if messages and size > 2 and name in ("all_reduce", "broadcast"):
            algorithms = (*algorithms, "two_level")  # on two hosts, as far as the group can tell
        groups = {}
        for each in algorithms:
            where: dict[str, Any] = {"host": f"host {rank % 2}"} if each == "two_level" else {"board": not messages}
            groups[each] = form(names, agent=agent, label=f"{name} {each}", algorithms=f"{name}={each}", **where)
        for power in range(8, 27, 2):
            number = max(5, times // (20 if power > 22 else 1))
            rewrite, run = operation(name, 1 << power, rank, size)
            contestants = {each: (rewrite, partial(run, group)) for each, group in groups.items()}
            seconds = medians_in_turns(start, contestants, number)
            if rank == 0:
                medians = {each: median * 1e6 for each, median in seconds.items()}
                row = {"operation": name, "size": f"{1 << power} B", "ranks": size, "microseconds": medians}
                print(json.dumps(row), flush=True)
    start.barrier().wait()
    os._exit(0)


def run(size: int, times: int, only: str, messages: bool) -> list[dict[str, Any]]:
    """Runs all rows with so many ranks, prints them, and returns them."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.collectives", "--serve", str(Path(folder) / "store")]
        options = ["--size", str(size), "--times", str(times), "--only", only, *(["--messages"] if messages else [])]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), *options], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                row = json.loads(line)
                results.append(row)
                text = "  ".join(f"{each} {median:10.1f} us" for each, median in row["microseconds"].items())
                print(f"{size} ranks  {row['operation']:16} {row['size']:10} {text}", flush=True)
            for rank in ranks:
                rank.wait(60)
        finally:
            for rank in ranks:
                rank.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--messages", action="store_true", help="without a board, by sockets")
    parser.add_argument("--only", default="", help="operations, such as all_reduce,broadcast")
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=200, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.rank, given.size, given.times, given.messages, given.only)
        return
    results = []
    for size in given.ranks:
        results += run(size, 30 if given.quick else 200, given.only, given.messages)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
