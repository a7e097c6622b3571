"""A process that joins one torch.distributed job after another: c10d_again.py FOLDER JOB/RANK...

Each job has two ranks, which meet in a store of its own. A process that ends with the job "dies" exits without a word.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tensorferry.c10d
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
for each in sys.argv[2:]:
    job, rank = each.split("/")
    store = dist.FileStore(str(folder / job), 2)
    dist.init_process_group("tensorferry", store=store, rank=int(rank), world_size=2)
    total = torch.full((3,), float(rank))
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3
    if job == "dies":
        dist.barrier()
        if rank == "1":
            os._exit(9)
    own = [own.agent.name for own in tensorferry.c10d._own]
    assert len(own) == 1, own
    dist.destroy_process_group()
    print("done", job, flush=True)
