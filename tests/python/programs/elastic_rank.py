"""A rank of a world that shrinks and grows: elastic_rank.py FOLDER NAME.

In each round it sums tensors and calls its neighbour until FOLDER/enough exists, and then ends in order. The file
FOLDER/NAME.pid gets its pid, and FOLDER/NAME.size the size of the world, once it has done some steps in it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import tensorferry.c10d  # noqa: F401
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist

folder, name = Path(sys.argv[1]), sys.argv[2]
(folder / f"{name}.pid").write_text(str(os.getpid()))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
dist.init_process_group("tensorferry", timeout=timedelta(seconds=60))
step = 0
while True:
    # The last element tells whether any rank has seen that it is enough, so that all end after the same step.
    ones = torch.ones(1000)
    ones[-1] = float((folder / "enough").exists())
    dist.all_reduce(ones)
    assert ones[0].item() == size
    assert rpc.rpc_sync(f"rank{(rank + 1) % size}", torch.add, args=(torch.ones(2), step))[0].item() == 1 + step
    step += 1
    if step == 3:
        (folder / f"{name}.size").write_text(str(size))
    if ones[-1].item():
        break
dist.destroy_process_group()
rpc.shutdown()
