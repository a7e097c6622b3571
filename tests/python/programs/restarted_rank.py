"""A rank under torchrun. Rank 1 is killed in the first round; torchrun starts all again, at a store that lives on.

restarted_rank.py group|rpc       prints "done RANK RESTARTS" when all its calls were right
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import tensorferry.rpc as rpc
import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
VICTIM, LAST_STEP = 1, 3


def die_in_the_first_round(step: int) -> None:
    if RESTARTS == 0 and RANK == VICTIM and step == LAST_STEP - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def group() -> None:
    import tensorferry.c10d  # noqa: F401

    dist.init_process_group("tensorferry", timeout=timedelta(seconds=60))
    for step in range(LAST_STEP):
        ones = torch.ones(100_000)
        dist.all_reduce(ones)
        assert ones[0].item() == SIZE
        die_in_the_first_round(step)
    pair = dist.new_group([0, VICTIM])
    if RANK <= VICTIM:
        dist.barrier(group=pair)
    dist.barrier()
    dist.destroy_process_group()


def calls() -> None:
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=SIZE)
    peer = f"worker{(RANK + 1) % SIZE}"
    for step in range(LAST_STEP):
        assert rpc.rpc_sync(peer, torch.add, args=(torch.ones(10), step), timeout=60)[0].item() == 1 + step
        die_in_the_first_round(step)
    rpc.shutdown()


{"group": group, "rpc": calls}[sys.argv[1]]()
print(f"done {RANK} {RESTARTS}", flush=True)
