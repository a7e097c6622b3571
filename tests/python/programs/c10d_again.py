"""A process that joins one torch.distributed job after another: c10d_again.py FOLDER JOB/RANK...

Each job has two ranks. They meet in a store of its own, or, if its name is a number, at the TCP store of that port. In
the job "dies" rank 1 exits without a word.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import tensorferry.c10d
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])


def own_agents() -> list[str]:
    """The names of the backend's agents, when the groups that have been destroyed are gone."""
    until = time.monotonic() + 30
    while not all(own.idle for own in tensorferry.c10d._own) and time.monotonic() < until:
        time.sleep(0.01)
    return [own.agent.name for own in tensorferry.c10d._own]


before: dict[str, list[str]] = {}
for each in sys.argv[2:]:
    job, rank = each.split("/")
    if job.isdigit():
        method = f"tcp://127.0.0.1:{job}"
        dist.init_process_group("tensorferry", init_method=method, rank=int(rank), world_size=2)
    else:
        store = dist.FileStore(str(folder / job), 2)
        dist.init_process_group("tensorferry", store=store, rank=int(rank), world_size=2)
    total = torch.full((3,), float(rank))
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3
    if job == "dies":
        dist.barrier()
        if rank == "1":
            os._exit(9)
    dist.destroy_process_group()
    agents = own_agents()
    assert len(agents) == 1, agents
    assert before.setdefault(job, agents) == agents
    print("done", job, flush=True)
assert len({name for names in before.values() for name in names}) == len(before)
